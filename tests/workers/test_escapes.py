"""Programs that try to get out of the sandbox, or to keep it from ending: each is run, and what it wanted stays whole.

An attempt (`escapes/*.txt`) prints ESCAPED when it has got something. Those marked `bare` are harmless, and do succeed
without the sandbox; those marked `late` must be ended by time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from swift_r1.workers.sandbox.box import Run, Sandbox

FOLDER = Path(__file__).parent / "escapes"
PRELUDE = (FOLDER / "prelude.txt").read_text()
SECRET = "canary-4f1c"
MEMORY = 256 << 20
# Linux counts no processes of the machine's own root; such a sandbox is made only where root has no other user.
UNCOUNTED = ("many_threads", "threads_with_small_stacks")


@dataclass(frozen=True)
class Attempt:
    name: str
    marks: frozenset[str]
    program: str


def attempts() -> list[Attempt]:
    found = []
    for file in sorted(FOLDER.glob("*.txt")):
        for part in re.split(r"^### ", file.read_text(), flags=re.MULTILINE)[1:]:
            head, _, program = part.partition("\n")
            name, *marks = head.split()
            found.append(Attempt(name, frozenset(marks), PRELUDE + program))
    return found


ATTEMPTS = attempts()


@dataclass(frozen=True)
class Targets:
    """What there is to get at: a file, a process, two servers, a variable."""

    told: str
    file: Path
    bystander: subprocess.Popen[bytes]
    servers: tuple[socket.socket, socket.socket]

    def check(self) -> None:
        assert self.file.read_text() == SECRET and sorted(self.file.parent.iterdir()) == [self.file]
        assert psutil.Process(self.bystander.pid).status() == psutil.STATUS_SLEEPING
        for server in self.servers:
            with pytest.raises(BlockingIOError):
                server.accept()


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Targets]:
    file = tmp_path_factory.mktemp("home") / "key"
    file.write_text(SECRET)
    # A signal of any kind ends it.
    bystander = subprocess.Popen(
        [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"], stdout=-1
    )
    assert bystander.stdout is not None and bystander.stdout.readline()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        abstract.bind(f"\0escapes-{os.getpid()}")
        abstract.listen()
        for one in (server, abstract):
            one.setblocking(False)
        told = {
            "file": str(file),
            "repository": str(Path(__file__).parents[2]),
            "variable": "SWIFT_R1_ESCAPES_TOKEN",
            "trainer": os.getpid(),
            "bystander": bystander.pid,
            "port": server.getsockname()[1],
            "abstract": f"escapes-{os.getpid()}",
        }
        yield Targets(json.dumps(told) + "\n", file, bystander, (server, abstract))
    bystander.kill()
    bystander.wait()


@pytest.fixture(scope="module", params=["nobody", pytest.param("self", marks=pytest.mark.long)])
def sandbox(request: pytest.FixtureRequest, allows_sandbox: None) -> Iterator[tuple[Sandbox, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWIFT_R1_ESCAPES_TOKEN", SECRET)
        sandbox = Sandbox(nobody=request.param == "nobody")
        yield sandbox, request.param
        sandbox.close()


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=[one.name for one in ATTEMPTS])
def test_nothing_escapes(attempt: Attempt, sandbox: tuple[Sandbox, str], targets: Targets) -> None:
    box, user = sandbox
    if user == "self" and os.geteuid() == 0 and attempt.name in UNCOUNTED:
        pytest.skip("processes of root are not counted")
    seconds = 0.5 if "late" in attempt.marks else 60.0
    started = time.monotonic()
    ended = box.run(
        Run(attempt.program, targets.told, seconds=seconds, cpu_seconds=4, memory=MEMORY)
    )
    took = time.monotonic() - started
    assert b"ESCAPED" not in ended.output and SECRET.encode() not in ended.output, ended.output[
        :500
    ]
    assert took < seconds + 10
    assert ("late" in attempt.marks) == (ended.status is None), ended
    targets.check()
    # The next one finds nothing of it, and gets its own.
    clean = "import os, threading; print(os.listdir('/tmp'), threading.active_count(), os.getpid(), input())"
    assert box.run(Run(clean, "mine")).output == b"[] 1 1 mine\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="some of them need root outside")
@pytest.mark.parametrize(
    "attempt", [one for one in ATTEMPTS if "bare" in one.marks], ids=lambda one: one.name
)
def test_without_the_sandbox_it_succeeds(
    attempt: Attempt, targets: Targets, tmp_path: Path
) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    ran = subprocess.run(
        [sys.executable, "-c", attempt.program],
        input=targets.told.encode(),
        capture_output=True,
        env={**os.environ, "SWIFT_R1_ESCAPES_TOKEN": SECRET},
        pass_fds=[folder],
        cwd=tmp_path,
        timeout=60,
    )
    os.close(folder)
    targets.file.write_text(SECRET)
    for server in targets.servers:
        with contextlib.suppress(BlockingIOError):
            server.accept()[0].close()
    assert b"ESCAPED" in ran.stdout, ran.stderr.decode()[-500:]
