"""The figures of a forecast against enumeration of every group there can be."""

import json
import math
import random
from itertools import combinations, product
from pathlib import Path
from statistics import fmean, stdev

import pytest

from swift_r1.algorithms.rewards import standard_error
from swift_r1.lab.diagnosis.past import Past
from swift_r1.lab.diagnosis.trend import END, LEAST_ROUNDS, trend_of
from swift_r1.lab.forecast.statistics import (
    least_rise,
    markers_of,
    repeated_share,
    round_error,
    rounds_of_sampling,
    rounds_to_tell,
    signal_probability,
    signal_share,
    steps_without_signal,
)
from swift_r1.record.metric_log import MetricLog


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


def test_the_error_of_a_round_from_prompts_of_other_sizes() -> None:
    """Against rounds that are drawn: prompts of different difficulty, 0/1 rewards."""
    dice = random.Random(0)

    def drawn(prompts: int, size: int) -> list[list[float]]:
        rates = [dice.choice((0.1, 0.5, 0.9)) for _ in range(prompts)]
        return [[float(dice.random() < rate) for _ in range(size)] for rate in rates]

    found = fmean(round_error(drawn(32, 16), 8, 4) for _ in range(300))
    means = [fmean(value for group in drawn(8, 4) for value in group) for _ in range(4000)]
    assert found == pytest.approx(stdev(means), rel=0.05)
    # of the size that was sampled it is that of `swift why`
    groups = drawn(8, 4)
    assert round_error(groups, 8, 4) == pytest.approx(standard_error(groups))
    assert round_error(groups, 32, 4) == pytest.approx(standard_error(groups) / 2)
    assert math.isnan(round_error([[0.0, 1.0]], 8, 2))


def test_rounds_that_tell_a_rise_are_those_of_swift_why(tmp_path: Path) -> None:
    rounds = rounds_to_tell(0.05, 0.05)
    assert least_rise(0.05, rounds) <= 0.05 < least_rise(0.05, rounds - END)
    assert math.isnan(least_rise(0.05, LEAST_ROUNDS - 1)) and rounds_to_tell(0.0, 1.0) == 6
    for rise, kind in ((0.99, "flat"), (1.01, "rises")):
        # the change between the first and the last third
        high = 0.3 + rise * least_rise(0.05, rounds)
        lines = [
            {
                "step": number,
                "loss": 0.0,
                "reward": high if number > rounds // 2 else 0.3,
                "reward_stderr": 0.05,
                "rewards/task/mean": 0.3,
                "rewards/task/std": 0.5,
            }
            for number in range(1, rounds + 1)
        ]
        (tmp_path / "logging.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))
        log = MetricLog(tmp_path)
        log.refresh()
        trend = trend_of(Past(log, {"reward_funcs": ["task"]}, {}), "reward")
        assert trend is not None and trend.kind == kind
