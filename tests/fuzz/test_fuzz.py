"""A part of what `python -m tests.fuzz.near_answers` asks, so that it stays as it must be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.near_answers import DATA

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no data at {DATA}: set SWIFT_R1_DATA")
@pytest.mark.data
def test_no_answer_near_a_gold_one_earns_a_reward(tmp_path: Path) -> None:
    words = ["tests.fuzz.near_answers", "--data", str(DATA), "--every", "600"]
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
