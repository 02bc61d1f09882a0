"""How far the policy has moved since the run began: its log-probs of a few completions of the first round, then and
now. Unlike the share of changed weights, it means the same in every dtype, and unlike the KL it needs no reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swift_r1.models.multimodal import placeholders
from swift_r1.rollout.trajectory import TokenSequence
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.base import Backend
from swift_r1.training.batching import Batching, RoundBatch, collate, round_batch

_COMPLETIONS = 4
# of each, at most: the end of its prompt and the beginning of its answer, so that a pass over them costs next to
# nothing
_PROMPT_TOKENS = 64
_TOKENS = 64
_EVERY = 4  # rounds, after the first ones
_FIRST = 8


@dataclass(frozen=True, slots=True)
class Movement:
    """Some completions of a run's first round, and the log-probs that the policy gave their `K` tokens before its
    first update.

    Example: one completion, `[7, 8]`, of the prompt `[5, 6]`:
        completions [([5, 6], [7, 8])], logps [-0.1, -0.4]
    """

    completions: tuple[tuple[list[int], list[int]], ...]
    logps: tuple[float, ...]

    @classmethod
    def of_round(
        cls, batch: RoundBatch, backend: Backend, batching: Batching, ranks: Ranks
    ) -> Movement:
        """Returns the beginning of a run from its first round. Collective."""
        chosen = _chosen(batch, placeholders(backend.model.config))
        return cls(chosen, tuple(_logprobs(chosen, backend, batching, ranks).tolist()))

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Movement | None:
        """Returns what `state` holds of a checkpoint; None where it has nothing."""
        if not state:
            return None
        completions = tuple((prompt, answer) for prompt, answer in state["completions"])
        return cls(completions, tuple(state["logps"]))

    def due(self, round_: int) -> bool:
        """Says whether it is measured before round `round_`, from 1: in each of the first, then in some."""
        return 1 < round_ <= _FIRST or round_ % _EVERY == 0

    def metrics(self, backend: Backend, batching: Batching, ranks: Ranks) -> dict[str, float]:
        """Returns `policy/moved`, the mean change of a token's log-prob since the start, without its sign, and
        `policy/kl_to_start`, an estimate of KL(start, now) from tokens of the start (k3 of Schulman, "Approximating KL
        divergence"), both in nats. Collective."""
        change = _logprobs(self.completions, backend, batching, ranks) - torch.tensor(
            self.logps, dtype=torch.float64
        )
        kl = change.exp() - 1 - change
        return {"policy/moved": change.abs().mean().item(), "policy/kl_to_start": kl.mean().item()}


def _chosen(batch: RoundBatch, never: tuple[int, ...]) -> tuple[tuple[list[int], list[int]], ...]:
    """Returns some rows, far from each other, shortened, and without the tokens `never`."""
    count = len(batch.owners)
    places = sorted({number * count // _COMPLETIONS for number in range(_COMPLETIONS)})
    chosen = []
    for place in places:
        start = int(batch.starts[place])
        own = start + int(batch.prompt_lengths[place])
        end = own + int(batch.completion_lengths[place])
        # placeholders say nothing without their images, which are not kept
        text = [token for token in batch.token_ids[start:own].tolist() if token not in never]
        prompt = text[-_PROMPT_TOKENS:]
        chosen.append((prompt, batch.token_ids[own : min(end, own + _TOKENS)].tolist()))
    return tuple(chosen)


def _logprobs(
    completions: tuple[tuple[list[int], list[int]], ...],
    backend: Backend,
    batching: Batching,
    ranks: Ranks,
) -> Tensor:
    """Returns float64 `[K]`, at temperature 1. Collective."""
    rows = [TokenSequence.of_answer(prompt, answer) for prompt, answer in completions]
    batch = round_batch(rows, rewards=[0.0] * len(rows))
    return logprobs_of(batch, backend, batching, ranks, temperature=1.0)


@torch.no_grad()
def logprobs_of(
    batch: RoundBatch, backend: Backend, batching: Batching, ranks: Ranks, temperature: float
) -> Tensor:
    """Returns the policy's log-probs of the `K` trained tokens of a few rows, float64 `[K]`. Each rank computes all of
    it. Collective."""
    micro = collate(
        batch,
        [(number,) for number in range(len(batch.owners))],
        batching.form,
        ranks.device,
        own_attention=batching.own_attention,
        sequence=ranks.sequence,
        vision=batching.vision,
    )
    return backend.logprobs(micro.inputs, temperature).logps.double().cpu()
