"""`--mixture`: what its file says of each task, and what is wrong with it, in one line each."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from swift_r1.data.mixture import Share, tasks_of_round
from swift_r1.errors import UsageError
from swift_r1.flags.mixture import OF_A_TASK
from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.plan import make_plan, plan_table
from swift_r1.flags.rlhf import CheckArguments, RlhfArguments

BASE = ["--rlhf_type", "grpo", "--model", "m", "--use_vllm", "false"]
# two prompts per round
RUN = [*BASE, "--num_generations", "4", "--per_device_train_batch_size", "8", "--max_steps", "3"]
ONE = {"dataset": "one.jsonl", "reward_funcs": "format"}
TWO = {"dataset": "two.jsonl", "reward_funcs": ["digits", "format"], "reward_weights": [1, 0.5]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mixture.yaml"


def parsed(tasks: Any, *more: str, run: list[str] = RUN) -> RlhfArguments:
    return parse_arguments(RlhfArguments, [*run, "--mixture", json.dumps(tasks), *more], {})


def test_each_task_has_the_runs_flags_and_its_own(file: Path) -> None:
    tools = {"tools": ["add"], "max_turns": 3, "max_completion_length": 32, "system": "a\\nb"}
    file.write_text(
        yaml.safe_dump({"two": TWO | {"prompts": 1}, "one": ONE | tools | {"prompts": 1}})
    )
    args = parse_arguments(
        RlhfArguments, [*RUN, "--mixture", str(file), "--tool_timeout", "3", "--top_p", "0.9"], {}
    )
    file.unlink()  # it is read once: other processes get its content
    again = RlhfArguments.from_dict(json.loads(json.dumps(args.to_dict())))
    assert again.tasks == args.tasks
    two, one = sorted(args.tasks, key=lambda task: -len(task.args.reward_funcs))
    assert (one.name, two.name) == ("one", "two") and one.share == two.share == Share(prompts=1)
    assert (
        one.args.multi_turn_scheduler == "tool_scheduler" and two.args.multi_turn_scheduler is None
    )
    assert one.args.system == "a\nb" and one.args.max_turns == 3 and two.args.system is None
    assert (one.args.reward_weights, two.args.reward_weights) == ([1.0], [1.0, 0.5])
    assert (one.args.max_completion_length, two.args.max_completion_length) == (32, 512)
    assert all(task.args.top_p == 0.9 and task.args.tool_timeout == 3 for task in args.tasks)
    assert set(args.reward_funcs) == {"format", "digits"} and args.max_completion_length == 512
    assert args.cosine_max_len == one.args.cosine_max_len == 512  # of rewards, which are made once
    assert args.takes_turns and args.leads_turns and not two.args.takes_turns


def test_a_mixture_of_one_task_is_read_again_in_other_processes() -> None:
    args = parsed({"one": ONE})
    again = RlhfArguments.from_dict(json.loads(json.dumps(args.to_dict())))
    assert again.tasks == args.tasks and again.tasks[0].args.dataset == ["one.jsonl"]


def test_a_run_without_a_mixture_is_one_task() -> None:
    args = parse_arguments(RlhfArguments, [*RUN, "--dataset", "d", "--reward_funcs", "format"], {})
    [task] = args.tasks
    assert task.name == "" and task.args is args and task.share == Share()


def test_the_plan_says_what_each_task_is() -> None:
    args = parsed({"one": ONE, "two": TWO | {"weight": 3}})
    plan = make_plan(args, 1, 100)
    assert plan.epochs is None and plan.prompts_per_epoch is None and plan.total_steps == 3
    table = plan_table(plan, args)
    rows = dict(zip(*(column._cells for column in table.columns), strict=True))
    assert rows["data"] == "100 prompts, of 2 tasks" and rows["rewards"] == "by task"
    assert rows["task two"] == (
        "weight 3, of two.jsonl, judged by digits x 1, format x 0.5, at most 512 new tokens"
    )


FAULTS: dict[str, tuple[Any, list[str], str]] = {
    "no task": ({}, [], "--mixture: must hold a mapping of tasks"),
    "a task that is none": ({"one": "d"}, [], "task one: must be a mapping of its own flags"),
    "a name": ({"a/b": ONE}, [], "task a/b: its name must be of letters, digits and . + - _"),
    "unknown key": (
        {"one": ONE | {"rewards": 1}},
        [],
        "task one: there is no key rewards: known are",
    ),
    "a flag of the run": (
        {"one": ONE | {"learning_rate": 1e-5}},
        [],
        "task one: --learning_rate is of the whole run: give it on the command line",
    ),
    "temperature": (
        {"one": ONE | {"temperature": 0.5}},
        [],
        "task one: --temperature is of the whole run",
    ),
    "a value": (
        {"one": ONE | {"max_turns": "many"}},
        [],
        "task one: max_turns must be a whole number, not 'many'",
    ),
    "weight 0": ({"one": ONE | {"weight": 0}}, [], "task one: weight must be more than 0, not 0"),
    "negative weight": ({"one": ONE | {"weight": -1}}, [], "weight must be more than 0, not -1"),
    "prompts of some": (
        {"one": ONE | {"prompts": 2}, "two": TWO},
        [],
        "task two has no prompts, and others have",
    ),
    "another round": (
        {"one": ONE | {"prompts": 2}, "two": TWO | {"prompts": 1}},
        [],
        "prompts of its tasks add up to 3, and a round has 2: 8 completions",
    ),
    "no rows": (
        {"one": {"reward_funcs": "format"}},
        [],
        "task one: it has neither dataset nor env",
    ),
    "no reward": ({"one": {"dataset": "d"}, "two": TWO}, [], "task one: --reward_funcs is missing"),
    "a flag given twice": (
        {"one": ONE | {"max_turns": 3, "tools": ["add"]}},
        ["--max_turns", "4"],
        "--max_turns is given for the run and by task one: keep one",
    ),
    "names of evaluations": (
        {"one": ONE, "two": TWO | {"eval_datasets": ["one.jsonl#2"]}},
        ["--eval_steps", "1"],
        "two tasks or evaluated data sets have the name one",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_what_is_wrong_is_said_in_one_line(case: str) -> None:
    tasks, more, message = FAULTS[case]
    with pytest.raises(UsageError) as error:
        parsed(tasks, *more)
    assert [fault for fault in error.value.faults if message in fault], error.value.faults
    assert all("\n" not in fault for fault in error.value.faults)


def test_what_is_wrong_with_the_file(file: Path) -> None:
    words = [*RUN, "--mixture", str(file)]
    for text, message in {
        "one: {dataset: a}\none: {dataset: b}\n": "not valid YAML (one stands twice in line 2)",
        "one: {": "not valid YAML",
        "- one": "must hold a mapping of tasks",
    }.items():
        file.write_text(text)
        with pytest.raises(UsageError) as error:
            parse_arguments(RlhfArguments, words, {})
        assert len(error.value.faults) == 1 and message in error.value.faults[0]
    with pytest.raises(UsageError, match=r"--mixture nowhere\.yaml: No such file"):
        parse_arguments(RlhfArguments, [*RUN, "--mixture", "nowhere.yaml"], {})
    without_steps = [word for word in RUN if word not in ("--max_steps", "3")]
    with pytest.raises(UsageError, match="--mixture needs --max_steps"):
        parsed({"one": ONE}, run=without_steps)


def test_a_fault_of_all_tasks_is_said_once() -> None:
    with pytest.raises(UsageError) as error:
        parsed({"one": ONE, "two": TWO}, "--loss_type", "dapo", "--api_key", "k")
    assert error.value.faults == ("--api_key has no effect without --use_vllm true",)


def test_check_reads_it_without_a_batch() -> None:
    words = ["--mixture", json.dumps({"one": ONE | {"prompts": 5}, "two": TWO | {"prompts": 2}})]
    args = parse_arguments(CheckArguments, words, {})
    assert [task.args.reward_funcs for task in args.tasks] == [["format"], ["digits", "format"]]
    with pytest.raises(UsageError, match=r"task one: .*reward_weights has 2 values for 1"):
        tasks = {"one": ONE | {"reward_weights": [1, 2]}, "two": TWO}
        parse_arguments(CheckArguments, ["--mixture", json.dumps(tasks)], {})


def test_own_flags_are_flags() -> None:
    assert set(OF_A_TASK) <= RlhfArguments.__dataclass_fields__.keys()


def test_prompts_that_are_counted_lie_evenly_in_a_round() -> None:
    shares = {"a": Share(6), "b": Share(3), "c": Share(3)}
    for round_ in (0, 7):
        tasks = tasks_of_round(shares, round_, 12)
        for part in range(0, 12, 4):  # three optimizer steps
            assert Counter(tasks[part : part + 4]) == {"a": 2, "b": 1, "c": 1}


def test_weights_hold_in_each_round_as_far_as_they_divide_and_in_the_long_run_always() -> None:
    shares = {"a": Share(weight=0.7), "b": Share(weight=0.2), "c": Share(weight=0.1)}
    assert all(
        Counter(tasks_of_round(shares, round_, 10)) == {"a": 7, "b": 2, "c": 1}
        for round_ in range(50)
    )
    for count in (1, 3, 8):
        given: Counter[str] = Counter()
        for round_ in range(400):
            given += Counter(tasks_of_round(shares, round_, count))
            for name, share in shares.items():
                wanted = share.weight * count * (round_ + 1)
                assert abs(given[name] - wanted) < 4, (count, round_, name)
