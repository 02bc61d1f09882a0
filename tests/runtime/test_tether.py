"""Commands that the kernel kills with the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil

from swift_r1.runtime.tether import tethered
from tests.conftest import until

_STARTS = """
import subprocess, sys, time
from swift_r1.runtime.tether import tethered
print(subprocess.Popen(tethered(sys.argv[1:]), stdin=subprocess.DEVNULL).pid, flush=True)
time.sleep(3600)
"""


def test_a_command_ends_with_a_parent_that_is_killed() -> None:
    words = [sys.executable, "-c", _STARTS, "sleep", "3600"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        until(lambda: child.name() == "sleep")
        os.kill(parent.pid, signal.SIGKILL)
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_a_command_that_is_not_there() -> None:
    done = subprocess.run(tethered(["no-such-program"]), capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "no-such-program: No such file or directory\n"
