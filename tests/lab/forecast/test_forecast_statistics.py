"""The figures of a forecast against enumeration of every group there can be."""

import math
from itertools import combinations, product

import pytest

from swift_r1.lab.forecast.statistics import (
    markers_of,
    repeated_share,
    rounds_of_sampling,
    signal_probability,
    signal_share,
    steps_without_signal,
)


def differs(group: tuple[float | None, ...]) -> bool:
    return len({reward for reward in group if reward is not None}) > 1


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_the_share_of_groups_is_that_of_all_subsets(n: int) -> None:
    for rewards in product((0.0, 0.1, 1.0, None), repeat=5):
        subsets = list(combinations(rewards, n))
        expected = sum(map(differs, subsets)) / len(subsets)
        assert signal_probability(rewards, n) == pytest.approx(expected, abs=1e-12)


def test_it_is_unbiased() -> None:
    """Its mean over all samples of a known chance is the chance that a group of the run has a signal."""
    right, size, n = 0.3, 6, 4
    mean = math.fsum(
        math.prod(right if one else 1 - right for one in sample) * signal_probability(sample, n)
        for sample in product((True, False), repeat=size)
    )
    assert mean == pytest.approx(1 - right**n - (1 - right) ** n)


def test_rewards_of_several_functions_differ_together() -> None:
    assert signal_probability([(1.0, 0.0), (0.0, 1.0)], 2) == 1.0
    with pytest.raises(ValueError, match="groups of 3 among 2"):
        signal_probability([0.0, 1.0], 3)


def test_the_interval_is_over_prompts() -> None:
    none = signal_share([[0.0] * 8] * 32, 4)
    assert none is not None and none.value == none.low == 0.0 and 0.05 < none.high < 0.15
    mixed = [[0.0, 1.0] * 4] * 16 + [[0.0] * 8] * 16
    half = signal_share(mixed, 8)
    assert half is not None and half.value == 0.5 and 0.3 < half.low < 0.4 < 0.6 < half.high < 0.7
    assert signal_share([*mixed, [0.0] * 3], 8) is None


def test_repeated_completions() -> None:
    assert repeated_share([["a", "b", "c"], ["a", "a", "a"]]) == pytest.approx(2 / 6)


def test_what_a_prompt_asks_for() -> None:
    prompt = "Work in <think> </think> tags, the answer in <answer> </answer> tags, as <answer>1</answer>. x < 3 > 2"
    assert markers_of(prompt) == ["</think>", "</answer>"]
    assert markers_of("Put the final answer in \\boxed{}.") == ["\\boxed{"]
    assert markers_of("4 6 5>29\n") == []


def test_what_a_share_costs() -> None:
    assert rounds_of_sampling(0.5, 2) == 1.75
    assert rounds_of_sampling(0.0, 3) == 4
    assert steps_without_signal(0.5, 3) == 0.125
