"""What the root `conftest.py` holds the tests to, in one process and in several: nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import wait_until_gone

ROOT = Path(__file__).parents[2]

LEAVES = "import subprocess\ndef test_it():\n    subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
TWO = ("-p", "xdist", "-n", "2")  # processes


def run(tmp_path: Path, test: str, words: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    conftest = (ROOT / "conftest.py").read_text().replace("GRACE_S = 15.0", "GRACE_S = 0.5")
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = data: needs data\n")
    (tmp_path / "test_it.py").write_text(test)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    env |= {"SWIFT_R1_REQUIRE_DATA": "", "PYTHONPATH": str(ROOT)}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take longer than these tests
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *words,
        str(tmp_path),
    ]
    return subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    "words", [(), pytest.param(TWO, marks=pytest.mark.long)], ids=["one process", "two processes"]
)
def test_a_process_that_tests_leave_behind_is_ended_and_fails_the_run(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    done = run(tmp_path, LEAVES, words)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    (line,) = [
        line for line in done.stderr.splitlines() if line.startswith("left running by the tests: ")
    ]
    number = int(line.split(": ")[1])
    assert line.endswith(f"{number}: sleep 1000")
    with contextlib.suppress(psutil.NoSuchProcess):
        wait_until_gone([psutil.Process(number)])
    assert " passed in " in done.stdout.splitlines()[-1]
