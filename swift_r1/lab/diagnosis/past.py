"""The past that detectors look at: a run's metrics up to now, its flags and its plan; and what makes a function a
detector."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from swift_r1.record.folder import RunFolder
from swift_r1.record.metric_log import MetricLog

ANSWERS_FIRST = (
    "swift sft first, on the answers that the rows have; then the run, from its checkpoint"
)
FIRST = 3  # rounds at a run's beginning that later ones are compared with


class Sign(NamedTuple):
    """A detector's finding: what it has seen, with numbers, and what to try."""

    evidence: str
    advice: str


class MetricChange(NamedTuple):
    """A metric's values at the beginning of a run, and its last ones; one at least of each."""

    early: Sequence[float]
    late: Sequence[float]

    @property
    def gain(self) -> float:
        """Returns how much the late mean is above the early one."""
        return fmean(self.late) - fmean(self.early)

    @property
    def rise(self) -> float:
        """Returns the gain beyond twice its standard error; negative for a fall, 0 within the noise."""
        noise = max(map(pstdev, self)) * math.sqrt(1 / len(self.early) + 1 / len(self.late))
        return math.copysign(max(0.0, abs(self.gain) - 2 * noise), self.gain)


@dataclass(frozen=True)
class Past:
    """A run as far as it has come. Rounds, not steps, are counted: the steps of a round share most metrics."""

    log: MetricLog
    args: Mapping[str, Any]  # of args.json, as far as they are known
    plan: Mapping[str, Any]
    replays: bool = (
        False  # completions that were recorded: their rewards say nothing of this policy
    )

    @classmethod
    def of(cls, log: MetricLog, folder: RunFolder) -> Past:
        return cls(log, folder.args, folder.plan, folder.replays)

    @cached_property
    def round(self) -> int:
        """Returns the optimizer steps of a round."""
        return _count(self.plan.get("optimizer_steps_per_round")) or 1

    @property
    def rounds(self) -> int:
        """Returns the rounds that are trained."""
        return self.log.last_step // self.round

    @property
    def prompts(self) -> int | None:
        """Returns the prompts of a round."""
        return _count(self.plan.get("prompts_per_round"))

    @property
    def compares_groups(self) -> bool:
        """Returns whether a completion is compared with others of its prompt: else groups of equal rewards teach too."""
        return (
            self.args.get("rlhf_type") != "ppo"
            and self.args.get("advantage_estimator") != "reinforce_plus_plus"
            and self.plan.get("num_generations") != 1
        )

    @property
    def right(self) -> str:
        """Returns the metric of the first reward function, which says what is right."""
        names = self.args.get("reward_funcs")
        name = f"rewards/{names[0]}" if isinstance(names, list) and names else ""
        return name if f"{name}/mean" in self.log.series else next(iter(self.rewards), "")

    @property
    def watched(self) -> list[str]:
        """Returns the metrics of the functions that have no weight."""
        names = self.args.get("reward_funcs")
        weights = self.args.get("reward_weights")
        if not isinstance(names, list) or not isinstance(weights, list):
            return []
        pairs = zip(names, weights, strict=False)
        return [f"rewards/{name}" for name, weight in pairs if weight == 0]

    @property
    def trained(self) -> str:
        """Returns the metric of the function with the largest weight, the first of several: what is learned above
        all."""
        names = self.args.get("reward_funcs")
        weights = self.args.get("reward_weights")
        if (
            not isinstance(names, list)
            or not isinstance(weights, list)
            or len(names) != len(weights)
        ):
            return self.right
        name = f"rewards/{names[weights.index(max(weights))]}" if names else ""
        return name if f"{name}/mean" in self.log.series else self.right

    @property
    def rewards(self) -> list[str]:
        return [f"rewards/{name}" for name in self.log.rewards()]

    @property
    def answers_first(self) -> str:
        """Returns the beginning of an advice to a run that earns little and whose rows have answers; else nothing."""
        earned = self.values(f"{self.right}/mean", 0)
        little = bool(earned) and fmean(earned) <= 0.5
        return f"{ANSWERS_FIRST}; " if little and self.plan.get("answered") else ""

    @property
    def answer_seconds(self) -> float:
        """Returns what a completion has taken, with its reward; NaN where that is not known."""
        count = _count(self.plan.get("completions_per_round"))
        phases = [self.of_rounds(name) for name in ("time/generate", "time/reward")]
        seconds = sum(fmean(value for _, value in phase) for phase in phases if phase)
        return seconds / count if seconds and count else math.nan

    @property
    def earned_nothing(self) -> bool:
        """Returns whether the first function has given 0 for every completion since the first."""
        earned = [self.log.get(f"{self.right}/{name}").values for name in ("mean", "std")]
        if any(value and not math.isnan(value) for values in earned for value in values):
            return False
        return all(0.0 in values for values in earned)

    def values(self, name: str, after: float, until: float = math.inf) -> list[float]:
        """Returns a metric's known values of the steps after one, until another."""
        series = self.log.get(name)
        begin = bisect_right(series.steps, after)
        end = len(series.steps) if until == math.inf else bisect_right(series.steps, until)
        return [value for value in series.values[begin:end] if not math.isnan(value)]

    def of_rounds(self, name: str) -> list[tuple[int, float]]:
        """Returns the steps and known values of a metric that is of rounds: one for each, from the line of its last
        step, or of several where lines are rarer."""
        series = self.log.get(name)
        of_rounds = {
            math.ceil(step / self.round): (step, value)
            for step, value in zip(series.steps, series.values, strict=True)
            if not math.isnan(value)
        }
        return list(of_rounds.values())

    def last(self, name: str, rounds: int) -> list[float]:
        """Returns a metric's known values of the last rounds; none where there were not so many."""
        begin = self.log.last_step - rounds * self.round
        return self.values(name, begin) if begin >= 0 else []

    def first(self, name: str, rounds: int = FIRST) -> list[float]:
        """Returns a metric's known values of the first rounds, or of the first line."""
        return self.values(
            name, -math.inf, max([rounds * self.round, *self.log.get(name).steps[:1]])
        )

    def change(self, name: str, rounds: int) -> MetricChange | None:
        """Returns the change from the first rounds to the last `rounds`; None if they overlap, or it is not known."""
        steps = self.log.get(name).steps
        begin = self.log.last_step - rounds * self.round
        if not steps or begin < max(FIRST * self.round, steps[0]):
            return None
        early = self.first(name)
        late = self.last(name, rounds)
        return MetricChange(early, late) if early and late else None


Look = Callable[[Past, int], Sign | None]


@dataclass(frozen=True)
class Detector:
    """`look` says what it has seen in the last `rounds` rounds; None for nothing. `needs` are patterns of metrics, of
    which one at least must be logged. What is found `under` one of these names already explains it."""

    name: str
    rounds: int
    needs: Sequence[str]
    under: Sequence[str]
    look: Look

    def metrics(self, log: MetricLog) -> list[str]:
        """Returns the metrics of the log that it looks at."""
        return [
            name for name in log.series if any(fnmatchcase(name, pattern) for pattern in self.needs)
        ]


DETECTORS: list[Detector] = []


def detector(
    name: str, rounds: int, *needs: str, under: Sequence[str] = ()
) -> Callable[[Look], Look]:
    """Registers a function as the `Detector` of this name."""

    def register(look: Look) -> Look:
        DETECTORS.append(Detector(name, rounds, needs, under, look))
        return look

    return register


def _count(value: Any) -> int | None:
    """Returns a number of things; None for what another version or an accident has left in its place."""
    return value if isinstance(value, int) and value > 0 else None
