"""What the root `conftest.py` holds the tests to, in one process and in several: required data, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import wait_until_gone

ROOT = Path(__file__).parents[2]

MARKED = "import pytest\n@pytest.mark.data\ndef test_it():\n    pytest.skip('no data')\n"
NAMED = "import pytest\n@pytest.mark.skipif(True, reason='set SWIFT_R1_DATA')\ndef test_it():\n    pass\n"
WHOLE_FILE = "import pytest\npytest.skip('set SWIFT_R1_DATA', allow_module_level=True)\n"
LEAVES = "import subprocess\ndef test_it():\n    subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
TWO = ("-p", "xdist", "-n", "2")  # processes


def run(
    tmp_path: Path, test: str, required: bool, words: tuple[str, ...] = (), **how: Any
) -> subprocess.CompletedProcess[str]:
    conftest = (ROOT / "conftest.py").read_text().replace("GRACE_S = 15.0", "GRACE_S = 0.5")
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = data: needs data\n")
    (tmp_path / "test_it.py").write_text(test)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    env |= {"SWIFT_R1_REQUIRE_DATA": "1" if required else "", "PYTHONPATH": str(ROOT)}
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
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, **how
    )


@pytest.mark.parametrize(
    ("test", "words"),
    [(MARKED, ()), (NAMED, ()), (WHOLE_FILE, TWO)],
    ids=["marked", "named", "whole file, two processes"],
)
def test_a_skip_for_want_of_data_fails_where_data_is_required(
    tmp_path: Path, test: str, words: tuple[str, ...]
) -> None:
    done = run(tmp_path, test, True, words)
    assert done.returncode in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)
    assert "data is required here (SWIFT_R1_REQUIRE_DATA=1), but this was skipped" in done.stdout


@pytest.mark.parametrize("words", [(), TWO], ids=["one process", "two processes"])
def test_a_process_that_tests_leave_behind_is_ended_and_fails_the_run(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    done = run(tmp_path, LEAVES, False, words)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    (line,) = [
        line for line in done.stderr.splitlines() if line.startswith("left running by the tests: ")
    ]
    number = int(line.split(": ")[1])
    assert line.endswith(f"{number}: sleep 1000")
    with contextlib.suppress(psutil.NoSuchProcess):
        wait_until_gone([psutil.Process(number)])
    assert " passed in " in done.stdout.splitlines()[-1]
