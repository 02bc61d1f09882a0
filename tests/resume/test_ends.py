"""Runs of two ranks on a busy machine: whatever the last step leaves to threads of C++, they end with exit code 0."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ENDS = int(os.environ.get("SWIFT_R1_ENDS", "200"))


@pytest.fixture
def busy() -> Iterator[None]:
    """Beside a process that does nothing but compute."""
    hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield
    hog.kill()
    hog.wait()


@pytest.mark.long
@pytest.mark.timeout(ENDS * 60)
def test_every_end_of_two_ranks_is_exit_code_0(runs: Any, busy: None, tmp_path: Path) -> None:
    flags = {
        "deepspeed": "zero2",
        "deterministic": "false",
        "save_steps": 100,
        "per_device_train_batch_size": 4,
    }
    codes = []
    for number in range(ENDS):
        codes.append(runs.run(tmp_path / str(number), processes=2, max_steps=1, **flags).code)
    print(f"{codes.count(0)} of {ENDS} ends held")
    assert codes == [0] * ENDS
