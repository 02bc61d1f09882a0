"""Which completions the token record has, and what the loss saw and did of each of their tokens, from every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from swift_r1.algorithms.losses import LossOutput
from swift_r1.models.policy import MicroBatch
from swift_r1.record.token_record import TokenRows
from swift_r1.rollout.scoring import ScoredRound
from swift_r1.rollout.trajectory import Trajectory
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.batching import RoundBatch, filled_places, places_of, starts_of
from swift_r1.wire.protocol import versions_of_tokens

# the last with a reference policy only
_OF_RANKS = ("logps", "entropies", "ratios", "clipped", "mask", "ref_logps")

Recorded = Mapping[str, Any]
"""A row of a completion that is recorded: its `sample` (its number in the round), round_step, prompt_id, request_id,
number, group, sequence (which of the completion's rows it is), its `weight_versions` as `(first token, version)` of each
stretch, and whether its experts are recorded (`routed`)."""


def chosen(
    scored: ScoredRound | None, step: int, size: int, share: float, ranks: Ranks
) -> list[Recorded]:
    """The completions of a round, begun at `step`, that are recorded: those of about `share` of the prompts (0: none,
    1: all), at least one prompt in each `size` completions, which make an optimizer step. A prompt is chosen by its id
    alone, and so again when it comes again. Only a record of all has an engine's experts, since only that can be
    replayed. Collective; ranks other than 0, which pass None, get the `sample` alone.
    """
    if not share:
        return []
    found: dict[int, dict[str, Any]] = {}
    trained = () if scored is None else scored.trained
    row = 0
    for first in range(0, len(trained), size):
        places = [
            _place(trajectory.prompt.prompt_id) for trajectory in trained[first : first + size]
        ]
        most = max(share, min(places))
        for trajectory, place in zip(trained[first : first + size], places, strict=True):
            if place <= most:
                found |= enumerate(_who(trajectory, step, share >= 1), start=row)
            row += len(trajectory.rows)
    samples = ranks.broadcast(
        None if scored is None else [torch.tensor(list(found), dtype=torch.long)]
    )[0].tolist()
    return [{"sample": sample} | found.get(sample, {}) for sample in samples]


def _place(prompt_id: str) -> float:
    """Returns a number from 0 to 1, another for each prompt."""
    return (
        int.from_bytes(hashlib.blake2b(prompt_id.encode(), digest_size=8).digest(), "big") / 2**64
    )


def _who(trajectory: Trajectory, step: int, whole: bool = False) -> list[dict[str, Any]]:
    """Returns the ids that each of its rows has."""
    return [
        {
            "round_step": step,
            "prompt_id": trajectory.prompt.prompt_id,
            "request_id": trajectory.request_id,
            "number": trajectory.number,
            "group": trajectory.group,
            "sequence": number,
            "weight_versions": one.versions,
            "routed": whole and one.routes is not None,
        }
        for number, one in enumerate(trajectory.sequences)
    ]


class StepTokens:
    """Keeps what the loss of an optimizer step saw and did of the recorded completions' tokens (there must be some).
    Every rank adds its own micro-batches."""

    def __init__(
        self, recorded: Sequence[Recorded], batch: RoundBatch, with_reference: bool
    ) -> None:
        self._recorded = recorded
        self._batch = batch
        self._samples = torch.tensor([one["sample"] for one in recorded])
        self._lengths = batch.completion_lengths[self._samples]
        self._starts = torch.full((len(batch.owners),), -1)  # of a row's values; -1: not recorded
        self._starts[self._samples] = starts_of(self._lengths)
        self._names = _OF_RANKS if with_reference else _OF_RANKS[:-1]
        # of each micro-batch: samples, and on its device `[names, R, T]`
        self._found: list[tuple[Tensor, Tensor]] = []

    def add(self, micro: MicroBatch, logps: Tensor, entropies: Tensor, result: LossOutput) -> None:
        """Takes what went into the loss of a micro-batch, `[B, T]`, and what came out."""
        rows = (self._starts[micro.samples] >= 0).nonzero().flatten()
        if not len(rows):
            return
        assert result.tokens is not None
        of_loss = (result.tokens.ratios, result.tokens.clipped, result.tokens.kept)
        known = [
            one for one in (logps.detach(), entropies, *of_loss, micro.ref_logps) if one is not None
        ]
        of_device = rows.to(logps.device, non_blocking=True)
        self._found.append(
            (micro.samples[rows], torch.stack([one[of_device].float() for one in known]))
        )

    def rows(self, advantages: Tensor, ranks: Ranks) -> TokenRows | None:
        """Returns all of it, with the `advantages` of the round (`[R]`, or `[R, longest]`); on rank 0. Collective."""
        # 0 where another rank has it
        values = torch.zeros(len(self._names), int(self._lengths.sum()))
        for samples, found in self._found:
            lengths = self._batch.completion_lengths[samples]
            values[:, places_of(self._starts[samples], lengths)] = found.cpu()[
                :, filled_places(lengths, found.shape[2])
            ]
        of_ranks = ranks.sum_data(values)
        if not ranks.is_rank0:
            return None
        batch = self._batch
        lengths = self._lengths
        prompts = batch.prompt_lengths[self._samples]
        starts = batch.starts[self._samples]
        own = places_of(batch.own_starts[self._samples], lengths)
        mine = advantages[self._samples]
        of_tokens = (
            mine.repeat_interleave(lengths)
            if mine.dim() == 1
            else mine[filled_places(lengths, mine.shape[1])]
        )
        written = zip(
            (one["weight_versions"] for one in self._recorded), lengths.tolist(), strict=True
        )
        versions = numpy.array(
            [version for one in written for version in versions_of_tokens(*one)], numpy.int32
        )
        tokens = {
            "token_ids": batch.token_ids[places_of(starts + prompts, lengths)],
            "written": batch.loss_mask[own],
            "rollout_logps": batch.rollout_logps[own],
            "advantages": of_tokens,
            **dict(zip(self._names, of_ranks, strict=True)),
        }
        return TokenRows(
            completions=self._recorded,
            prompt_lengths=prompts.numpy(),
            prompt_token_ids=batch.token_ids[places_of(starts, prompts)].numpy(),
            lengths=lengths.numpy(),
            tokens={"weight_versions": versions}
            | {name: values.numpy() for name, values in tokens.items()},
            routes=self._routes(starts, prompts + lengths),
        )

    def _routes(self, starts: Tensor, lengths: Tensor) -> list[bytes]:
        """Returns the experts of each of the rows, whose tokens begin at `starts`; none where they are not recorded."""
        whole = self._batch.of_routes
        if whole is None or not any(one.get("routed") for one in self._recorded):
            return []
        spans = zip(starts.tolist(), lengths.tolist(), strict=True)
        return [whole[start : start + length].numpy().tobytes() for start, length in spans]
