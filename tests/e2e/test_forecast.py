"""`swift forecast` as a user runs it, on the digits task: its table, and the answers that it keeps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from swift_r1.cli.main import main
from swift_r1.data.loading import load_rows
from swift_r1.data.prompts import Prompt
from swift_r1.data.sources import DataFlags
from swift_r1.rollout.trajectory import Trajectory
from swift_r1.training.rehearsal import kept
from tests import forks
from tests.conftest import until, wait_until_gone

PLUGIN = Path(__file__).parent / "digits_plugin.py"
FLAGS = {
    "rlhf_type": "grpo",
    "external_plugins": PLUGIN,
    "dataset": "counting#200",
    "reward_funcs": "digits",
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 12,
    "lr_scheduler_type": "constant",
    "max_steps": 100,
    "num_prompts": 6,
    "num_completions": 8,
}
KEEPS = {
    "max_completion_length": 48,
    "stop_words": "aeiou13579",
    "reward_isolation": "inline",
    "num_completions": 4,
    "reward_threshold": 0,
}
PROMPT = Prompt("d:0", "d", ({"role": "user", "content": "?"},), "?", (1,), {})


def words(model: Path, **flags: Any) -> list[str]:
    given = FLAGS | flags
    stops = [*given.pop("stop_words", ())]
    found = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return ["forecast", "--model", str(model), *found, *(["--stop_words", *stops] if stops else [])]


def forecast(model: Path, folder: Path, processes: int = 1, **flags: Any) -> dict[str, str]:
    """The lines of its table; of its own folder nothing may be left."""
    environ = {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "NPROC_PER_NODE": str(processes)}
    asked = words(model, **flags)
    done = forks.run(["-m", "swift_r1", *asked], cwd=folder, environ=environ, timeout=280)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert list(folder.glob("swift-forecast-*")) == []
    table = done.stdout.partition("\nForecast")[2].splitlines()
    parts = (re.split(r"  +", line.strip(), maxsplit=1) for line in table)
    return {part[0]: part[1] for part in parts if len(part) > 1}


def test_a_run_that_would_learn(tiny_model: Path, tmp_path: Path) -> None:
    found = forecast(tiny_model, tmp_path)
    signal_share = found["groups of 4 with a signal (the run's)"]
    assert float(signal_share.partition(" %")[0]) > 80
    assert found["groups of 16 with a signal"].endswith("8 answers per prompt are too few")
    step, parts = re.split(r"  +", found["seconds a step"])
    assert float(step) > 0 and {"generate", "train"} <= set(re.findall("[a-z]+", parts))
    assert float(found["memory of a rank, GiB"]) > 0


def test_what_a_run_would_refuse(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = words(tiny_model, num_promts=3, resume_from_checkpoint="last", n_best_to_keep=2)
    assert main(asked) == 2
    said = capsys.readouterr().err
    assert "did you mean --num_prompts?" in said and "--model CHECKPOINT" in said
    assert "--n_best_to_keep has no effect without --output_file" in said
    assert main(words(tiny_model, output_file="nowhere/f.jsonl")) == 2
    assert "there is no folder nowhere" in capsys.readouterr().err


def answer(number: int, text: str, right: float, reward: float, finish: str = "stop") -> Trajectory:
    said = [*PROMPT.messages, {"role": "assistant", "content": text}]
    return Trajectory(
        request_id="r",
        prompt=PROMPT,
        sequences=(),
        turns=(),
        messages=said,
        text=text,
        finish_reason=finish,
        number=number,
        rewards={"right": right, "form": reward - right},
        reward=reward,
    )


def test_the_best_of_the_right_ones_each_text_once() -> None:
    answers = [
        answer(0, "a", 1.0, 1.0),
        answer(1, "b", 1.0, 1.5),
        answer(2, "b", 1.0, 1.5),
        answer(3, "cut", 1.0, 2.0, "length"),
        answer(4, "wrong", 0.0, 1.9),
        answer(5, "invalid", float("nan"), float("nan")),
    ]
    assert [item.number for item in kept(answers, 3, None)] == [1, 0]
    assert [item.number for item in kept(answers, 1, None)] == [1]
    assert [item.number for item in kept(answers, 3, 1.2)] == [4, 1]
    assert kept(answers[4:], 3, None) == []


def test_a_killed_one_leaves_no_trainer_and_no_whole_file(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "good.jsonl"
    part = tmp_path / "good.jsonl.part"
    part.write_text("of one that was stopped before\n")
    asked = words(tiny_model, **KEEPS, num_prompts=0, output_file=file)
    process = forks.start(["-m", "swift_r1", *asked], cwd=tmp_path)
    try:
        until(lambda: part.read_text().startswith("{"), 120)
        below = psutil.Process(process.pid).children(recursive=True)
        assert below
    finally:
        process.kill()
    process.wait(20)
    wait_until_gone(below, 20)
    assert not file.exists()
    assert all(json.loads(line)["messages"] for line in part.read_text().splitlines())


def test_rows_of_a_model_that_sft_reads(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "good.jsonl"
    more = KEEPS | {"num_prompts": 2, "n_best_to_keep": 2, "output_file": file}
    forecast(tiny_model, tmp_path, **more)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows and all(row["messages"][-1]["role"] == "assistant" for row in rows)
    assert all(row["reward"] >= 0 for row in rows)
    questions = [row["messages"][0]["content"] for row in rows]
    assert max(map(questions.count, questions)) <= 2
    read = load_rows(DataFlags(dataset=[str(file)], whole=True)).train
    assert [row["messages"] for row in read] == [row["messages"] for row in rows]
    assert main(words(tiny_model, **more)) == 2
    assert "is there already" in capsys.readouterr().err
