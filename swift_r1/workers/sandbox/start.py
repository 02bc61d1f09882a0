"""The outside of a sandbox: starting the Python process that goes into namespaces. Linux on x86-64."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import weakref
from pathlib import Path

from swift_r1.workers.process import SupervisedProcess
from swift_r1.workers.sandbox import entry
from swift_r1.workers.sandbox.calls import MACHINE

START_SECONDS = 60.0
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "LANG": "C.UTF-8",
    "HOME": "/tmp",
    "TZ": "UTC",
}
# The package above has nothing to do in there, and none of what the module imports is outside Python's library.
_BOOT = """
import importlib, socket, sys, types
sys.modules["swift_r1"] = types.ModuleType("swift_r1")
sys.modules["swift_r1"].__path__ = [sys.argv[2]]
importlib.import_module(sys.argv[3]).main(socket.socket(fileno=int(sys.argv[1])))
"""


class SandboxError(RuntimeError):
    """There is no sandbox, or it broke: nothing is known about the program."""


class InnerPython:
    """A Python process with nothing of this one's but a socket, which goes into namespaces and ends with this one.

    Args:
        module: whose `main(socket)` it runs, which begins with `entry.enter`.

    Raises SandboxError: this machine is another one.
    """

    def __init__(self, module: str) -> None:
        if sys.platform != "linux" or platform.machine() != MACHINE:
            raise SandboxError(
                f"the sandbox for programs is for Linux on {MACHINE}, not {platform.machine()}"
            )
        self.control, theirs = socket.socketpair()
        self.control.settimeout(START_SECONDS)
        package = Path(__file__).parents[2]
        command = [sys.executable, "-P", "-s", "-S", "-B", "-c", _BOOT]
        self._process = SupervisedProcess(
            [*command, str(theirs.fileno()), str(package), module],
            _ENVIRONMENT,
            start_new_session=False,  # it ends with the worker's group
            cwd="/",
            pass_fds=[theirs.fileno()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        self._end = weakref.finalize(self, _end, self._process, self.control)

    def admit(self, users: str | None) -> bool:
        """Gives the process its users, and waits until it is ready. Returns whether they are `users`.

        Args:
            users: the lines of its map of users, and of groups; None, or where they are not allowed: this user alone.

        Raises SandboxError: it cannot go into namespaces, and why. OSError: it did not answer.
        """
        said, given = self.control.recv(1), b""
        if said == entry.UNSHARED:
            given = _map_users(self.pid, users)
            self.control.sendall(given)
            said = self.control.recv(1)
        if said != entry.READY:
            why = self.control.recv(1 << 10).decode(errors="replace")
            raise SandboxError(why or "it ended")
        return given == entry.WANTED_USERS

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def closed(self) -> bool:
        return not self._end.alive or self._process.poll() is not None

    def close(self) -> None:
        self._end()


def refused(why: str) -> SandboxError:
    """Makes the error of a machine that allows no sandbox."""
    return SandboxError(
        f"no sandbox for programs can be made here ({why}); docs/sandbox.md says what it needs"
    )


def _map_users(process: int, users: str | None) -> bytes:
    """Makes this user root within the namespace that a child of ours made, or `users` what they are to be."""
    folder = Path(f"/proc/{process}")
    if users is not None:
        try:
            for file in ("uid_map", "gid_map"):
                (folder / file).write_text(users)
            return entry.WANTED_USERS
        except PermissionError:  # root in a container that has no other users
            pass
    (folder / "setgroups").write_text("deny")
    (folder / "uid_map").write_text(f"0 {os.geteuid()} 1\n")
    (folder / "gid_map").write_text(f"0 {os.getegid()} 1\n")
    return entry.ONLY_SELF


def _end(process: SupervisedProcess, control: socket.socket) -> None:
    control.close()
    process.finish(0)
