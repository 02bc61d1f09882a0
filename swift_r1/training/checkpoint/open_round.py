"""A round some of whose optimizer steps are taken: what its other steps need, in the loop and in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from swift_r1.runtime.ranks import Ranks
from swift_r1.training.algorithm import Targets
from swift_r1.training.batch.batching import RoundBatch
from swift_r1.training.step import TrainingBatch

_FROZEN = ("old_logps", "old_entropies", "ref_logps", "old_values")
"""What the weights before the round's first step have said of its tokens, and those after it no longer say."""


@dataclass(slots=True)
class OpenRound:
    """A scored round.

    Attributes:
        steps: this rank's micro-batches of each optimizer step of one pass.
        targets: what its completions are trained towards.
        metrics: what each of the steps logs of the round.
        seconds: each step's share of what the round cost as a whole.
        done: optimizer steps taken.
    """

    batch: RoundBatch
    steps: Sequence[Sequence[TrainingBatch]]
    targets: Targets
    metrics: dict[str, float]
    seconds: dict[str, float]
    done: int = 0


def round_tensors(round_: OpenRound, ranks: Ranks) -> dict[str, Tensor]:
    """All that a checkpoint holds of the round, on the main rank; empty elsewhere. Collective."""
    saved: dict[str, Tensor] = {}
    for name in _FROZEN:
        known = [getattr(batch, name) for step in round_.steps for batch in step]
        mine = [tensor.detach().flatten().float().cpu() for tensor in known if tensor is not None]
        everyones = ranks.gather(torch.cat([torch.zeros(0), *mine]))
        for rank, tensor in enumerate(everyones or ()):
            if tensor.numel():
                saved[f"{name}:{rank}"] = tensor
    if not ranks.is_main:
        return {}
    return saved | {item.name: getattr(round_.batch, item.name) for item in fields(RoundBatch)}


def batch_of(saved: Mapping[str, Tensor]) -> RoundBatch:
    """The batch in what `round_tensors` gave."""
    return RoundBatch(**{item.name: saved[item.name] for item in fields(RoundBatch)})


def with_saved(
    steps: Sequence[Sequence[TrainingBatch]], saved: Mapping[str, Tensor], rank: int
) -> list[list[TrainingBatch]]:
    """This rank's micro-batches, cut again as they were, with what `round_tensors` saved of them."""
    filled = [list(step) for step in steps]
    for name in _FROZEN:
        flat = saved.get(f"{name}:{rank}")
        if flat is None:
            continue
        parts = iter(flat.split([batch.mask.numel() for step in filled for batch in step]))
        filled = [
            [replace(batch, **{name: next(parts).view_as(batch.mask).to(batch.mask.device)}) for batch in step]
            for step in filled
        ]
    return filled


def write_step(round_: OpenRound, steps_per_pass: int, path: Path) -> None:
    """Writes the batch of the round's coming step to a safetensors file: the round's fields, the advantages, and which
    of its completions, `samples`, the step is on; with a critic the returns too."""
    size = len(round_.batch) // steps_per_pass
    first = round_.done % steps_per_pass * size
    samples = torch.arange(first, first + size)
    tensors = {item.name: getattr(round_.batch, item.name) for item in fields(RoundBatch)}
    path.parent.mkdir(exist_ok=True)
    tensors |= {"advantages": round_.targets.advantages, "samples": samples}
    if round_.targets.returns is not None:
        tensors["returns"] = round_.targets.returns
    save_file(tensors, path)
