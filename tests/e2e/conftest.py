"""`swift rlhf` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from swift_r1.record.glossary import unknown
from tests import forks
from tests.e2e.live_run import words_of
from tests.lab.runs.entries import undescribed


@dataclass(frozen=True)
class Run:
    """A finished `swift rlhf`."""

    code: int
    errors: str
    folder: Path

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines("logging.jsonl") if "loss" in line]


@pytest.fixture
def rlhf(tmp_path: Path) -> Callable[..., Run]:
    """`rlhf(model, processes=1, cold=False, **flags) -> Run` on the digits task, a flag that is [] is left out; what it
    prints is shown if a test fails. `cold` pays for the imports, goes through the real launcher, draws curves, and has
    reward processes; else rewards are called in the trainer, but where a test is about their processes. A metric that
    the glossary lacks, and a file that the catalogue lacks, is a failure."""

    def run(model: Path, processes: int = 1, cold: bool = False, **flags: Any) -> Run:
        own = {
            "reward_isolation": "process" if cold else "inline",
            "per_device_train_batch_size": 8,
            "output_dir": tmp_path / "run",
        } | flags
        words = ["-m", "swift_r1", "rlhf", *words_of(model, own["output_dir"], **own)]
        environ = {"NPROC_PER_NODE": str(processes), "OMP_NUM_THREADS": "1"}
        if cold:
            done = subprocess.run(
                [sys.executable, *words],
                cwd=tmp_path,
                env=os.environ | environ,
                capture_output=True,
                text=True,
                timeout=280,
                check=False,
            )
        else:
            done = forks.run(words, cwd=tmp_path, environ=environ, timeout=280)
        print(done.stdout, done.stderr)
        finished = Run(done.returncode, done.stderr, Path(own["output_dir"]))
        if (finished.folder / "logging.jsonl").is_file():
            new = unknown({key for line in finished.lines("logging.jsonl") for key in line})
            assert not new, f"no entry of swift_r1/record/glossary says what {new} are"
            written = [
                path.relative_to(finished.folder)
                for path in finished.folder.rglob("*")
                if path.is_file()
            ]
            assert not undescribed([str(path) for path in written]), (
                "no entry of scripts/reference/files.toml"
            )
        return finished

    return run
