"""A supervised process: what it leaves to read, on which cores it runs, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from swift_r1.workers.process import SupervisedProcess
from tests.conftest import REPO, wait_until_gone

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
time.sleep(600)
"""
WAITS = "print('there', flush=True); import time; time.sleep(600)"
PARENT = """
import sys, time
from swift_r1.workers.process import SupervisedProcess
child = SupervisedProcess([sys.executable, "-c", "import time; time.sleep(600)"], ends_with_parent=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def start(script: str, **options: Any) -> SupervisedProcess:
    return SupervisedProcess([sys.executable, "-c", script], **options)


def first_line(process: SupervisedProcess) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def test_output_is_appended_to_the_log_whose_last_line_is_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("of the start before\n")
    process = start(
        "import sys; print('out', flush=True); sys.exit('  no such model\\n\\n')", log=log
    )
    assert process.wait(60) == 1
    assert log.read_text().split() == ["of", "the", "start", "before", "out", "no", "such", "model"]
    assert process.last_line() == "no such model"


def test_errors_are_kept_without_a_log() -> None:
    process = start(
        "import sys; print('out'); sys.stderr.write('x' * 400)",
        stdout=subprocess.PIPE,
        keeps_errors=True,
    )
    assert process.communicate(timeout=60)[0] == b"out\n"
    assert process.last_line() == "x" * 300
    silent = start("", keeps_errors=True)
    silent.wait(60)
    assert silent.last_line() == "it said nothing"


def test_it_leads_a_session_has_nothing_to_read_and_runs_on_its_cores() -> None:
    core = min(os.sched_getaffinity(0))
    script = "import os, sys; print(os.getsid(0) == os.getpid(), os.sched_getaffinity(0), repr(sys.stdin.read()))"
    process = start(script, cpus=[core], stdout=subprocess.PIPE)
    assert process.communicate(timeout=60)[0].decode() == f"True {{{core}}} ''\n"


def test_one_that_does_not_end_is_killed_with_its_group() -> None:
    process = start(STUBBORN, stdout=subprocess.PIPE)
    child = psutil.Process(int(first_line(process)))
    assert process.end(0.1) is False
    assert process.returncode == -signal.SIGKILL
    wait_until_gone([child], 30)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_parent(number: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=REPO, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(number)
    parent.wait(60)
    wait_until_gone([child], 30)
