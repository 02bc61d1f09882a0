"""`swift sample`: the answers that rewards find good, as rows that `swift sft` reads."""

from __future__ import annotations

import json
from pathlib import Path

import psutil

from swift_r1.data.loading import load_rows
from swift_r1.data.prompts import Prompt
from swift_r1.data.sources import DataFlags
from swift_r1.rollout.trajectory import Trajectory
from swift_r1.training.sampling import kept
from tests import forks
from tests.conftest import until, wait_until_gone

PLUGIN = Path(__file__).parent / "digits_plugin.py"
PROMPT = Prompt("d:0", "d", ({"role": "user", "content": "?"},), "?", (1,), {})


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
    words = [
        *(
            "--model",
            str(tiny_model),
            "--external_plugins",
            str(PLUGIN),
            "--reward_funcs",
            "digits",
        ),
        *("--dataset", "counting#200", "--reward_isolation", "inline", "--output_file", str(file)),
        *("--per_device_train_batch_size", "8", "--num_generations", "4", "--num_completions", "4"),
        *(
            "--max_completion_length",
            "48",
            "--stop_words",
            *"aeiou13579",
            "--reward_threshold",
            "0",
        ),
    ]
    process = forks.start(["-m", "swift_r1", "sample", *words], cwd=tmp_path)
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


def test_rows_of_a_model_that_sft_reads(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "good.jsonl"
    words = [
        *("--model", str(tiny_model), "--external_plugins", str(PLUGIN)),
        *("--dataset", "counting#6", "--reward_funcs", "digits", "--reward_isolation", "inline"),
        *("--max_completion_length", "48", "--stop_words", *"aeiou13579", "--num_prompts", "2"),
        *("--per_device_train_batch_size", "8"),
        *("--num_generations", "4", "--num_completions", "4", "--n_best_to_keep", "2"),
        *("--reward_threshold", "0", "--output_file", str(file)),
    ]
    environ = {"OMP_NUM_THREADS": "1"}
    done = forks.run(
        ["-m", "swift_r1", "sample", *words], cwd=tmp_path, environ=environ, timeout=280
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert "8 answers to 2 prompts" in done.stdout
    assert "2 prompts x 4 answers = 8, 8 at a time, at most 384 new tokens" in done.stdout
    assert "at most about " in done.stdout and "an optimizer step" not in done.stdout
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows and all(row["messages"][-1]["role"] == "assistant" for row in rows)
    assert all(row["reward"] >= 0 for row in rows)
    questions = [row["messages"][0]["content"] for row in rows]
    assert max(map(questions.count, questions)) <= 2
    read = load_rows(DataFlags(dataset=[str(file)], whole=True)).train
    assert [row["messages"] for row in read] == [row["messages"] for row in rows]
    again = forks.run(
        ["-m", "swift_r1", "sample", *words], cwd=tmp_path, environ=environ, timeout=280
    )
    assert again.returncode == 2 and "is there already" in again.stderr
