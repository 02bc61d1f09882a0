"""What a child of the supervisor becomes: a process of the sandbox, with its limits and without a right outside of it."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from swift_r1.workers.sandbox import kernel

CANNOT_RUN = 126  # a shell's exit code for it
_SHELLS = ("/bin/bash", "/bin/sh")
_OPEN_FILES = 1024
_STACK_BYTES = 8 << 20
_LOCKED_BYTES = 1 << 20
# CAP_CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID: what packages are installed with. They count for the
# sandbox's files and processes alone.
_KEPT = (0, 1, 3, 4, 5, 6, 7)
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_VARIABLES = {"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8", "USER": "root"}


@dataclass(frozen=True, slots=True)
class Ways:
    """What is the same for all commands of a sandbox.

    Attributes:
        mounts: descriptor of its namespace of mounts.
        users: and of users.
        calls: its filter of system calls.
    """

    mounts: int
    users: int
    calls: bytes
    cpu_seconds: int
    memory_bytes: int
    disk_bytes: int
    processes: int
    workdir: str
    env: Mapping[str, str]


def become(ways: Ways, output: int, action: Callable[[], None]) -> NoReturn:
    """Goes into the sandbox and does `action` there. What goes wrong in that is written to `output`."""
    code = CANNOT_RUN
    try:
        os.setsid()
        for number in (1, 2):
            os.dup2(output, number)
        kernel.join(ways.mounts, kernel.NEW_MOUNTS)
        kernel.join(ways.users, kernel.NEW_USERS)
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        _limit(ways)
        kernel.drop_privileges(None, _KEPT)
        kernel.filter_calls(ways.calls)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.makedirs(ways.workdir, exist_ok=True)
        os.chdir(ways.workdir)
        action()
        code = 0
    except (OSError, ValueError) as error:
        os.write(1, f"{error}\n".encode())
    finally:
        os._exit(code)


def run_shell(command: str, env: Mapping[str, str]) -> None:
    """Becomes a shell with a command. Raises OSError."""
    for shell in _SHELLS:
        if os.path.exists(shell):
            os.execve(shell, [shell, "-c", command], {**_VARIABLES, **env})
    raise OSError(errno.ENOENT, "there is no shell", _SHELLS[-1])


def write_file(path: str, content: bytes, mode: int) -> None:
    """Puts a file in the place of what is there. Raises OSError.

    Whoever writes has the rights of the sandbox's own commands: a link in the way leads nowhere that they cannot go.
    """
    folder, name = os.path.split(path)
    if folder:
        os.makedirs(folder, exist_ok=True)
    beside = os.path.join(folder, f".{name[:200]}.{os.getpid()}")
    number = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(number, "wb") as file:
            file.write(content)
            os.fchmod(number, mode)
        os.replace(beside, path)
    except OSError:
        os.unlink(beside)
        raise


def _limit(ways: Ways) -> None:
    limits = {
        resource.RLIMIT_CPU: ways.cpu_seconds,
        resource.RLIMIT_DATA: ways.memory_bytes,
        resource.RLIMIT_FSIZE: ways.disk_bytes,
        resource.RLIMIT_NPROC: ways.processes,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_STACK: _STACK_BYTES,
        resource.RLIMIT_MEMLOCK: _LOCKED_BYTES,
        resource.RLIMIT_SIGPENDING: ways.processes,
        **dict.fromkeys(
            (
                resource.RLIMIT_CORE,
                resource.RLIMIT_MSGQUEUE,
                resource.RLIMIT_NICE,
                resource.RLIMIT_RTPRIO,
            ),
            0,
        ),
    }
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:  # the trainer's own
            limit = min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
