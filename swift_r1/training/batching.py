"""From a round's ragged completions to the micro-batches of each rank and optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from swift_r1.training.policy import MicroBatch


@dataclass(frozen=True, slots=True)
class RoundBatch:
    """All completions of one round, ragged and flat, the same on every rank.

    Attributes:
        token_ids: int64 `[sum of lengths]`, for each completion its prompt and then its own tokens.
        prompt_lengths: int64 `[N]`.
        completion_lengths: int64 `[N]`.
        rollout_logps: float32 `[sum of completion lengths]`, the engine's log-probs.
        advantages: float32 `[N]`.
    """

    token_ids: Tensor
    prompt_lengths: Tensor
    completion_lengths: Tensor
    rollout_logps: Tensor
    advantages: Tensor

    def __len__(self) -> int:
        return len(self.advantages)

    def tensors(self) -> list[Tensor]:
        """The fields in order, for sending."""
        return [getattr(self, item.name) for item in fields(self)]


def round_batch(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    advantages: Tensor,
) -> RoundBatch:
    """Packs `N` prompt / completion pairs; `advantages` float32 `[N]`."""
    flat = [token for pair in zip(prompts, completions, strict=True) for part in pair for token in part]
    return RoundBatch(
        token_ids=torch.tensor(flat, dtype=torch.long),
        prompt_lengths=torch.tensor([len(prompt) for prompt in prompts]),
        completion_lengths=torch.tensor([len(completion) for completion in completions]),
        rollout_logps=torch.tensor([value for row in logprobs for value in row], dtype=torch.float32),
        advantages=advantages.float(),
    )


def split_micro_batches(lengths: Sequence[int], world_size: int, micro_batches: int) -> list[list[list[int]]]:
    """Which samples each rank trains in each micro-batch of one optimizer step.

    Samples of similar length share a micro-batch (little padding), and the ranks' k-th micro-batches are
    alike (nobody waits).

    Args:
        lengths: prompt and completion tokens of each of `world_size * micro_batches * size` samples.

    Returns:
        `[world_size][micro_batches]` lists of sample indices, each of the same size.

    Raises:
        ValueError: if the samples cannot be dealt evenly.
    """
    if not lengths or len(lengths) % (world_size * micro_batches):
        raise ValueError(f"{len(lengths)} completions cannot be dealt to {world_size} x {micro_batches} micro-batches")
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    size = len(lengths) // (world_size * micro_batches)
    plan: list[list[list[int]]] = [[] for _ in range(world_size)]
    for start in range(0, len(lengths), world_size * size):
        block = longest_first[start : start + world_size * size]
        for rank in range(world_size):
            plan[rank].append(block[rank::world_size])
    return plan


def collate(batch: RoundBatch, samples: Sequence[int], device: torch.device) -> MicroBatch:
    """The given samples side by side, padded on the right to their own longest."""
    chosen = torch.tensor(samples, dtype=torch.long)
    prompt_lengths, completion_lengths = batch.prompt_lengths[chosen], batch.completion_lengths[chosen]
    totals = batch.prompt_lengths + batch.completion_lengths
    starts = (totals.cumsum(0) - totals)[chosen]
    logp_starts = (batch.completion_lengths.cumsum(0) - batch.completion_lengths)[chosen]
    width, longest = int(totals[chosen].max()), int(completion_lengths.max())

    columns = torch.arange(width)
    real = columns < totals[chosen, None]
    token_ids = batch.token_ids[torch.where(real, starts[:, None] + columns, 0)].masked_fill(~real, 0)

    steps = torch.arange(longest)
    mask = steps < completion_lengths[:, None]
    rollout_logps = torch.zeros(mask.shape)
    if longest:
        rollout_logps[mask] = batch.rollout_logps[(logp_starts[:, None] + steps)[mask]]
    # Hidden state p predicts token p + 1, so the completion's first token is predicted by the prompt's last.
    columns_of_targets = (prompt_lengths[:, None] + steps)[mask]
    rows = torch.arange(len(chosen))[:, None].expand(mask.shape)[mask]
    return MicroBatch(
        token_ids=token_ids.to(device),
        positions=(rows * width + columns_of_targets - 1).to(device),
        targets=token_ids[rows, columns_of_targets].to(device),
        mask=mask.to(device),
        rollout_logps=rollout_logps.to(device),
        advantages=batch.advantages[chosen].to(device),
        samples=chosen,
    )
