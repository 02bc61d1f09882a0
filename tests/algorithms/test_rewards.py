"""One reward from several: no opinion, invalid values, truncation, and the normalised sum."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from swift_r1.algorithms.rewards import Composition, Totals

Column = list[float | None]


def total(
    weights: list[float], *columns: Column, cut: tuple[bool, ...] = (), size: int = 1, **how: Any
) -> Totals:
    return Composition(weights, **how)(columns, cut or (False,) * len(columns[0]), size)


def test_the_weighted_sum() -> None:
    first: Column = [1.0, None, math.nan, None, 0.0]
    second: Column = [2.0, 2.0, 2.0, None, None]
    totals = total([1.0, 0.5], first, second)
    assert totals.objectives is totals.rewards
    assert totals.rewards[:2] == (2.0, 1.0)  # no opinion adds nothing, and the other weight stays
    assert math.isnan(totals.rewards[2])  # invalid is not zero
    assert math.isnan(totals.rewards[3])  # no opinion at all is not zero
    assert totals.rewards[4] == 0.0
    grown = total([1.0, 0.5], first, second, renormalize_reward_weights=True).rewards
    assert grown[:2] == (2.0, 3.0)  # 0.5 became 1.5
    assert math.isnan(grown[2]) and math.isnan(grown[3]) and grown[4] == 0.0


@pytest.mark.parametrize("how", ["sum_then_normalize", "normalize_then_sum"])
def test_without_functions_all_rewards_are_equal(how: Any) -> None:
    compose = Composition((), multi_objective_aggregation=how)
    assert compose([], (False, True), 2) == Totals((0.0, 0.0), (0.0, 0.0))


def test_truncated_completions() -> None:
    rewards: Column = [1.0, 1.0, math.nan, 0.5]
    cut = (True, False, True, True)
    assert total([1.0], rewards, cut=cut, truncated_reward=-1.0).rewards == (-1.0, 1.0, -1.0, -1.0)
    penalised = total([1.0], rewards, cut=cut, missing_eos_penalty=0.25).rewards
    assert penalised[:2] + penalised[3:] == (0.75, 1.0, 0.25) and math.isnan(penalised[2])


def test_normalize_then_sum() -> None:
    """GDPO: rewards of very different scales weigh alike, and differences that cancel in the sum are kept."""
    small: Column = [0.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    large: Column = [0.0, 0.0, 1000.0, 1000.0, math.nan, None]
    how = {"multi_objective_aggregation": "normalize_then_sum"}
    totals = total([1.0, 0.5], small, large, size=2, **how)
    assert totals.rewards[:4] == (0.0, 1.0, 500.0, 501.0)
    high = 0.5 / (math.sqrt(0.5) + 1e-4)
    # `large` is constant in both groups
    assert totals.objectives[:4] == pytest.approx((-high, high, -high, high))
    assert math.isnan(totals.objectives[4]) and totals.objectives[5] == 0.0
    both = total([1.0, 0.5], small, large, size=6, **how).objectives
    values = np.array([0.0, 0.0, 1000.0, 1000.0])
    part = (values - 500) / (values.std(ddof=1) + 1e-4)
    ones = np.array([0.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    mine = (ones - ones.mean()) / (ones.std(ddof=1) + 1e-4)
    assert both[:4] == pytest.approx(mine[:4] + 0.5 * part)
