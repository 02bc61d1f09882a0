"""A few seconds of each fuzzer, so that they stay as they must be; `python -m tests.fuzz.wire` runs for hours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.near_answers import DATA

ROOT = Path(__file__).parents[2]
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no data at {DATA}: set SWIFT_R1_DATA")


@pytest.mark.parametrize(
    "words",
    [
        ["tests.fuzz.wire", "--episodes", "15", "--seed", "7", "--kinds", "small", "--folder", "."],
        pytest.param(
            ["tests.fuzz.near_answers", "--data", str(DATA), "--every", "150"],
            marks=[needs_data, pytest.mark.data],
        ),
    ],
    ids=["updates", "answers"],
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
