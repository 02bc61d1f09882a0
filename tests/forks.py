"""Python processes that are forked from one that has imported everything (`tests/fork_server.py`).

`start` and `run` are as `subprocess.Popen([sys.executable, *words])` and `subprocess.run`, and take a tenth of the
time. A test of how a program starts (its imports, its launcher, its environment) starts it cold.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

REPO = Path(__file__).resolve().parent.parent
PIPE, STDOUT, DEVNULL = subprocess.PIPE, subprocess.STDOUT, subprocess.DEVNULL


class ForkedProcess:
    """As `subprocess.Popen`: `stdin`, `stdout` and `stderr` are text where they are pipes."""

    def __init__(
        self, pid: int, ended: int, words: Sequence[str], pipes: Mapping[str, IO[str]]
    ) -> None:
        self.pid, self.args = pid, words
        self.stdin, self.stdout, self.stderr = (
            pipes.get(name) for name in ("stdin", "stdout", "stderr")
        )
        self.returncode: int | None = None
        self._ended = os.fdopen(ended, "rb", buffering=0)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        code = self._look(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], timeout)[0]:
            with self._lock:
                if self.returncode is None:
                    said = self._ended.read(16)
                    assert said, "the fork server has ended"
                    self.returncode = int(said)
        return self.returncode


ADDRESS = "SWIFT_R1_FORK_SERVER"
"""Names the variable with the abstract address of the fork server of all processes that run the tests."""


class ForkServer:
    """The process, which the one that owns it starts when the first that runs tests connects."""

    def __init__(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("")
        self._listener.listen()
        os.environ[ADDRESS] = self._listener.getsockname()[1:].decode()
        self._hang_up, self._theirs = socket.socketpair()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._start_when_needed, daemon=True)
        self._thread.start()

    def _start_when_needed(self) -> None:
        """Returns when it is started, or no longer wanted."""
        ready, _, _ = select.select([self._listener, self._theirs], [], [])
        if self._theirs in ready:
            return
        descriptors = (self._theirs.fileno(), self._listener.fileno())
        own = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(REPO)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.fork_server", *map(str, descriptors)],
            cwd=REPO,
            env=os.environ | own,
            stdin=DEVNULL,
            pass_fds=descriptors,
            start_new_session=True,
        )
        self._listener.close()
        self._theirs.close()

    def close(self) -> None:
        self._hang_up.close()
        self._thread.join()
        if self._process is not None:
            self._process.kill()  # it holds nothing: what it started has ended
            self._process.wait(60)


_lock = threading.Lock()
_connection: list[socket.socket] = []


def _fork(request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
    """Returns the process id."""
    with _lock:
        if not _connection:
            _connection.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            _connection[0].connect(f"\0{os.environ[ADDRESS]}")
        socket.send_fds(_connection[0], [json.dumps(request).encode()], descriptors)
        answer = _connection[0].recv(64)
    assert answer, "the fork server has ended"
    return int(answer)


def start(
    words: Sequence[str],
    *,
    cwd: Path | str = REPO,
    environ: Mapping[str, str] | None = None,
    stdin: Any = DEVNULL,
    stdout: Any = None,
    stderr: Any = None,
    prepare: Sequence[Any] | None = None,
) -> ForkedProcess:
    """Runs `python words...` in a session of its own.

    Args:
        environ: beside this process's own.
        stdin: PIPE or DEVNULL.
        stdout: an open file, PIPE, DEVNULL, or None for this process's own; `stderr` may be STDOUT too.
        prepare: a module, a function of it and JSON arguments: what is called in the process before the program runs.
    """
    pipes: dict[str, IO[str]] = {}
    with contextlib.ExitStack() as cleanup:

        def descriptor_of(name: str, target: Any, own: int) -> int:
            if target == PIPE:
                read, write = os.pipe()
                own, theirs = (write, read) if name == "stdin" else (read, write)
                cleanup.callback(os.close, theirs)
                pipes[name] = os.fdopen(own, "w" if name == "stdin" else "r")
                return theirs
            if target == DEVNULL:
                return cleanup.enter_context(open(os.devnull, "r+b")).fileno()
            return own if target is None else target.fileno()

        into = descriptor_of("stdin", stdin, 0)
        out = descriptor_of("stdout", stdout, 1)
        err = out if stderr == STDOUT else descriptor_of("stderr", stderr, 2)
        ended, end = os.pipe()
        cleanup.callback(os.close, end)
        request = {
            "words": [str(word) for word in words],
            "cwd": str(cwd),
            "environ": dict(os.environ)
            | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
            | dict(environ or {}),
            "prepare": prepare,
        }
        pid = _fork(request, [into, out, err, end])
    return ForkedProcess(pid, ended, words, pipes)


def run(words: Sequence[str], *, timeout: float, **more: Any) -> subprocess.CompletedProcess[str]:
    """To its end, with what it said.

    Raises:
        subprocess.TimeoutExpired: it took longer, and was killed with its group.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = start(words, stdout=out, stderr=err, **more)
        try:
            code = process.wait(timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(list(words), code, out.read(), err.read())
