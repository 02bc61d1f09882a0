"""What `swift init` writes trains as it is, with smaller sizes."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from swift_r1.cli.init import STARTERS, write_starter
from tests import forks
from tests.rewards.test_judge import Server

SMALL = "--max_steps 2 --num_generations 4 --per_device_train_batch_size 8 --max_completion_length 8 --max_length 400"


LONG = ("format", "code", "judge", "agent")


@pytest.mark.parametrize(
    "task",
    [pytest.param(task, marks=pytest.mark.long if task in LONG else ()) for task in STARTERS],
)
def test_a_starter_trains(task: str, tmp_path: Path, tiny_model: Path) -> None:
    write_starter(tmp_path, task, str(tiny_model))
    words = ["-m", "swift_r1", "rlhf", "run.yaml", *SMALL.split(), "--add_version", "false"]
    with Server(lambda request, number: "[[7]]") as judge:
        threading.Thread(target=judge.serve_forever, daemon=True).start()
        if task == "judge":
            own = tmp_path / "judge.yaml"
            own.write_text(own.read_text().replace("http://127.0.0.1:8001/v1", judge.url))
        done = forks.run(words, cwd=tmp_path, environ={"OMP_NUM_THREADS": "1"}, timeout=200)
        judge.shutdown()
    assert done.returncode == 0, done.stderr
    steps = [
        json.loads(line)
        for line in (tmp_path / "output" / "logging.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in steps if "loss" in line] == [1, 2]
    if task == "judge":
        assert judge.seen and steps[0]["rewards/judge/mean"] == pytest.approx(0.7)
    if task == "agent":
        assert all(line["agent/sequences"] >= 1 for line in steps if "loss" in line)
