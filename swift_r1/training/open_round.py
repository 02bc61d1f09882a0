"""A scored round that is trained on: what the loop holds of it, and what a checkpoint in its middle keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from swift_r1.algorithms.advantages import Advantages
from swift_r1.models.policy import MicroBatch
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.batching import RoundBatch
from swift_r1.training.checkpoint.saving import round_tensors_of
from swift_r1.training.checkpoint.state import RunState
from swift_r1.training.token_values import Recorded, StepTokens

Steps = list[list[MicroBatch]]  # a rank's micro-batches of each optimizer step
Step = Callable[[Sequence[MicroBatch], float], dict[str, float]]
"""Loss and update of an optimizer step, given the learning rate; returns its metrics."""
_WIDE = ("teacher_ids", "teacher_tops")  # `[B, T, M]`, the others `[B, T]`
_BEFORE_TRAINING = (
    "old_logps",
    "old_entropies",
    "old_squares",
    "ref_logps",
    "old_values",
    "teacher_logps",
    *_WIDE,
)
"""What was computed with the weights before the round's first step, which are gone after it; and what a teacher said,
whom nobody asks again. In float32, which has every token id below 2**24."""


@dataclass(slots=True)
class OpenRound:
    """A scored round, and how much of it is trained.

    Example: after the first of two optimizer steps, on 8 completions each, one pass of two over a round of 16:
        batch of 16, steps `[[micro, micro], [micro, micro]]`, advantages of 16 rows, metrics `{"reward": 0.4, ...}`,
        seconds `{"generate": 1.5, ...}`, done 1
    """

    batch: RoundBatch
    # this rank's micro-batches of each optimizer step of one pass
    steps: Sequence[Sequence[MicroBatch]]
    advantages: Advantages
    metrics: dict[str, float]  # what each of the steps logs of the round
    seconds: dict[str, float]  # each step's share of the time that the round took as a whole
    done: int = 0  # optimizer steps taken
    ends_epoch: bool = False  # a pass over the prompts is complete with it
    recorded: Sequence[Recorded] = ()  # its completions that the token record has
    step: Step | None = None  # of its own, in the place of the policy's loss

    @property
    def samples(self) -> range:
        """The rows of the completions that the coming step is on."""
        size = len(self.batch) // len(self.steps)
        first = self.done % len(self.steps) * size
        return self.batch.rows(range(first, first + size))

    def tokens(self) -> StepTokens | None:
        """Returns what the coming step fills; None where none of its completions is recorded."""
        recorded = [one for one in self.recorded if one["sample"] in self.samples]
        return (
            StepTokens(recorded, self.batch, self.steps[0][0].ref_logps is not None)
            if recorded
            else None
        )

    def tensors(self, ranks: Ranks) -> dict[str, Tensor]:
        """Returns all that a checkpoint holds of the round, on rank 0; empty elsewhere. What is known of tokens is in
        the order of the completions, whichever rank has them. Collective."""
        micros = [micro for step in self.steps for micro in step]
        samples = ranks.gather_data(torch.cat([micro.samples for micro in micros]))
        saved: dict[str, Tensor] = {}
        for name in _BEFORE_TRAINING:
            known = [(micro, getattr(micro, name)) for micro in micros]
            mine = [
                micro.flatten(one).detach().flatten().float().cpu()
                for micro, one in known
                if one is not None
            ]
            everyones = ranks.gather_data(torch.cat([torch.zeros(0), *mine]))
            if (
                samples is not None
                and everyones is not None
                and (values := torch.cat(everyones)).numel()
            ):
                places = self.batch.written(torch.cat(samples))
                values = values.view(len(places), -1)
                saved[name] = torch.empty_like(values).index_copy_(0, places, values)
        return saved | self.batch.tensors() if ranks.is_rank0 else {}

    def facts(self) -> dict[str, Any]:
        """The rest of what a checkpoint holds of it, as JSON."""
        return {
            "done": self.done,
            "metrics": self.metrics,
            "seconds": self.seconds,
            "ends_epoch": self.ends_epoch,
            "recorded": list(self.recorded),
        }

    def write_step(self, path: Path) -> None:
        """Writes the batch of the coming step to a safetensors file: the round's fields, the advantages, and `samples`,
        the rows that the step is on; with a critic the returns too."""
        tensors = self.batch.tensors()
        tensors |= {"advantages": self.advantages.values, "samples": torch.tensor(self.samples)}
        if self.advantages.returns is not None:
            tensors["returns"] = self.advantages.returns
        path.parent.mkdir(exist_ok=True)
        save_file(tensors, path)


def saved_round(
    checkpoint: Path, split: Callable[[RoundBatch], Steps]
) -> tuple[RoundBatch, Steps, Mapping[str, Any]] | None:
    """The round in the middle of which the checkpoint was saved: its batch, this rank's micro-batches with what was
    computed before training, and `OpenRound.facts`. None if it was saved between rounds. As many ranks as saved it
    split it as they did; any other number can go on too."""
    facts = RunState.read(checkpoint).round
    if facts is None:
        return None
    saved = dict(round_tensors_of(checkpoint))
    batch = RoundBatch(**{item.name: saved[item.name] for item in fields(RoundBatch)})
    known = [name for name in _BEFORE_TRAINING if name in saved]

    def filled(micro: MicroBatch) -> MicroBatch:
        places = batch.written(micro.samples)
        found = dict[str, Any]()
        for name in known:
            values = saved[name][places].to(micro.mask.device)
            values = values if name in _WIDE else values.squeeze(1)
            found[name] = micro.unflatten(values.long() if name == "teacher_ids" else values)
        return replace(micro, **found)

    return batch, [[filled(micro) for micro in step] for step in split(batch)], facts
