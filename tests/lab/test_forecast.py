"""The figures of a forecast: signals against enumeration of every group there can be, and the lines of a run."""

from itertools import combinations, product
from typing import Any

import pytest

from swift_r1.flags import RlhfArguments, make_plan, parse_arguments
from swift_r1.lab.forecast import (
    lines,
    signal_probability,
    signal_share,
    step_lines,
)


def differs(group: tuple[float | None, ...]) -> bool:
    return len({reward for reward in group if reward is not None}) > 1


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_the_share_of_groups_is_that_of_all_subsets(n: int) -> None:
    for rewards in product((0.0, 0.1, 1.0, None), repeat=5):
        subsets = list(combinations(rewards, n))
        expected = sum(map(differs, subsets)) / len(subsets)
        assert signal_probability(rewards, n) == pytest.approx(expected, abs=1e-12)


def test_the_interval_is_over_prompts() -> None:
    none = signal_share([[0.0] * 8] * 32, 4)
    assert none is not None and none.value == none.low == 0.0 and 0.05 < none.high < 0.15
    mixed = [[0.0, 1.0] * 4] * 16 + [[0.0] * 8] * 16
    half = signal_share(mixed, 8)
    assert half is not None and half.value == 0.5 and 0.3 < half.low < 0.4 < 0.6 < half.high < 0.7
    assert signal_share([*mixed, [0.0] * 3], 8) is None


def arguments(more: str = "") -> RlhfArguments:
    words = f"--rlhf_type grpo --model m --dataset d --reward_funcs task form {more}"
    return parse_arguments(
        RlhfArguments, [*words.split(), "--per_device_train_batch_size", "8"], {}
    )


def rows(*groups: list[tuple[float | None, float]]) -> list[dict[str, Any]]:
    """Answers with the rewards of both functions; every fourth one is cut off."""
    return [
        {
            "prompt": str(number),
            "reward": None if task is None else task + form,
            "rewards": {"task": task, "form": form},
            "cut": place % 4 == 0,
        }
        for number, group in enumerate(groups)
        for place, (task, form) in enumerate(group)
    ]


def shown(answers: list[dict[str, Any]], more: str = "") -> dict[str, tuple[str, str]]:
    args = arguments(more)
    return {
        name: (value, note) for name, value, note in lines(answers, args, make_plan(args, 1, 9))
    }


def test_what_passes_differs_and_is_cut_off() -> None:
    found = shown(rows([(1.0, 0.0), (0.0, 1.0)] * 4, [(0.0, 0.0)] * 8))
    assert found["pass (task of 1 or more)"][0] == "25 %"
    assert found["mean of form"] == ("0.25", "")
    assert found["groups of 8 with a signal (the run's)"][0] == "0 %"  # the sums are equal
    assert found["groups of 16 with a signal"] == ("?", "8 answers per prompt are too few")
    assert found["cut off"][0] == "25 %" and found["cut off"][1].startswith("95 %: ")


def test_each_function_counts_for_itself_where_they_are_normalized_alone() -> None:
    answers = rows([(1.0, 0.0), (0.0, 1.0)] * 4, [(0.0, 0.0)] * 8)
    gdpo = "--multi_objective_aggregation normalize_then_sum"
    own = "groups of 8 with a signal (the run's)"
    assert shown(answers, gdpo)[own][0] == "50 %"
    assert shown(answers, f"{gdpo} --reward_weights 1 0")[own][0] == "50 %"
    assert (
        shown(rows([(0.0, 0.0), (0.0, 1.0)] * 4), f"{gdpo} --reward_weights 1 0")[own][0] == "0 %"
    )


def test_a_step_costs_what_its_line_says() -> None:
    step = {"time/step": 36.0, "time/train": 6.0, "time/sync": 0.0, "memory/peak_gib": 1.5}
    found = list(step_lines(step, make_plan(arguments("--max_steps 100"), 1, 9)))
    assert found[:2] == [
        ("seconds a step", "36", "train 6"),
        ("hours for the plan", "1", "without start, evaluations, checkpoints"),
    ]
