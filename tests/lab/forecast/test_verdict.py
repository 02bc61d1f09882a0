"""Verdicts and changes on made-up runs: of each kind one, told apart by nothing else."""

import io
import math
from dataclasses import replace
from typing import Any

import pytest

from swift_r1.flags import RlhfArguments, parse_arguments
from swift_r1.flags.plan import Plan, make_plan
from swift_r1.lab.forecast.outlook import Outlook, outlook
from swift_r1.lab.forecast.show import show
from swift_r1.lab.forecast.verdict import verdict
from swift_r1.runtime.terminal import Terminal

FLAGS = "--rlhf_type grpo --model m --dataset d --reward_funcs task form --per_device_train_batch_size 32"
STEP = {
    "time/train": 3.0,
    "time/sync": 1.0,
    "time/step": 4.0,
    "time/generate": 0.0,
    "memory/peak_gib": 2.0,
}
FOUND: dict[str, Any] = {
    "parts": [
        {"prompts": 8, "generate": seconds, "reward": 1.28} for seconds in (50.0, 12.8, 12.8)
    ],
    "steps": [STEP | {"time/train": 9.0, "time/sync": 0.0}, STEP],
    "fault": None,
    "invalid": {},
}


def run(more: str = "") -> tuple[RlhfArguments, Plan]:
    args = parse_arguments(RlhfArguments, f"{FLAGS} --max_steps 100 {more}".split(), {})
    return args, make_plan(args, 1, 100)


def rows(tasks: list[list[float | None]], **more: Any) -> list[dict[str, Any]]:
    """A completion for each value of `task`, a list of them for each prompt; `form` is 0."""
    return [
        {
            "step": prompt // 8,
            "group": prompt % 8,
            "prompt_id": f"d:{prompt}",
            "prompt": "Answer in <answer> </answer> tags.",
            "completion": f"<answer>{number}</answer>",
            "rewards/task": value,
            "rewards/form": 0.0,
            "reward": value,
            "tokens": 10,
            "finish_reason": "stop",
        }
        | more
        for prompt, values in enumerate(tasks)
        for number, value in enumerate(values)
    ]


def seen(
    rows: list[dict[str, Any]], more: str = "", **found: Any
) -> tuple[Outlook, str, list[str]]:
    args, plan = run(more)
    figures = outlook(rows, FOUND | found, args, plan)
    said = verdict(figures, args)
    return figures, said.level, [one.kind for one in said.changes]


HALF: list[list[float | None]] = [[0.0, 1.0] * 8] * 16 + [[0.0] * 16] * 8


def test_there_is_something_to_learn() -> None:
    figures, level, changes = seen(rows(HALF))
    assert level == "learnable"
    assert figures.passes.value == pytest.approx(1 / 3)
    assert figures.own_signal == figures.signal[8]
    assert figures.share_of_prompts("none") == pytest.approx(1 / 3)
    assert changes == ["constant"]  # the form's
    assert [one.passed for one in figures.prompts] == [8] * 16 + [0] * 8


def test_a_reward_that_is_chance_is_named_before_what_could_be_learned() -> None:
    for checked in (
        {"recheck/task/changed": 0.5, "recheck/task/noise": 0.9},
        {"recheck/task/noise": 0.0, "rewards/task/equal_differ": 0.4},
    ):
        figures, level, changes = seen(rows(HALF), checked=checked)
        assert (level, changes[0]) == ("reward is noise", "noise")
        assert ("90 % of its variance" in verdict(figures, run()[0]).text) == (
            figures.rewards[0].noise == 0.9
        )
    # a function that does not count, and little of it
    assert seen(rows(HALF), "--reward_weights 1 0", checked={"recheck/form/noise": 0.9})[1] == (
        "learnable"
    )
    assert seen(rows(HALF), checked={"recheck/task/noise": 0.01})[1] == "learnable"
    assert seen(rows([[0.0] * 16] * 24), checked={"recheck/task/noise": 0.9})[1] == (
        "nothing to learn from"
    )


def test_what_the_rounds_will_tell() -> None:
    power = seen(rows(HALF))[0].power
    # 16 prompts with half of their completions right and 8 with none; rounds of 4 prompts, 8 completions each
    between = 1 / 18 * 24 / 23
    within = 2 / 3 * 0.25 * 16 / 15
    assert power.error == pytest.approx(((between + within / 16) / 4) ** 0.5, rel=0.02)
    assert (power.reward, power.best) == pytest.approx((1 / 3, 2 / 3))
    assert power.planned == 100 and power.rounds is not None and power.rounds > 100
    assert power.least > power.rise
    assert math.isnan(seen(rows(HALF), "--max_steps 5")[0].power.least)


def test_what_a_step_costs() -> None:
    cost = seen(rows(HALF))[0].cost
    # 32 completions, 0.1 s each; the part that warms the engine up and the first step are left out.
    assert cost.seconds == pytest.approx(
        {"generate": 3.2, "reward": 0.32, "train": 3.0, "sync": 1.0}
    )
    assert (cost.step, cost.hours, cost.tokens) == pytest.approx((7.52, 100 * 7.52 / 3600, 320))
    several = seen(rows(HALF), "--steps_per_generation 2")[0].cost
    assert several.seconds["generate"] == pytest.approx(3.2) and several.seconds["sync"] == 0.5
    resampled = seen(rows(HALF), "--dynamic_sample true --max_resample_times 1")[0].cost
    assert resampled.tokens == pytest.approx(320 * (2 - seen(rows(HALF))[0].own_signal.value))
    unknown = seen(rows(HALF), fault="the GPU is full")[0].cost
    assert unknown.step is None and unknown.hours is None and unknown.fault == "the GPU is full"


def test_nothing_ever_passes() -> None:
    _, level, changes = seen(rows([[0.0] * 16] * 24))
    assert (level, changes) == ("nothing to learn from", ["constant", "constant", "warm start"])


def test_where_nothing_is_earned_the_answers_of_the_rows_come_first() -> None:
    """Before cut completions, which a warm start mends too, and behind a reward that is invalid."""
    made = rows([[0.0] * 16] * 24, finish_reason="length")
    args, plan = run()
    figures = outlook(made, FOUND, args, plan)
    said = verdict(figures, args, ["swift sft --model m", "swift sample"], answered=True)
    assert [one.kind for one in said.changes][:2] == ["warm start", "truncated"]
    assert said.changes[0].advice.startswith("swift sft first")
    console = Terminal(file=io.StringIO(), width=200)
    show(figures, said, "", console)
    shown = console.file.getvalue()
    assert "0 % of the 384 completions earn something from task" in shown
    assert shown.index("$ swift sft --model m") < shown.index("cut off at")
    said = verdict(figures, args, ["swift sample"])
    assert said.changes[0].kind == "truncated" and said.changes[-1].commands == ("swift sample",)
    assert figures.cost.answer == pytest.approx((12.8 + 1.28) / (8 * 16))
    invalid = {"task": {"count": 200, "cause": "boom"}}
    figures = outlook(made, FOUND | {"invalid": invalid}, args, plan)
    assert verdict(figures, args, (), answered=True).changes[0].kind == "invalid"
    passing = outlook(rows(HALF), FOUND, args, plan)
    assert "warm start" not in [one.kind for one in verdict(passing, args, (), True).changes]


def test_everything_passes() -> None:
    assert seen(rows([[1.0] * 16] * 24))[1:] == ("learned already", ["easy"])


def test_most_prompts_are_too_hard() -> None:
    figures, level, changes = seen(rows([[0.0] * 15 + [1.0], *[[0.0] * 16] * 23]))
    assert level == "hardly anything to learn from"
    assert figures.own_signal.value == pytest.approx(0.5 / 24)
    assert changes == ["constant", "hard", "groups", "resample", "warm start"]


def test_all_pass_and_the_form_differs() -> None:
    made = rows([[1.0] * 16] * 24)
    for number, row in enumerate(made):
        row["rewards/form"], row["reward"] = float(number % 2), 1 + float(number % 2)
    args, plan = run()
    figures = outlook(made, FOUND, args, plan)
    advice = " ".join(one.advice for one in verdict(figures, args).changes)
    assert "harder rows" in advice and "easier rows" not in advice


def test_only_the_form_differs() -> None:
    made = rows([[0.0] * 16] * 24)
    for number, row in enumerate(made):
        row["rewards/form"] = row["reward"] = float(number % 2)
    assert seen(made)[1] == "beside the task"


def test_what_is_left_once_the_form_is_learned() -> None:
    made = rows(HALF)
    for number, row in enumerate(made):
        row["rewards/form"] = number % 4 / 8
        row["reward"] = row["rewards/task"] + row["rewards/form"]
    figures = seen(made)[0]
    assert figures.own_signal.value > 0.99
    assert figures.task_signal == seen(rows(HALF))[0].own_signal
    assert "by task alone 67 %" in verdict(figures, run()[0]).text


def test_most_is_cut_off() -> None:
    made = rows(HALF)
    for number, row in enumerate(made):
        row["finish_reason"] = "stop" if number % 4 == 1 else "length"
    figures, _, changes = seen(made)
    assert changes[0] == "truncated"
    assert figures.passes_ended == pytest.approx(2 / 3)


def test_the_form_that_the_prompt_asks_for_is_missing() -> None:
    made = rows(HALF)
    for number, row in enumerate(made):
        row["completion"] = f"{number}" if number % 8 else "<answer>1</answer>"
    figures, _, changes = seen(made)
    assert figures.markers == ["</answer>"] and figures.unmarked == 0.875
    assert "format" not in changes  # with it fewer pass
    for row in made:
        row["rewards/task"] = row["reward"] = float(
            "</answer>" in row["completion"] and row["group"] < 6
        )
    assert "format" in seen(made)[2]


def test_invalid_rewards_are_said_first() -> None:
    made = rows(HALF)
    for row in made[::2]:
        row["rewards/task"] = row["reward"] = None
    figures, level, changes = seen(
        made, invalid={"task": {"count": len(made) // 2, "cause": "ZeroDivisionError"}}
    )
    assert (
        changes[0] == "invalid"
        and figures.rewards[0].invalid == 0.5
        and figures.rewards[0].silent == 0
    )
    assert level == "nothing to learn from"  # those that are left are all 1 or all 0


def test_groups_larger_than_what_was_sampled() -> None:
    figures, level, _ = seen(rows(HALF), "--num_generations 32")
    assert figures.signal[32] is None and figures.own_signal == figures.signal[16]
    assert "at least" in verdict(figures, run()[0]).text and level == "learnable"


def test_without_groups_the_whole_step_is_compared() -> None:
    # groups alike in themselves
    each: list[list[float | None]] = [[1.0] * 16] * 12 + [[0.0] * 16] * 12
    assert seen(rows(each))[1] == "nothing to learn from"
    more = "--advantage_estimator reinforce_plus_plus"
    figures, _, _ = seen(rows(each), more)
    assert figures.own_signal.value == pytest.approx(1.0) and figures.groups_per_step == 1
    assert figures.signal == {} and "(no interval)" in verdict(figures, run(more)[0]).text


def test_several_rewards_that_are_normalised_apart() -> None:
    made = rows([[0.0, 1.0] * 8] * 24)
    for row in made:
        row["rewards/form"], row["reward"] = 1 - row["rewards/task"], 1.0
    assert seen(made)[0].own_signal.value == 0
    apart = "--multi_objective_aggregation normalize_then_sum"
    assert seen(made, apart)[0].own_signal.value > 0.9
    for row in made:
        row["rewards/task"] = 1.0
    assert seen(made, apart + " --reward_weights 1 0")[0].own_signal.value == 0


def test_what_is_printed() -> None:
    made = rows(HALF, prompt_id="[/data]/x[1]:2")
    figures = seen(made, fault="2 GiB more did not fit on the GPU")[0]
    console = Terminal(width=120, record=True, file=io.StringIO())
    show(figures, verdict(figures, run()[0]), "fits", console)
    said = console.export_text()
    assert "[/data]/x[1]:2" in said and "runs out of memory: 2 GiB more did not fit" in said
    assert "groups of 8 with a signal (the run's)" in said and "Verdict: learnable" in said
    assert "power: the mean reward of a round (0.333)" in said and "rise: to 0.667 if" in said


def test_the_plan_is_the_runs() -> None:
    args, plan = run()
    assert outlook(
        rows(HALF), FOUND, args, replace(plan, total_steps=3600)
    ).cost.hours == pytest.approx(7.52)
