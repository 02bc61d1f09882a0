"""`swift replay --lr_find true`: one pass over recorded completions with a learning rate that rises exponentially.

The learning rate range test (Smith, arXiv 1506.01186, section 3.3), for a policy: what tells a rate that is too high is not
the loss but how far the policy is from the one that sampled, and its gradient. Nothing is saved.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from swift_r1.errors import UsageError
from swift_r1.training.loop import Trainer
from swift_r1.training.optimizer import LearningRate
from swift_r1.training.rehearsal import Steps, Trial, parts_of

logger = logging.getLogger("swift_r1.training")

LEAST_STEPS = 8
QUIET_SHARE = 0.25  # of the steps, the first ones: what the others are compared with
BREAKS_AT_KL = 0.1  # nats per token
BREAKS_AT_ESS = 0.5  # of tokens
BREAKS_AT_GRADIENT = 10.0  # times the median norm of the quiet steps
MOVES_AT_KL = 1e-5  # nats per token beyond twice the median of the quiet steps
MARGIN = 10.0  # between the rate that breaks and the proposed one
_ROWS = 24  # of the table, at most


@dataclass(frozen=True, slots=True)
class RatePoint:
    """An optimizer step with its rate, and where the policy was after it."""

    rate: float
    loss: float
    grad_norm: float
    kl: float  # of the policy to the one that sampled, on the tokens of the next step, nats per token
    ess: float  # effective sample size of these tokens, as a share


@dataclass(frozen=True, slots=True)
class RateRange:
    """Has the rate at which a policy begins to move, that at which it breaks, and the proposed one; None: not in the
    range."""

    moves: float | None
    breaks: float | None
    why: str
    proposed: float | None


class RisingRate(LearningRate):
    """From `low` in the first step to `high` in the last of `steps`, by the same factor each time."""

    def __init__(self, low: float, high: float, steps: int) -> None:
        self._low = low
        self._factor = (high / low) ** (1 / (steps - 1))
        self._done = 0

    @property
    def value(self) -> float:
        """The rate of the coming step."""
        return float(self._low * self._factor**self._done)

    def advance(self) -> None:
        """Moves to the next step."""
        self._done += 1


def rate_range(points: Sequence[RatePoint]) -> RateRange:
    """Returns what the points, by rising rate, tell. The first quarter of them is taken as quiet.

    The proposed rate is a tenth of the one that breaks, but none at which the policy does not move yet: then it is the
    geometric mean of both.
    """
    quiet = points[: max(2, math.ceil(QUIET_SHARE * len(points)))]
    still = 2 * median(one.kl for one in quiet) + MOVES_AT_KL
    # A step of groups without signal has no gradient.
    usual = median([one.grad_norm for one in quiet if one.grad_norm] or [math.inf])
    moves = next((one.rate for one in points if one.kl > still), None)
    found = ((one, _why_broken(one, usual)) for one in points)
    broken = next(((one.rate, why) for one, why in found if why), None)
    if broken is None:
        return RateRange(moves, None, "", None)
    rate, why = broken
    proposed = rate / MARGIN
    if moves is not None and moves > proposed:
        proposed = math.sqrt(moves * rate)
    # A run that is broken from the start is not one of a rate that is too high.
    return RateRange(moves, rate, why, None if rate == points[0].rate else proposed)


def _why_broken(point: RatePoint, usual: float) -> str:
    """Returns what is wrong after a step; empty: nothing."""
    if not (math.isfinite(point.loss) and math.isfinite(point.grad_norm)):
        return "loss or gradient is not finite"
    if not point.kl < BREAKS_AT_KL:
        return f"KL {point.kl:.2g} nats per token"
    if point.ess < BREAKS_AT_ESS:
        return f"effective sample size {point.ess:.2g} of the tokens"
    if point.grad_norm > BREAKS_AT_GRADIENT * usual:
        return f"gradient {point.grad_norm / usual:.0f} times as large as at first"
    return ""


def verdict(found: RateRange, points: Sequence[RatePoint]) -> str:
    """Returns the range and the proposal in one line."""
    low = points[0].rate
    high = points[-1].rate
    moves = (
        f"the policy moves from {found.moves:.1e} on" if found.moves else "the policy never moves"
    )
    if found.breaks is None:
        return f"{moves}, and nothing breaks up to {high:.1e}: give a higher --lr_find_max"
    if found.proposed is None:
        return (
            f"broken from the lowest rate, {low:.1e}, on ({found.why}): give a lower --lr_find_min"
        )
    return f"{moves}, and it breaks at {found.breaks:.1e} ({found.why}): --learning_rate {found.proposed:.1e} is proposed"


def find_rate(trainer: Trainer, low: float, high: float) -> None:
    """Trains with rising rates until the policy breaks or the record ends, and rank 0 says what came out. Collective.

    Raises UsageError: the record has too few steps.
    """
    plan = trainer.plan
    count = plan.total_steps - trainer.summary.steps
    if count < LEAST_STEPS:
        raise UsageError(
            f"--lr_find needs {LEAST_STEPS} optimizer steps, and the record has {count}"
        )
    steps = Steps()
    # A step that is skipped is an answer here.
    books = replace(trainer.books, recorder=steps, max_skipped_steps=plan.total_steps)
    changed = {
        "recorder": steps,
        "books": books,
        "learning_rate": RisingRate(low, high, count),
    }
    trial = Trial(**parts_of(trainer) | changed)
    trial.progress = trainer.progress
    if trial.progress.open_round is None:
        trial.publish()
    points: list[RatePoint] = []
    broken = 0.0
    while trial.summary.steps < plan.total_steps and not (broken or trial.stop.reason):
        trial.train(trial.progress.open_round or trial.begin_round())
        points = _points(steps.logged)
        known = len(points) >= LEAST_STEPS
        broken = trainer.ranks.max(float(known and rate_range(points).breaks is not None))
    if trainer.ranks.is_rank0 and points:
        _show(points)


def _points(logged: Sequence[dict[str, float]]) -> list[RatePoint]:
    """Returns all steps but the last, whose effect is not known."""
    return [
        RatePoint(
            one["learning_rate"],
            one["loss"],
            one["grad_norm"],
            later.get("rollout/k3_kl_step", math.nan),
            later.get("rollout/ess_token", math.nan),
        )
        for one, later in pairwise(logged)
    ]


def _show(points: Sequence[RatePoint]) -> None:
    """Prints the table, and logs the line."""
    from rich.table import Table

    from swift_r1.runtime.terminal import Terminal

    found = rate_range(points)
    table = Table("learning rate", "loss", "gradient norm", "KL after it", "ESS", "")
    every = math.ceil(len(points) / _ROWS)
    for number, one in enumerate(points):
        note = "breaks" if found.breaks is not None and one.rate >= found.breaks else ""
        if not note and found.moves is not None and one.rate >= found.moves:
            note = "moves"
        if number % every == 0 or one.rate in (found.moves, found.breaks):
            numbers = (one.loss, one.grad_norm, one.kl, one.ess)
            table.add_row(f"{one.rate:.2e}", *(f"{value:.3g}" for value in numbers), note)
    Terminal(soft_wrap=False).print(table)
    logger.info(verdict(found, points))
