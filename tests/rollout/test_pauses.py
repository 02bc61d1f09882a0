"""SIGSTOP to trainer and server, for longer than the lease lasts and silence is borne, in every phase of a step."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import forks

PHASES = ("begin", "bucket", "commit", "generation", "idle")
RUN = Path(__file__).with_name("paused_run.py")


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def paused_run(
    model: Path,
    servers: Sequence[Any],
    who: str,
    pauses: Sequence[float],
    ttl: float,
    silence: float,
    deadline: float,
) -> str:
    """What the run has logged; it must end well, and every phase with the completions of an undisturbed run."""
    named = [f"{one.url}={one.pid}" for one in servers]
    words = [str(RUN), str(model), who, str(ttl), str(silence), *named]
    process = forks.start(words, stdout=forks.PIPE, stderr=forks.PIPE)
    pid = servers[0].pid if who == "server" else process.pid
    logged: list[str] = []
    assert process.stdout is not None and process.stderr is not None
    reading = threading.Thread(target=logged.extend, args=(process.stderr,))
    reading.start()
    last_resort = threading.Timer(deadline, process.kill)
    last_resort.start()
    lengths, said = itertools.cycle(pauses), []
    try:
        for line in process.stdout:
            if line.startswith("stopped in"):
                while state_of(pid) != "T":
                    time.sleep(0.01)
                time.sleep(next(lengths))
                os.kill(pid, signal.SIGCONT)
            else:
                said.append(line.strip())
        process.wait(deadline)
    finally:
        last_resort.cancel()
        process.kill()
        os.kill(servers[0].pid, signal.SIGCONT)
        reading.join(deadline)
    log = "".join(logged)
    assert process.returncode == 0, log[-4000:]
    assert said == [f"{phase} same=True paused=True" for phase in PHASES], log[-4000:]
    return log


@pytest.mark.parametrize("who", ["server", pytest.param("trainer", marks=pytest.mark.long)])
def test_paused_in_every_phase(tiny_server: Any, tiny_model: Path, who: str) -> None:
    log = paused_run(tiny_model, [tiny_server], who, [1.2], 0.5, 0.5, 120)
    # Nobody else had it: it is taken again, and the update done again.
    assert "the lease on its weights is taken again" in log
    assert "writes this server's weights" not in log


@pytest.mark.long
def test_one_of_two_paused_in_every_phase(
    tiny_server: Any, second_tiny_server: Any, tiny_model: Path
) -> None:
    log = paused_run(tiny_model, [tiny_server, second_tiny_server], "server", [1.5], 0.6, 0.6, 120)
    assert "is back with weight version" in log and "given up" not in log


@pytest.mark.long
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("who", ["server", "trainer"])
@pytest.mark.parametrize("count", [1, 2])
def test_paused_for_20_to_90_s(
    tiny_server: Any, second_tiny_server: Any, tiny_model: Path, who: str, count: int
) -> None:
    """With the lease and the silence of a real run."""
    servers = [tiny_server, second_tiny_server][:count]
    log = paused_run(tiny_model, servers, who, [35, 90, 65, 75, 20], 30, 60, 900)
    assert "given up" not in log
