"""The reward of a completion: the weighted sum of what the reward functions said."""

from __future__ import annotations

import math
from collections.abc import Sequence

from swift_r1.rewards.types import RewardColumn


def combine(columns: Sequence[RewardColumn], weights: Sequence[float]) -> tuple[float, ...]:
    """The weighted sum over the functions, for each of `N` completions.

    A None ("no opinion") adds nothing and the other weights stay as they are (ms-swift's behaviour). NaN marks a
    completion without a usable reward: one that any function could not score, or that none had an opinion on.

    Args:
        columns: one a function, each with `N` values.
        weights: one a function, in the same order.

    Returns:
        `N` floats.
    """
    rows = zip(*(column.values for column in columns), strict=True)
    return tuple(_sum(row, weights) for row in rows)


def _sum(values: Sequence[float | None], weights: Sequence[float]) -> float:
    terms = [weight * value for value, weight in zip(values, weights, strict=True) if value is not None]
    return math.fsum(terms) if terms else math.nan
