"""The outside of the sandbox: starting it, handing it programs, and ending it. Linux on x86-64."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swift_r1.workers.process import SupervisedProcess
from swift_r1.workers.sandbox import within
from swift_r1.workers.sandbox.calls import MACHINE

_START_SECONDS = 60.0
_GRACE_SECONDS = 10.0  # for the sandbox to answer, after a program's own time
# shows that programs start, and can read Python's library
_TRIAL = "import this; open('/dev/null')"
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "LANG": "C.UTF-8",
    "HOME": "/tmp",
    "TZ": "UTC",
}
# The packages above have nothing to do in there, and none of what they import is in Python's library.
_BOOT = """
import socket, sys, types
for name, folder in (("swift_r1", sys.argv[2]), ("swift_r1.workers", sys.argv[3])):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from swift_r1.workers.sandbox.within import main
main(socket.socket(fileno=int(sys.argv[1])))
"""


class SandboxError(RuntimeError):
    """There is no sandbox, or it broke: nothing is known about the program."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a Python program.

    Attributes:
        stdin: what it reads.
        fn_name: its function, or a method of its class `Solution`, to call with `args`; None: it is a script.
        args: JSON values.
        seconds: of wall time.
        cpu_seconds: of processor time, rounded up to whole ones.
        memory: bytes that it may have beyond what Python itself has.
    """

    code: str
    stdin: str = ""
    fn_name: str | None = None
    args: Sequence[Any] = ()
    seconds: float = 10.0
    cpu_seconds: float = 5.0
    memory: int = 1 << 30


@dataclass(frozen=True, slots=True)
class RunExit:
    """How a run ended.

    Attributes:
        status: its exit code, negative for a signal (-9 also where its processor time was over); None: out of time.
        output: what it printed, or its function's value as JSON; at most `within.OUTPUT_BYTES`.
    """

    status: int | None
    output: bytes


class Sandbox:
    """Namespaces that are entered once, and in them a fresh process, /tmp and process namespace for each run. Runs come
    one after another; it ends with the process that made it.

    Args:
        nobody: where this process is root's, programs belong to nobody; else they belong to this user, without rights.

    Raises SandboxError: this machine does not allow it, and why.
    """

    def __init__(self, nobody: bool = True) -> None:
        if sys.platform != "linux" or platform.machine() != MACHINE:
            raise SandboxError(
                f"the sandbox for programs is for Linux on {MACHINE}, not {platform.machine()}"
            )
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_START_SECONDS)
        workers = Path(__file__).parent.parent
        command = [
            sys.executable,
            "-s",
            "-S",
            "-B",
            "-c",
            _BOOT,
            theirs.fileno(),
            workers.parent,
            workers,
        ]
        self._process = SupervisedProcess(
            [str(part) for part in command],
            _ENVIRONMENT,
            start_new_session=False,  # it ends with the worker's group
            cwd="/",
            pass_fds=[theirs.fileno()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        self._end = weakref.finalize(self, _end, self._process, self._control)
        try:
            said = self._control.recv(1)
            if said == within.UNSHARED:
                self._control.sendall(_map_users(self._process.pid, nobody and os.geteuid() == 0))
                said = self._control.recv(1)
            why = (
                ""
                if said == within.READY
                else self._control.recv(1 << 10).decode(errors="replace") or "it ended"
            )
            if not why and self.run(Run(_TRIAL, seconds=_START_SECONDS)).status != 0:
                why = "a program cannot read Python's library or devices in it"
        except (OSError, SandboxError) as error:
            why = str(error)
        if why:
            self.close()
            raise SandboxError(
                f"no sandbox for programs can be made here ({why}); docs/sandbox.md says what it needs"
            )

    def run(self, run: Run) -> RunExit:
        """Raises SandboxError: the sandbox broke, also in the middle of its answer; it is closed then."""
        mine, theirs = socket.socketpair()
        with mine:
            mine.settimeout(run.seconds + _GRACE_SECONDS)
            told: dict[str, Any] = {"error": "it ended"}
            output = b""
            try:
                with theirs:
                    socket.send_fds(self._control, [b"."], [theirs.fileno()])
                mine.sendall(json.dumps(asdict(run)).encode())
                mine.shutdown(socket.SHUT_WR)
                with mine.makefile("rb") as reader:
                    line = reader.readline()
                    if line.endswith(b"\n"):
                        told = json.loads(line)
                        output = reader.read(within.OUTPUT_BYTES)
            except OSError as error:
                told = {"error": str(error)}
        if len(output) != told.get("size"):
            self.close()
            raise SandboxError(
                f"the sandbox for programs broke: {told.get('error', 'it ended in its answer')}"
            )
        return RunExit(told["status"], output)

    @property
    def closed(self) -> bool:
        return not self._end.alive or self._process.poll() is not None

    def close(self) -> None:
        self._end()


def _map_users(process: int, nobody: bool) -> bytes:
    """Makes this user root within the namespace that a child of ours made, and nobody nobody where that is allowed."""
    folder = Path(f"/proc/{process}")
    if nobody:
        try:
            for file in ("uid_map", "gid_map"):
                (folder / file).write_text(f"0 0 1\n{within.NOBODY} {within.NOBODY} 1\n")
            return within.NOBODY_MAPPED
        except PermissionError:  # root in a container that has no other users
            pass
    (folder / "setgroups").write_text("deny")
    (folder / "uid_map").write_text(f"0 {os.geteuid()} 1\n")
    (folder / "gid_map").write_text(f"0 {os.getegid()} 1\n")
    return within.ONLY_SELF_MAPPED


def _end(process: SupervisedProcess, control: socket.socket) -> None:
    control.close()
    process.finish(0)
