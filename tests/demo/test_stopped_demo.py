"""`swift demo` that is told to stop: its training ends in order, with a checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

# A part that ends in order at the first signal, and says how many came.
PART = """
import signal, sys, time
heard = []
signal.signal(signal.SIGINT, lambda *_: heard.append(130))
signal.signal(signal.SIGTERM, lambda *_: heard.append(143))
print("ready", flush=True)
while not heard:
    signal.pause()
time.sleep(0.3)
print("saved", len(heard), flush=True)
sys.exit(heard[0])
"""
DEMO = f"""
import sys
from swift_r1.cli.demo import finished
code = finished([sys.executable, "-c", {PART!r}])
print("ended", flush=True)
sys.exit(code)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "to_group"), [(signal.SIGINT, True), (signal.SIGINT, False), (signal.SIGTERM, False)]
)
def test_its_training_hears_of_it_once_and_ends_by_itself(number, to_group):
    demo = subprocess.Popen(
        [sys.executable, "-c", DEMO], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with demo:
        try:
            assert demo.stdout.readline() == "ready\n"
            (os.killpg if to_group else os.kill)(demo.pid, number)
            assert demo.communicate(timeout=60)[0] == "saved 1\nended\n"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(demo.pid, signal.SIGKILL)
    assert demo.returncode == 128 + number
