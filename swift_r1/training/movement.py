"""How far the policy has moved since the run began: its log-probs of a few completions of the first round, then and
now. Unlike the share of changed weights, it means the same in every dtype, and unlike the KL it needs no reference."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swift_r1.rollout.trajectory import TokenSequence
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.base import Backend
from swift_r1.training.batching import Batching, RoundBatch, collate, round_batch

_COMPLETIONS = 4
# of each, at most: the end of its prompt, all of it where it has images, and the beginning of its answer
_PROMPT_TOKENS = 8192
_TOKENS = 64
_EVERY = 4  # rounds, after the first ones
_FIRST = 8


@dataclass(frozen=True, slots=True)
class KeptRow:
    """The beginning of a row of a run's first round, as JSON has it.

    Example: `KeptRow([5, 6], [7, 8, 9], [True, True, False])`: the last token is not the policy's
    """

    prompt: list[int]
    answer: list[int]
    mask: list[bool]
    images: tuple[str, ...] = ()  # of the prompt: their files in base64

    @classmethod
    def of(cls, batch: RoundBatch, row: int) -> KeptRow:
        """Returns what is kept of a row of the round."""
        prompt = batch.prompt(row)
        begin = 0 if prompt.images else -_PROMPT_TOKENS
        length = min(_TOKENS, int(batch.completion_lengths[row]))
        own = int(batch.starts[row] + batch.prompt_lengths[row])
        masked = int(batch.own_starts[row])
        return cls(
            list(prompt.token_ids[begin:]),
            batch.token_ids[own : own + length].tolist(),
            batch.loss_mask[masked : masked + length].bool().tolist(),
            tuple(base64.b64encode(one).decode() for one in prompt.images),
        )

    def batch(self) -> RoundBatch:
        row = TokenSequence(self.prompt, self.answer, [0.0] * len(self.answer), self.mask)
        return round_batch([row], [0.0]).with_images([list(map(base64.b64decode, self.images))])


@dataclass(frozen=True, slots=True)
class Movement:
    """Some rows of a run's first round, and the log-probs that the policy gave their `K` tokens before its first
    update.

    Example: one completion, `[7, 8]`, of the prompt `[5, 6]`:
        rows [KeptRow([5, 6], [7, 8], [True, True])], logps [-0.1, -0.4]
    """

    rows: tuple[KeptRow, ...]
    logps: tuple[float, ...]

    @classmethod
    def of_round(
        cls, batch: RoundBatch, backend: Backend, batching: Batching, ranks: Ranks
    ) -> Movement:
        """Returns the beginning of a run from its first round. Collective."""
        written = batch.token_mask()[:, :_TOKENS].any(1).nonzero().flatten().tolist()
        # far from each other
        places = {number * len(written) // _COMPLETIONS for number in range(_COMPLETIONS)}
        rows = tuple(KeptRow.of(batch, written[place]) for place in sorted(places) if written)
        return cls(rows, tuple(_logprobs(rows, backend, batching, ranks).tolist()))

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Movement | None:
        """Returns what `state` holds of a checkpoint; None where it has nothing."""
        if not state:
            return None
        rows = tuple(KeptRow(**row) for row in state["rows"])
        return cls(rows, tuple(state["logps"]))

    def due(self, round_: int) -> bool:
        """Says whether it is measured before round `round_`, from 1: in each of the first, then in some."""
        return bool(self.rows) and (1 < round_ <= _FIRST or round_ % _EVERY == 0)

    def metrics(self, backend: Backend, batching: Batching, ranks: Ranks) -> dict[str, float]:
        """Returns `policy/moved`, the mean change of a token's log-prob since the start, without its sign, and
        `policy/kl_to_start`, an estimate of KL(start, now) from tokens of the start (k3 of Schulman, "Approximating KL
        divergence"), both in nats. Collective."""
        change = _logprobs(self.rows, backend, batching, ranks) - torch.tensor(
            self.logps, dtype=torch.float64
        )
        kl = change.exp() - 1 - change
        return {"policy/moved": change.abs().mean().item(), "policy/kl_to_start": kl.mean().item()}


def _logprobs(
    rows: tuple[KeptRow, ...], backend: Backend, batching: Batching, ranks: Ranks
) -> Tensor:
    """Returns float64 `[K]`, at temperature 1. Each row goes through the model alone, which takes no more memory than
    training it. Collective."""
    found = [logprobs_of(row.batch(), backend, batching, ranks, temperature=1.0) for row in rows]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *found])


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
