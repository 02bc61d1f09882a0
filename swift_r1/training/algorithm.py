"""The seam between the loop and a method: what a round's completions are worth, and what an optimizer step is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from swift_r1.models.policy import MicroBatch
from swift_r1.training.backends.base import Training
from swift_r1.training.batch.batching import RoundBatch
from swift_r1.training.step import TrainingBatch


@dataclass(frozen=True, slots=True)
class Targets:
    """What a round's completions are trained towards, on the CPU and the same on every rank.

    Attributes:
        advantages: float32 `[N]`, or one a token: `[N, longest]`.
        of_completions: float32 `[N]`, the advantage of each completion; of tokens their mean.
        returns: float32 `[N, longest]` for the critic, None without one.
        valid: bool `[N]`, completions whose returns are known; None without a critic.
    """

    advantages: Tensor
    of_completions: Tensor
    returns: Tensor | None = None
    valid: Tensor | None = None


class Trained(NamedTuple):
    """One of the models that an optimizer step updates, and the metrics that tell how that went."""

    loss: str
    grad_norm: str
    loss_scale: str
    backend: Training


class Algorithm(Protocol):
    """A method (`--rlhf_type`). All methods are collective."""

    trained: Sequence[Trained]
    """What `step` updates."""

    def prepared(self, steps: Sequence[Sequence[MicroBatch]]) -> list[list[TrainingBatch]]:
        """The micro-batches of each of a round's optimizer steps with what the weights before its first one say."""
        ...

    def targets(self, batch: RoundBatch, steps: Sequence[Sequence[TrainingBatch]]) -> tuple[Targets, dict[str, float]]:
        """From the rewards of the whole round; and what there is to log of them."""
        ...

    def step(self, micro_batches: Sequence[TrainingBatch], targets: Targets, number: int) -> dict[str, float]:
        """Optimizer step `number`, from 0: `loss`, `grad_norm`, `learning_rate` and more to log."""
        ...


class Verdict(NamedTuple):
    """Which losses and gradient norms of a step are not finite; and whether each is a gradient that overflowed float16,
    which is how a loss scale is found and no fault of the step."""

    faults: tuple[str, ...]
    overflows: bool


def judged(metrics: Mapping[str, float], trained: Iterable[Trained]) -> Verdict:
    """Of an optimizer step's metrics."""
    faults: list[str] = []
    overflows = True
    for model in trained:
        bad = [name for name in (model.loss, model.grad_norm) if not math.isfinite(metrics[name])]
        faults += bad
        if bad:
            overflows &= bad == [model.grad_norm] and metrics.get(model.loss_scale, 1.0) > 1
    return Verdict(tuple(faults), bool(faults) and overflows)
