"""The supervisor of colocated engines: it brings them back, and nothing of them outlives the run. Its engines here are
small HTTP servers that leave a process of a session of its own behind, as vLLM's do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import free_port, until

REPO = Path(__file__).resolve().parents[2]
WAIT_S = 60

ENGINE = """
import http.server, os, signal, subprocess, sys
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)

class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        key = os.environ["SWIFT_API_KEY"]
        self.send_response(200 if self.headers["Authorization"] == f"Bearer {key}" else 401)
        self.end_headers()
        open(sys.argv[2] + ".asked", "w").close()
    def log_message(self, *args): pass

server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ready)
with open(sys.argv[2], "a") as pids:
    print(os.getpid(), child.pid, file=pids, flush=True)
server.serve_forever()
"""
# The run: starts the supervisor as `swift rlhf` does, and becomes another program, as it does.
RUN = """
import json, os, subprocess, sys
order = json.loads(sys.argv[1]) | {"run": os.getpid()}
supervisor = subprocess.Popen(
    [sys.executable, "-m", "swift_r1.launch.supervisor"], stdin=subprocess.PIPE, start_new_session=True
)
supervisor.stdin.write(json.dumps(order).encode())
supervisor.stdin.close()
print(supervisor.pid, flush=True)
os.execvp("sleep", ["sleep", "1000"])
"""


def gone(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


class Kept:
    """A run with one engine, under the supervisor."""

    def __init__(self, folder: Path, port: int, script: str = ENGINE) -> None:
        self.pids, self.log = folder / "pids", folder / "engine.log"
        engine = {
            "words": [sys.executable, "-c", script, str(port), str(self.pids)],
            "environ": {"SWIFT_API_KEY": "k", "PATH": os.environ["PATH"]},
            "log": str(self.log),
            "url": f"http://127.0.0.1:{port}",
        }
        self.said = folder / "said"
        with self.said.open("w") as err:
            self.run = subprocess.Popen(
                [sys.executable, "-c", RUN, json.dumps({"engines": [engine]})],
                cwd=REPO,
                env=os.environ | {"PYTHONPATH": str(REPO)},
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
            )
        assert self.run.stdout is not None
        self.supervisor = int(self.run.stdout.readline())

    def started(self, times: int) -> list[list[int]]:
        """Process ids of each engine that was started, and of what it left behind."""

        def look() -> list[list[int]]:
            lines = self.pids.read_text().splitlines() if self.pids.exists() else []
            return (
                [[int(pid) for pid in line.split()] for line in lines]
                if len(lines) >= times
                else []
            )

        return until(look)

    def close(self) -> None:
        self.run.kill()
        self.run.wait(WAIT_S)
        until(lambda: gone(self.supervisor))


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Callable[..., Kept]]:
    made: list[Kept] = []

    def start(**more: Any) -> Kept:

        made.append(Kept(tmp_path, free_port(), **more))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_run(keep: Callable[..., Kept], how: signal.Signals) -> None:
    kept = keep()
    [pids] = kept.started(1)
    kept.run.send_signal(how)
    kept.run.wait(WAIT_S)
    until(lambda: all(map(gone, [*pids, kept.supervisor])))


def test_an_engine_that_is_killed_comes_back_at_its_address(keep: Callable[..., Kept]) -> None:
    kept = keep()
    [first] = kept.started(1)
    # Only one that has served is brought back: what never came up never will.
    until((kept.pids.parent / "pids.asked").exists)
    os.kill(first[0], signal.SIGKILL)
    second = kept.started(2)[1]
    assert second[0] != first[0]
    until(lambda: gone(first[1]))  # what the dead one has left behind
    assert not gone(second[1])
    assert "ended with -9" in kept.said.read_text()


def test_an_engine_that_does_not_come_up_is_given_up_with_its_last_line(
    keep: Callable[..., Kept],
) -> None:
    kept = keep(script="import sys; print('no such model'); sys.exit(2)")
    until(lambda: gone(kept.supervisor))
    assert "the engine beside the trainer ended with 2: no such model" in kept.said.read_text()
