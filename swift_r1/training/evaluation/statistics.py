"""The figures of an evaluation, as pure functions: pass@k, maj@k, intervals that know the questions, and whether one
run is better than another.

pass@k and maj@k are means over all `k`-subsets of a question's `n` completions, so nothing in them is random.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import comb

import numpy as np
from numpy.typing import NDArray

Z_95 = 1.959963984540054  # the normal distribution's 97.5 % quantile
MAX_VOTERS = 64  # the largest k below n that maj@k is computed for
RESAMPLES = 10_000
_ALL_SIGNS = 14  # questions that differ, up to which every choice of signs is counted
_ROWS = 256  # resamples at once, so that memory stays small


@dataclass(frozen=True, slots=True)
class MeanEstimate:
    """A mean over questions, its standard error clustered by question, and its 95 % interval; all from 0 to 1."""

    value: float
    standard_error: float
    low: float
    high: float


def pass_at_k(n: int, right: int, k: int) -> float:
    """Probability that at least one of `k` completions, drawn from `n` of which `right` are right, is right.

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, eq. 1): `1 - C(n - right, k) / C(n, k)`. Raises
    ValueError: not `0 <= right <= n` or not `1 <= k <= n`.
    """
    if not 0 <= right <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {right} right completions among {n}")
    return float(1 - Fraction(comb(n - right, k), comb(n, k)))


def majority_at_k(classes: Sequence[tuple[int, bool]], silent: int, k: int) -> float:
    """Probability that the most frequent answer among `k` completions is right (self-consistency, arXiv 2203.11171).

    The `k` are drawn without replacement. Of answers that are equally frequent each one wins with the same
    probability. A completion without an answer has no vote; without votes the outcome is wrong.

    Args:
        classes: of each different answer, how many completions gave it and whether it is right.
        silent: completions without an answer.

    Raises ValueError: an empty class, or not `1 <= k <= n`.
    """
    n = silent + sum(size for size, _ in classes)
    if silent < 0 or any(size < 1 for size, _ in classes) or not 1 <= k <= n:
        raise ValueError(f"maj@{k} of classes {list(classes)} and {silent} without an answer")
    if k == n:
        most = max((size for size, _ in classes), default=0)
        winners = [right for size, right in classes if size == most]
        return sum(winners) / len(winners) if winners else 0.0
    total = Fraction(0)
    for place, (size, right) in enumerate(classes):
        if right:
            others = tuple(
                sorted(other for index, (other, _) in enumerate(classes) if index != place)
            )
            total += _wins(size, others, silent, k)
    return float(total)


@lru_cache(maxsize=65536)  # questions are alike: few answers, few sizes
def _wins(own: int, others: tuple[int, ...], silent: int, k: int) -> Fraction:
    """Probability that the class of size `own` wins against `others`."""
    ways = Fraction(0)
    for votes in range(1, min(own, k) + 1):
        # (drawn, tied): ways to draw so many from the classes so far, so many of which have `votes` votes too.
        drawn = Counter({(0, 0): 1})
        for size in others:
            more: Counter[tuple[int, int]] = Counter()
            for (count, tied), number in drawn.items():
                for added in range(min(size, votes, k - votes - count) + 1):
                    more[count + added, tied + (added == votes)] += number * comb(size, added)
            drawn = more
        for (count, tied), number in drawn.items():
            rest = k - votes - count
            if rest <= silent:
                ways += Fraction(number * comb(silent, rest) * comb(own, votes), 1 + tied)
    return ways / comb(own + sum(others) + silent, k)


def ks(n: int) -> tuple[int, ...]:
    """The k that are reported for `n` completions: the powers of two up to `n`, and `n`."""
    return tuple(sorted({*(2**exponent for exponent in range(n.bit_length())), n}))


def mean_estimate(values: Sequence[float], draws: float = 1.0) -> MeanEstimate:
    """Mean of one value per question, with its uncertainty over questions.

    The standard error is clustered by question (Miller 2024, arXiv 2411.00640): completions of one question are not
    independent, so the spread of the questions' means is what counts. The interval is Wilson's score interval with the
    effective number of completions, `p (1 - p) / SE^2`, in place of their number (Dean and Pagano 2015, Journal of
    Survey Statistics and Methodology 3(4)): it stays within 0 and 1, and has a width where all or none were right. With
    one completion a question it is Wilson's interval.

    Args:
        values: from 0 to 1, one per question.
        draws: independent outcomes that each value is a mean of; the effective number is at most `Q * draws`.

    Raises ValueError: no values.
    """
    count = len(values)
    if not count:
        raise ValueError("no question was asked")
    mean = min(1.0, max(0.0, math.fsum(values) / count))
    # By N, not N - 1: then one completion a question is exactly the binomial case.
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in values)) / count
    spread = mean * (1 - mean)
    if spread == 0:
        effective = float(count)
    elif error == 0:
        effective = count * draws
    else:
        effective = min(max(spread / error**2, count), count * draws)
    return MeanEstimate(mean, error, *wilson(mean, effective))


def wilson(share: float, count: float) -> tuple[float, float]:
    """Wilson's 95 % score interval of a share among `count` independent trials (JASA 22, 1927)."""
    square = Z_95**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = (
        Z_95
        / (1 + square / count)
        * math.sqrt(share * (1 - share) / count + square / (4 * count**2))
    )
    # At the ends rounding alone would leave the bound a bit off.
    return 0.0 if share == 0 else max(0.0, middle - half), 1.0 if share == 1 else min(
        1.0, middle + half
    )


def mean_of(estimates: Sequence[MeanEstimate]) -> MeanEstimate:
    """The plain mean over benchmarks; each counts alike whatever its size, and their errors are independent.

    The interval is combined from theirs (MOVER: Zou and Donner 2008, Statistics in Medicine 27), so that it too has a
    width where all or none were right.
    """
    count = len(estimates)
    value = math.fsum(one.value for one in estimates) / count

    def size(parts: Sequence[float]) -> float:
        return math.sqrt(math.fsum(part**2 for part in parts)) / count

    error = size([one.standard_error for one in estimates])
    low = value - size([one.value - one.low for one in estimates])
    high = value + size([one.high - one.value for one in estimates])
    return MeanEstimate(value, error, low, high)


@dataclass(frozen=True, slots=True)
class Difference:
    """Second minus first, from -1 to 1."""

    value: float
    # low, high: percentile interval, 95 %; with 0 in it where the p-value is above 0.05
    low: float
    high: float
    p_value: float  # two-sided
    questions: int  # that both answered


def paired_difference(pairs: Sequence[Sequence[tuple[float, float]]], seed: int) -> Difference:
    """The difference of means and its uncertainty over questions.

    Both runs answered the same questions, so each takes both its values along: what makes a question hard for both
    cancels. The interval draws questions with replacement (bootstrap: Efron and Tibshirani 1993, chapter 13; for
    comparisons of systems Koehn 2004, EMNLP). The p-value asks how often a difference of this size comes if each
    question's two values are swapped by the toss of a coin (Fisher 1935, chapter 21): a few questions that differ prove
    little, and the bootstrap alone would not say so. Of several benchmarks each is drawn by itself and counts alike.

    Args:
        pairs: of each benchmark, of each question, the first and the second run's value.
        seed: of the resampling.

    Raises ValueError: no benchmark, or one without questions.
    """
    if not pairs or not all(pairs):
        raise ValueError("nothing to compare")
    rng = np.random.default_rng(seed)
    gains = [np.array([second - first for first, second in one], dtype=np.float64) for one in pairs]
    drawn = np.zeros(RESAMPLES)
    for gain in gains:
        for start in range(0, RESAMPLES, _ROWS):
            part = drawn[start : start + _ROWS]
            picks = rng.integers(0, len(gain), size=(len(part), len(gain)))
            part += gain[picks].mean(axis=1) / len(gains)
    low, high = (float(value) for value in np.quantile(drawn, (0.025, 0.975)))
    parts = np.concatenate([gain / (len(gain) * len(gains)) for gain in gains])
    p_value = _swapped(parts[parts != 0], rng)
    if p_value > 0.05:
        low = min(low, 0.0)
        high = max(high, 0.0)
    return Difference(float(parts.sum()), low, high, p_value, len(parts))


def _swapped(parts: NDArray[np.float64], rng: np.random.Generator) -> float:
    """The share of choices of signs for which the sum of `parts` is as far from 0 as it is: of all choices, or of
    `RESAMPLES` and the one that was seen."""
    least = abs(parts.sum()) - 1e-12  # rounding must not tell equal sums apart
    if len(parts) <= _ALL_SIGNS:
        bits = np.arange(2 ** len(parts))[:, None] >> np.arange(len(parts)) & 1
        return float(np.mean(np.abs((2 * bits - 1) @ parts) >= least))
    count = 1
    for start in range(0, RESAMPLES, _ROWS):
        bits = rng.integers(0, 2, size=(min(_ROWS, RESAMPLES - start), len(parts)))
        count += int(np.sum(np.abs((2 * bits - 1) @ parts) >= least))
    return count / (RESAMPLES + 1)
