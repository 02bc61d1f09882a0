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
        truncated: int64 `[N]`, 1 where the completion was cut at the length limit.
        rollout_logps: float32 `[sum of completion lengths]`, the engine's log-probs.
        rewards: float32 `[N]`, NaN where invalid.
    """

    token_ids: Tensor
    prompt_lengths: Tensor
    completion_lengths: Tensor
    truncated: Tensor
    rollout_logps: Tensor
    rewards: Tensor

    def __len__(self) -> int:
        return len(self.rewards)

    def tensors(self) -> list[Tensor]:
        """The fields in order, for sending."""
        return [getattr(self, item.name) for item in fields(self)]


def round_batch(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    rewards: Sequence[float],
    truncated: Sequence[bool],
) -> RoundBatch:
    """Puts `N` prompt / completion pairs, one after another, into flat tensors."""
    flat = [token for pair in zip(prompts, completions, strict=True) for part in pair for token in part]
    return RoundBatch(
        token_ids=torch.tensor(flat, dtype=torch.long),
        prompt_lengths=torch.tensor([len(prompt) for prompt in prompts]),
        completion_lengths=torch.tensor([len(completion) for completion in completions]),
        truncated=torch.tensor(truncated, dtype=torch.long),
        rollout_logps=torch.tensor([value for row in logprobs for value in row], dtype=torch.float32),
        rewards=torch.tensor(rewards, dtype=torch.float32),
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


def collate(batch: RoundBatch, samples: Sequence[int], device: torch.device, packing: bool = False) -> MicroBatch:
    """The given samples in one micro-batch: a row each, padded on the right to their own longest, or with
    `packing` one after another in a single row."""
    chosen = torch.tensor(samples, dtype=torch.long)
    prompt_lengths, completion_lengths = batch.prompt_lengths[chosen], batch.completion_lengths[chosen]
    totals = batch.prompt_lengths + batch.completion_lengths
    starts = (totals.cumsum(0) - totals)[chosen]
    logp_starts = (batch.completion_lengths.cumsum(0) - batch.completion_lengths)[chosen]
    lengths = totals[chosen]

    columns = torch.arange(int(lengths.max()))
    real = columns < lengths[:, None]
    # Where each sample's first token lies in the flattened rows.
    firsts = lengths.cumsum(0) - lengths if packing else torch.arange(len(chosen)) * len(columns)
    token_ids = batch.token_ids[torch.where(real, starts[:, None] + columns, 0)].masked_fill(~real, 0)
    position_ids = None
    if packing:
        token_ids = token_ids[real][None]
        position_ids = columns.expand(real.shape)[real][None]

    steps = torch.arange(int(completion_lengths.max()))
    mask = steps < completion_lengths[:, None]
    rollout_logps = torch.zeros(mask.shape)
    if len(steps):
        rollout_logps[mask] = batch.rollout_logps[(logp_starts[:, None] + steps)[mask]]
    targets_at = (firsts[:, None] + prompt_lengths[:, None] + steps)[mask]
    return MicroBatch(
        token_ids=token_ids.to(device),
        position_ids=None if position_ids is None else position_ids.to(device),
        # Hidden state p predicts token p + 1, so the completion's first token is predicted by the prompt's last.
        positions=(targets_at - 1).to(device),
        targets=token_ids.flatten()[targets_at].to(device),
        mask=mask.to(device),
        truncated=batch.truncated[chosen].bool().to(device),
        rollout_logps=rollout_logps.to(device),
        samples=chosen,
    )
