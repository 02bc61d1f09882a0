"""Is one run better than another? Paired bootstrap over questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
_ROWS = 256  # resamples at once, so that memory stays small


@dataclass(frozen=True, slots=True)
class Difference:
    """Second minus first, from -1 to 1.

    Attributes:
        low, high: percentile interval, 95 %.
        p_value: two-sided: twice the share of resamples on the other side of 0 (or on it), at most 1.
        questions: that both answered.
    """

    value: float
    low: float
    high: float
    p_value: float
    questions: int


def paired_bootstrap(
    pairs: Sequence[Sequence[tuple[float, float]]], seed: int, resamples: int = RESAMPLES
) -> Difference:
    """The difference of means and its uncertainty over questions (Efron and Tibshirani 1993, chapters 13 and 16; for
    comparisons of systems Koehn 2004, EMNLP).

    Both runs answered the same questions, so questions are drawn with replacement and each takes both its values along:
    what makes a question hard for both cancels. Of several benchmarks each is drawn by itself and counts alike.

    Args:
        pairs: of each benchmark, of each question, the first and the second run's value.
        seed: of the resampling; the same seed gives the same figures.

    Raises:
        ValueError: no benchmark, or one without questions.
    """
    if not pairs or not all(pairs):
        raise ValueError("nothing to compare")
    rng = np.random.default_rng(seed)
    gains = [np.array([second - first for first, second in one], dtype=np.float64) for one in pairs]
    observed = float(np.mean([gain.mean() for gain in gains]))
    drawn = np.zeros(resamples)
    for gain in gains:
        for start in range(0, resamples, _ROWS):
            part = drawn[start : start + _ROWS]
            picks = rng.integers(0, len(gain), size=(len(part), len(gain)))
            part += gain[picks].mean(axis=1) / len(gains)
    low, high = (float(value) for value in np.quantile(drawn, (0.025, 0.975)))
    # Values of equal runs are exactly 0; rounding of the mean must not put them on one side.
    below, above = float(np.mean(drawn <= 1e-12)), float(np.mean(drawn >= -1e-12))
    return Difference(observed, low, high, min(1.0, 2 * min(below, above)), sum(map(len, pairs)))
