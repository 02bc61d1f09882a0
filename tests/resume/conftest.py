"""Runs that are killed and resumed, and what must be equal afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from swift_r1.lab.runs.timeline import Timeline
from tests import forks
from tests.e2e.live_run import words_of
from tests.forks import ForkedProcess

HERE = Path(__file__).parent
DEADLINE = 200


@dataclass(frozen=True)
class Ended:
    """A run that has ended: its exit code (negative: the signal), and what it said."""

    code: int
    said: str


class Runs:
    """`swift rlhf` in processes forked from one that has imported everything."""

    def __init__(self, model: Path) -> None:
        self._model = model

    def start(
        self, folder: Path, forget: str | None = None, processes: int = 1, **flags: Any
    ) -> ForkedProcess:
        """Starts a run whose folder is `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        with _log_of(folder).open("a") as log:
            return forks.start(
                ["-m", "swift_r1", "rlhf", *words(self._model, folder, **flags)],
                cwd=folder.parent,
                environ={"OMP_NUM_THREADS": "1", "NPROC_PER_NODE": str(processes)},
                stdout=log,
                stderr=forks.STDOUT,
                prepare=forget and ["tests.resume.forgetting", "forget", forget],
            )

    def wait(self, run: ForkedProcess, folder: Path, kill_after: float | None = None) -> Ended:
        """Until the run has ended; `kill_after` seconds its whole process group gets SIGKILL."""
        try:
            code = run.wait(DEADLINE if kill_after is None else kill_after)
        except subprocess.TimeoutExpired:
            _kill_group(run.pid)
            code = run.wait(DEADLINE)
        return Ended(code, _log_of(folder).read_text())

    def run(
        self, folder: Path, forget: str | None = None, processes: int = 1, **flags: Any
    ) -> Ended:
        """A run from its start to its end."""
        ended = self.wait(self.start(folder, forget, processes, **flags), folder)
        print(ended.said)
        return ended


def _log_of(folder: Path) -> Path:
    return folder.parent / f"{folder.name}.log"


def happened(folder: Path) -> list[tuple[str, int, str]]:
    """Kind, step and text of the run's events, and of what is found from them."""
    timeline = Timeline(folder)
    timeline.refresh()
    assert timeline.problems == []
    return [(mark.kind, mark.step, mark.text) for mark in timeline.marks]


def words(model: Path, folder: Path, /, **flags: Any) -> list[str]:
    """Flags of a run on the noisy digits task that leaves everything in `folder`."""
    own = {
        "external_plugins": HERE / "noisy_plugin.py",
        "dataset": "counting#40",
        "reward_funcs": "noisy_digits",
        "per_device_train_batch_size": 8,
        "max_completion_length": 8,
        "lr_scheduler_type": [],
        "logging_steps": 2,
        "learning_rate": 3e-3,
        "deterministic": "true",
    }
    return words_of(model, folder, **own | flags)


def contents(folder: Path) -> dict[str, Any]:
    """What two runs that are the same have in common, file by file: all but times and memory."""
    checkpoint = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    found: dict[str, Any] = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted([*checkpoint.rglob("*.safetensors"), *(folder / "tokens").iterdir()])
    }
    for name in ("completions.jsonl", "eval_completions.jsonl", "invalid_rewards.jsonl"):
        found[name] = (folder / name).read_text()
    lines = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
    found["logging.jsonl"] = [
        {
            key: value
            for key, value in line.items()
            if not key.startswith(("time/", "memory/")) and "second" not in key
        }
        for line in lines
    ]
    return found


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)  # not yet the leader of a group


@pytest.fixture(scope="session")
def runs(tiny_model: Path) -> Runs:
    return Runs(tiny_model)


@pytest.fixture
def same() -> Callable[[Path, Path], None]:
    """Fails unless two run folders hold the same, bit for bit and times aside."""

    def compare(one: Path, other: Path) -> None:
        first, second = contents(one), contents(other)
        assert first.keys() == second.keys()
        differing = [name for name in first if first[name] != second[name]]
        assert differing == []

    return compare
