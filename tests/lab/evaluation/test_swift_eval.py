"""`swift eval` end to end: what it writes, that it goes on after a kill, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swift_r1.data.prompt_templates import template_arguments
from swift_r1.errors import RunFailed, UsageError
from swift_r1.flags.evaluation import EvalArguments
from swift_r1.flags.parser import parse_arguments
from swift_r1.lab.evaluation.server import ServedModel
from swift_r1.rewards.graders import grade_gsm8k
from swift_r1.rewards.orm import orms
from tests.lab.evaluation.conftest import rows_of

Evaluate = Callable[..., Path]


def test_every_completion_is_there_and_the_report_is_theirs(
    swift_eval: Evaluate, tiny_model: Path, gsm8k_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = swift_eval(tiny_model, benchmarks=[f"gsm8k={gsm8k_file}"], n=4)
    rows = rows_of(folder)
    assert [(row["prompt_id"], row["index"]) for row in rows] == [
        (f"gsm8k:{question}", index) for question in range(12) for index in range(4)
    ]
    for row in rows:
        assert row["reward"] == grade_gsm8k(row["completion"], row["columns"]["solution"]).score
        assert row["right"] == (row["reward"] == 1.0) and row["prompt"].endswith("assistant\n")
        assert (row["finish_reason"] == "length") == (row["tokens"] == 8) or row[
            "finish_reason"
        ] == "stop"
    report = json.loads((folder / "report.json").read_text())
    own = report["benchmarks"]["gsm8k"]
    assert own["metrics"]["avg@4"]["value"] == pytest.approx(sum(row["right"] for row in rows) / 48)
    by_question = [
        any(row["right"] for row in rows[start : start + 4]) for start in range(0, 48, 4)
    ]
    assert own["metrics"]["pass@4"]["value"] == pytest.approx(sum(by_question) / 12)
    assert own["mean_length"] == pytest.approx(sum(row["tokens"] for row in rows) / 48)
    assert own["truncated"] == pytest.approx(
        sum(row["finish_reason"] == "length" for row in rows) / 48
    )
    assert {"avg@4", "pass@1", "pass@2", "pass@4", "maj@4"} == set(own["metrics"])
    settings = report["settings"]
    assert settings["engine"]["served_model"] == str(tiny_model)
    assert len(settings["tasks"]["gsm8k"]["sha256"]) == 64
    assert "gsm8k" in (printed := capsys.readouterr().out) and "avg@4" in printed


def test_a_finished_evaluation_is_shown_again_without_a_model(
    swift_eval: Evaluate, tiny_model: Path, gsm8k_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: dict[str, Any] = {"benchmarks": [f"gsm8k={gsm8k_file}#3"]}
    first = (swift_eval(tiny_model, **flags) / "report.json").read_text()
    monkeypatch.setattr(ServedModel, "start", lambda self: pytest.fail("the model was loaded"))
    assert (swift_eval(tiny_model, **flags) / "report.json").read_text() == first


@pytest.mark.parametrize(
    "end", ['{"benchmark": "gsm', '{"benchmark": "gsm8k", "prompt_id": "gsm8k:5", "ind', ""]
)
def test_what_a_kill_cut_off_is_asked_again(
    swift_eval: Evaluate, tiny_model: Path, gsm8k_file: Path, tmp_path: Path, end: str
) -> None:
    whole = swift_eval(
        tiny_model, benchmarks=[f"gsm8k={gsm8k_file}"], output_dir=tmp_path / "whole"
    )
    cut = swift_eval(tiny_model, benchmarks=[f"gsm8k={gsm8k_file}"], output_dir=tmp_path / "cut")
    path = cut / "completions.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:9]) + end)  # four questions, and half of the fifth
    swift_eval(tiny_model, benchmarks=[f"gsm8k={gsm8k_file}"], output_dir=cut)
    assert rows_of(cut) == rows_of(whole)


def test_other_settings_in_the_same_folder_are_refused(
    swift_eval: Evaluate, tiny_model: Path, tiny_model_untied: Path, gsm8k_file: Path
) -> None:
    flags: dict[str, Any] = {"benchmarks": [f"gsm8k={gsm8k_file}#2"]}
    swift_eval(tiny_model, **flags)
    for change, said in [
        ({"temperature": 0.5}, "tasks.gsm8k.temperature: 1.0 became 0.5"),
        ({"seed": 1}, "seed: 42 became 1"),
        ({"benchmarks": [f"gsm8k={gsm8k_file}#3"]}, "tasks.gsm8k.limit: 2 became 3"),
    ]:
        with pytest.raises(UsageError, match="other settings") as error:
            swift_eval(tiny_model, **flags | change)
        assert said in error.value.faults
    with pytest.raises(UsageError, match="other settings"):
        swift_eval(tiny_model_untied, **flags)
    gsm8k_file.write_text(gsm8k_file.read_text().replace('"2"', '"3"'))
    with pytest.raises(UsageError, match=r"tasks\.gsm8k\.sha256"):
        swift_eval(tiny_model, **flags)
    swift_eval(tiny_model, **flags | {"output_dir": gsm8k_file.parent / "other"})


def test_one_evaluation_at_a_time_in_a_folder(
    swift_eval: Evaluate, tiny_model: Path, gsm8k_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "eval").mkdir()
    hold = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, 2); print(1, flush=True); input()"
    words = [sys.executable, "-c", hold, str(tmp_path / "eval" / ".lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        with pytest.raises(UsageError, match="another evaluation is at work in"):
            swift_eval(tiny_model, benchmarks=[f"gsm8k={gsm8k_file}"])
        other.communicate(b"\n", timeout=10)


def test_a_question_that_cannot_be_asked_is_no_question_less(
    swift_eval: Evaluate, tiny_model: Path, gsm8k_file: Path
) -> None:
    with gsm8k_file.open("a") as file:
        file.write('{"question": "no answer"}\n')
    with pytest.raises(UsageError, match="1 of 13 rows cannot be used"):
        swift_eval(tiny_model, benchmarks=[f"gsm8k={gsm8k_file}"])
    with pytest.raises(UsageError, match="the model takes 1024: a completion may have 9"):
        swift_eval(tiny_model, benchmarks=[f"gsm8k={gsm8k_file}#12"], max_completion_length=1024)


def test_a_reward_that_cannot_judge_ends_it(
    swift_eval: Evaluate,
    tiny_model: Path,
    gsm8k_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(orms, "a_judge", None)  # what the plugin registers goes with the test
    plugin = tmp_path / "judge.py"
    plugin.write_text(
        "from swift.rewards import ORM, orms\n"
        "class Judge(ORM):\n"
        "    def __call__(self, completions, solution, **kwargs):\n"
        "        return [float('nan') if s == '7' else 1.0 for s in solution]\n"
        "orms['a_judge'] = Judge\n"
    )
    task = json.dumps({"name": "mine", "dataset": f"gsm8k={gsm8k_file}", "reward": "a_judge"})
    with pytest.raises(
        RunFailed, match=r"mine: the reward a_judge cannot judge 2 of .* the first of mine:6"
    ):
        swift_eval(tiny_model, benchmarks=[task], external_plugins=[plugin])


def test_a_config_file_holds_objects_as_they_are(tmp_path: Path) -> None:
    config = tmp_path / "eval.yaml"
    config.write_text(
        "model: m\nbenchmarks:\n- gsm8k#5\n- {dataset: math500, name: own, num_generations: 3}\n"
    )
    first, own = parse_arguments(EvalArguments, [str(config)], {}).tasks()
    assert (first.limit, own.name, own.num_generations, own.reward) == (5, "own", 3, "math")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--benchmarks", "gsm8k"], "--model is missing"),
        (["--model", "m"], "--benchmarks is missing"),
        (["--model", "m", "--benchmarks", "sums.jsonl"], "say who judges it: --reward_func math"),
        (
            ["--model", "m", "--benchmarks", "gsm9k"],
            "gsm9k: it is not a benchmark (did you mean gsm8k?), so say who",
        ),
        (
            ["--model", "m", "--benchmarks", "openai/gsm8k"],
            "openai_gsm8k: it is not a benchmark, so say who judges it",
        ),
        (
            ["--model", "m", "--benchmarks", "gsm9k=a.jsonl"],
            "there is no benchmark gsm9k: did you mean gsm8k?",
        ),
        (
            ["--model", "m", "--benchmarks", '{"dataset": "gsm8k", "limt": 3}'],
            "there is no key limt: did you mean limit?",
        ),
        (
            ["--model", "m", "--benchmarks", "gsm8k", "--api_key", "k"],
            "--api_key has no effect with a server of its own",
        ),
        (
            ["--model", "http://h", "--benchmarks", "gsm8k", "--torch_dtype", "float32"],
            "no effect with the URL of",
        ),
        (["--compare", "a"], "--compare takes two folders, not 1"),
        (["--compare", "a", "b", "--model", "m"], "leave out --model"),
    ],
)
def test_bad_commands(words: list[str], said: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_arguments(EvalArguments, words, {})
    assert any(said in fault for fault in error.value.faults), error.value.faults


def test_a_benchmark_has_its_own_arguments_of_the_template() -> None:
    def asked(*words: str, **own: Any) -> dict[str, Any]:
        words = ("--model", "m", "--benchmarks", json.dumps({"dataset": "gsm8k", **own}), *words)
        [task] = parse_arguments(EvalArguments, words, {}).tasks()
        return template_arguments(task.enable_thinking, task.chat_template_kwargs)

    thinks = {"enable_thinking": True}
    assert asked("--enable_thinking", "false") == {"enable_thinking": False}
    assert asked("--chat_template_kwargs", '{"effort": 1}', enable_thinking=True) == thinks | {
        "effort": 1
    }
    assert asked("--enable_thinking", "false", chat_template_kwargs=thinks) == thinks
    assert (
        asked("--chat_template_kwargs", '{"enable_thinking": false}', enable_thinking=True)
        == thinks
    )


def test_a_template_for_reasoning(swift_eval: Evaluate, tiny_model: Path, tmp_path: Path) -> None:
    """The published R1 prompt: no instruction of the benchmark, answers in tags, and a turn that begins with a tag."""
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"problem": "What is $1+1$?", "answer": 2.0}\n')
    flags: dict[str, Any] = {"benchmarks": [f"math500={problems}"], "max_completion_length": 4}
    folder = swift_eval(tiny_model, **flags, prompt_template="r1", response_prefix="<think>")
    for row in rows_of(folder):
        assert row["prompt"].startswith("A conversation between User and Assistant.")
        assert row["prompt"].endswith("What is $1+1$?\nAssistant:<think>") and row[
            "completion"
        ].startswith("<think>")
        assert row["columns"] == {"solution": "2"}
    settings = json.loads((folder / "settings.json").read_text())["tasks"]["math500"]
    assert (settings["reward"], settings["prompt_template"]) == ("math_tag", "r1")
    # A template in a file counts by what it says.
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[-1]['content'] }}:")
    swift_eval(tiny_model, **flags, prompt_template=template, output_dir=tmp_path / "file")
    template.write_text("{{ messages[-1]['content'] }}!")
    with pytest.raises(UsageError, match=r"tasks\.math500\.prompt_template_sha256"):
        swift_eval(tiny_model, **flags, prompt_template=template, output_dir=tmp_path / "file")


def test_turns_end_and_begin_as_the_template_says(
    swift_eval: Evaluate, thinking_base: Path, gsm8k_file: Path, tmp_path: Path
) -> None:
    """A base model's end token is not the template's; what the template opens is part of the text that is judged."""
    flags: dict[str, Any] = {
        "benchmarks": [f"gsm8k={gsm8k_file}"],
        "n": 4,
        "max_completion_length": 40,
    }
    rows = rows_of(swift_eval(thinking_base, **flags))
    assert all(
        row["prompt"].endswith("<think>\n") and row["completion"].startswith("<think>\n")
        for row in rows
    )
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    short = [row for row in rows if row["finish_reason"] == "stop"]
    assert all("assistant" not in row["completion"] for row in short)
    # In another form of prompt the turn has no such end, and nothing opens it.
    rows = rows_of(
        swift_eval(thinking_base, **flags, prompt_template="no", output_dir=tmp_path / "plain")
    )
    assert not all(row["completion"].startswith("<think>") for row in rows)
