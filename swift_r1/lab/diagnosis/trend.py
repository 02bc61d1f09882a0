"""Whether a quantity of a run rises, from its completions: what its last rounds gave against its first ones, with an
interval; and how many more rounds would tell, where that says nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Literal

from swift_r1.lab.diagnosis.past import Past

Kind = Literal["rises", "flat", "falls", "solved", "too early"]

NORMAL_95 = 1.96
LEAST_ROUNDS = 6  # two at each end are compared then
END = 3  # the first and the last of so many parts of a run are compared
TOLD = 0.1  # standard deviations of a completion's reward: a rise that is worth knowing; 0.05 of a 0/1 reward
KNOWN = 5.0  # times that, the half of an interval below which a run without a rise is called flat
# solved: in the last rounds so many groups have equal rewards, which vary by at most this share of their mean
SOLVED_ROUNDS = 4
SILENT_ENOUGH = 0.7
SPREAD = 0.25


@dataclass(frozen=True, slots=True)
class Trend:
    """How a quantity changed from a run's first rounds to its last, with the 95 % interval of the change.

    Example: a reward over 24 rounds of 64 completions:
        name "reward", kind "rises", first 0.27, last 0.41, low 0.07, high 0.21, rounds 24, compared 8, told 0.05,
        more_rounds None
    """

    name: str
    kind: Kind
    first: float
    last: float
    low: float
    high: float
    rounds: int  # of the run
    compared: int  # rounds at each end
    told: float  # a rise of this size is worth knowing
    more_rounds: int | None  # so many more would tell it; None where enough is known
    unit: str = "rounds"

    @property
    def change(self) -> float:
        return self.last - self.first

    @property
    def text(self) -> str:
        """Returns the verdict as a sentence."""
        values = f"{self.first:.3g} to {self.last:.3g}"
        change = f"{self.change:+.2g} (95 %: {self.low:+.2g} to {self.high:+.2g})"
        over = f"first and last {self.compared} of {self.rounds} {self.unit}"
        says = {
            "solved": "is solved",
            "flat": "is flat",
            "too early": "cannot be judged yet",
        }.get(self.kind, self.kind)
        text = f"{self.name} {says}: {values}, {change}, {over}"
        if self.more_rounds is not None:
            text += f"; {self.more_rounds} more rounds would tell a rise of {self.told:.2g}"
        return text


def trend_of(past: Past, name: str) -> Trend | None:
    """Returns how `reward`, or `rewards/<name>`, changed; None before the second round, or where it is not logged, and of
    a replay, whose policy has not earned it."""
    if past.replays:
        return None
    mean_name, error_name = (
        ("reward", "reward_stderr") if name == "reward" else (f"{name}/mean", f"{name}/stderr")
    )
    points = _points(past, mean_name, error_name)
    if len(points) < 2:
        return None
    rounds = past.rounds
    count = max(1, len(points) // END)
    early = points[:count]
    late = points[-count:]
    first = fmean(value for value, _ in early)
    last = fmean(value for value, _ in late)
    error = math.hypot(_error(early), _error(late))
    half = NORMAL_95 * error
    change = last - first
    told = TOLD * _spread(past, name)
    kind: Kind = "flat"
    if _solved(past, name):
        kind = "solved"
    elif rounds < LEAST_ROUNDS:
        kind = "too early"
    elif change > half:
        kind = "rises"
    elif change < -half:
        kind = "falls"
    elif half > KNOWN * told:
        kind = "too early"
    more = None
    if kind in ("flat", "too early") and math.inf > half > told > 0:
        more = max(1, math.ceil(rounds * (half / told) ** 2) - rounds)
    label = "reward" if name == "reward" else f"reward {name.removeprefix('rewards/')}"
    return Trend(
        label,
        kind,
        first,
        last,
        change - half,
        change + half,
        rounds,
        max(1, rounds // END),
        told,
        more,
    )


def movement_of(past: Past) -> str:
    """Returns how far the policy of a replay has moved, as a sentence."""
    moved = past.values("policy/moved", 0)
    text = "a replay, whose completions and rewards are not this policy's"
    if moved:
        text += f": its log-probs moved by {moved[-1]:.2g} nats per token (policy/moved), first by {moved[0]:.2g}"
    return text


def evaluation_trends(past: Past) -> list[Trend]:
    """Returns how the accuracy of each benchmark changed from the first evaluation to the last, where both have their
    intervals."""
    trends = []
    for benchmark, names in past.log.benchmarks().items():
        found = past.log.evaluations(benchmark, "accuracy") if "accuracy" in names else []
        ends = [
            one for one in (*found[:1], *found[-1:]) if one.low is not None and one.high is not None
        ]
        if len(found) < 2 or len(ends) < 2:
            continue
        before, after = ends
        half = math.hypot(*((one.high - one.low) / 2 for one in ends))  # type: ignore[operator]  # known, see above
        change = after.value - before.value
        kind: Kind = "rises" if change > half else "falls" if change < -half else "flat"
        trends.append(
            Trend(
                f"evaluation {benchmark}",
                kind,
                before.value,
                after.value,
                change - half,
                change + half,
                len(found),
                1,
                0.05,
                None,
                "evaluations",
            )
        )
    return trends


def _points(past: Past, mean_name: str, error_name: str) -> list[tuple[float, float]]:
    """Returns the mean and its standard error of each line that ends a round or more. Where errors are not logged (an
    older version, another trainer) they come from the differences between neighbouring lines."""
    means = past.of_rounds(mean_name)
    errors = dict(past.of_rounds(error_name))
    if errors:
        merged = max(1.0, past.rounds / len(means))  # rounds of a line
        return [(value, errors.get(step, math.nan) / math.sqrt(merged)) for step, value in means]
    differences = [after[1] - before[1] for before, after in pairwise(means)]
    guess = pstdev(differences) / math.sqrt(2) if len(differences) > 1 else math.nan
    return [(value, guess) for _, value in means]


def _error(points: list[tuple[float, float]]) -> float:
    """Returns the standard error of the mean of some lines; infinite where none of theirs is known."""
    known = [error for _, error in points if not math.isnan(error)]
    if not known:
        return math.inf
    return math.sqrt(fmean(error**2 for error in known) / len(points))


def _spread(past: Past, name: str) -> float:
    """Returns the standard deviation of a completion's reward over the run; 0.5 where it is not known."""
    names = past.rewards if name == "reward" else [name]
    spreads = [value for one in names for value in past.values(f"{one}/std", 0)]
    return fmean(spreads) if any(spreads) else 0.5


def _solved(past: Past, name: str) -> bool:
    """Returns whether rewards of most groups are equal by now, of nearly all completions and above 0, and were not so
    from the beginning."""
    own = past.trained if name == "reward" else name
    rounds = min(SOLVED_ROUNDS, past.rounds)
    means, spreads, silent = (
        past.last(metric, rounds)
        for metric in (f"{own}/mean", f"{own}/std", "frac_reward_zero_std")
    )
    if not means or not spreads or not silent or not any(past.values(f"{own}/std", 0)):
        return False
    alike = 0 <= fmean(spreads) <= SPREAD * fmean(means)
    return alike and fmean(means) > 0 and fmean(silent) >= SILENT_ENOUGH
