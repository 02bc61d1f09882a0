"""The judgement of a sweep's points, which are hopeless and which is best: pure functions on the runs' metric.

A run's value at a step is the mean of its metric over the last steps up to it; a point's is the mean over its seeds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from swift_r1.record.metric_log import Series

LEVEL = 0.05  # of tests and intervals, two-sided


def recent(series: Series, step: int, over: int) -> float:
    """Returns the mean of the finite values of steps `(step - over, step]`; without one there, the last value before.
    NaN where there is none at all."""
    start = bisect_right(series.steps, step - over)
    end = bisect_right(series.steps, step)
    inside = [value for value in series.values[start:end] if math.isfinite(value)]
    before = (value for value in reversed(series.values[:start]) if math.isfinite(value))
    return fmean(inside) if inside else next(before, math.nan)


def hopeless(
    points: Mapping[str, Sequence[Series]],
    over: int,
    after: int,
    behind: float | None,
    below: float | None,
) -> dict[str, str]:
    """Returns the points to stop, each with the reason.

    A point is looked at at the last step that all of its runs have reached, those aside that have not reached `after`
    yet; against another, at the last of these steps that a run of that has reached too, with all that have.

    Args:
        points: of each point the metric of the runs that have begun.
        behind: how far under the best other point is hopeless; None: that does not matter.
        below: the value under which a point is hopeless; None: that does not matter.
    """
    found: dict[str, str] = {}
    for point, runs in points.items():
        known = [run for run in runs if _last(run) >= after]
        if not known:
            continue
        step = min(map(_last, known))
        if below is not None and (value := _mean(known, step, over)) < below:
            found[point] = f"{value:.4g} at step {step}, below {below:g}"
            continue
        worst = 0.0
        for name, theirs in points.items():
            at = min(step, max(map(_last, theirs), default=0))
            if behind is None or name == point or at < after:
                continue
            value = _mean(known, at, over)
            other = _mean([run for run in theirs if _last(run) >= at], at, over)
            if other - value > max(behind, worst):
                worst = other - value
                found[point] = (
                    f"{value:.4g} at step {at}, more than {behind:g} behind {name} ({other:.4g})"
                )
    return found


def _last(series: Series) -> int:
    return series.steps[-1] if series.steps else 0


def _mean(runs: Sequence[Series], step: int, over: int) -> float:
    values = [value for run in runs if math.isfinite(value := recent(run, step, over))]
    return fmean(values) if values else math.nan


@dataclass(frozen=True, slots=True)
class Ranked:
    """A point whose runs have all ended.

    Attributes:
        values: of its runs, at their last step.
        half_width: of the 95 % interval of the mean over seeds; None of one seed.
        against_best: `best`; `worse`: than that, beyond chance; `not told apart`: from that, by these seeds.
    """

    point: str
    values: tuple[float, ...]
    mean: float
    half_width: float | None
    against_best: str


def ranking(points: Mapping[str, Sequence[float]]) -> list[Ranked]:
    """Returns the points by their mean over seeds, the best first.

    The interval of a mean is Student's. Each point is compared with the best by Welch's test (Biometrika 34, 1947), at
    a level that is divided by the number of comparisons (Bonferroni). With one seed nothing can be told apart.
    """
    order = sorted(points, key=lambda name: -fmean(points[name]))
    found = []
    for name in order:
        values = points[name]
        half = None
        if len(values) > 1:
            half = t_quantile(len(values) - 1) * math.sqrt(variance(values) / len(values))
        verdict = "best"
        if name != order[0]:
            worse = welch(points[order[0]], values) < LEVEL / (len(order) - 1)
            verdict = "worse" if worse else "not told apart"
        found.append(Ranked(name, tuple(values), fmean(values), half, verdict))
    return found


def welch(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns the two-sided p-value of equal means, variances being what they are; 1 where a side has one value."""
    if min(len(first), len(second)) < 2:
        return 1.0
    parts = [variance(side) / len(side) for side in (first, second)]
    difference = abs(fmean(first) - fmean(second))
    if not sum(parts):
        return float(difference == 0)
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(side) - 1) for part, side in zip(parts, (first, second), strict=True)
    )
    return _tails(difference / math.sqrt(sum(parts)), freedom)


def t_quantile(freedom: int) -> float:
    """Returns the value that |t| is over with probability `LEVEL`, by bisection."""
    low = 0.0
    high = 1e3
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _tails(middle, freedom) > LEVEL else (low, middle)
    return high


def _tails(t: float, freedom: float) -> float:
    """P(|T| > t) of Student's t: the regularized incomplete beta function at `freedom / (freedom + t^2)`."""
    import mpmath

    return float(mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True))
