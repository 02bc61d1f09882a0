"""A few seconds of each fuzzer, so that they stay as they must be; `make fuzz` runs them for hours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "words",
    [
        ["tests.fuzz.wire", "--episodes", "15", "--seed", "7", "--kinds", "small", "--folder", "."],
        pytest.param(
            ["tests.fuzz.routes", "--cases", "4", "--server", "rollout"], marks=pytest.mark.long
        ),
        pytest.param(
            ["tests.fuzz.routes", "--cases", "4", "--server", "gateway"], marks=pytest.mark.long
        ),
    ],
    ids=["updates", "routes", "gateway"],
)
def test_nothing_is_found(words: list[str], tmp_path: Path) -> None:
    path = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=tmp_path,
        env=path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
