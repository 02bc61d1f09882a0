"""What a reward worker process may do to its surroundings: memory, output, environment, children. Linux."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import re
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import psutil

MEMORY_EXIT = 77  # exit code of a worker that went over its memory limit
MARK = "SWIFT_R1_REWARD_POOL"
OUTPUT_A_CALL = 64 << 10  # bytes a call may print; the rest is dropped

# Variables that a reward has no business with, unless --reward_env names them.
_SECRET = re.compile(r"TOKEN(?!IZER)|SECRET|PASSWORD|PASSWD|CREDENTIAL|(API|ACCESS|PRIVATE)_?KEY|_PROXY", re.IGNORECASE)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def confine(mark: str, kept: Sequence[str]) -> None:
    """Strips secrets and proxies from `os.environ`, makes this process end with its parent and lead its own group.

    Args:
        mark: put into the environment that children inherit, with this process's id.
        kept: names of variables that stay whatever they are called.
    """
    for name in [name for name in os.environ if _SECRET.search(name) and name not in kept]:
        del os.environ[name]
    os.environ[MARK] = f"{mark}:{os.getpid()}"
    os.setpgid(0, 0)
    # Processes that a reward's own children leave behind become children of this one, and are found.
    for option, value in ((_PR_SET_PDEATHSIG, signal.SIGKILL), (_PR_SET_CHILD_SUBREAPER, 1)):
        if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option})")
    sys.stdout, sys.stderr = (_text(number) for number in (1, 2))


def limit_memory(gib: float) -> None:
    """Lets this process take `gib` GiB more than it has: an allocation over it is a MemoryError.

    The limit is on private writable memory, whether touched or not (RLIMIT_DATA), so the resident memory is below it.
    Children inherit it, each for itself.
    """
    now = psutil.Process().memory_info().data
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = now + int(gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Around one call: what it prints is bounded, and the processes that it started end with it."""
    for stream in _capped.values():
        stream.left = OUTPUT_A_CALL
    before = _children()
    try:
        yield
    finally:
        for pid in _children() - before:
            end_tree(pid)


def end_tree(pid: int) -> None:
    """Kills a process and its descendants, and reaps it where it is a child of this one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait(5)


def end_strays(mark: str, living: frozenset[int]) -> list[int]:
    """Kills what workers of the pool `mark` started and left; those of `living` workers are left alone.

    Returns:
        The ids of what was killed.
    """
    found = []
    for process in psutil.process_iter():
        try:
            owner = process.environ().get(MARK, "")
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        pool, _, worker = owner.rpartition(":")
        if pool == mark and int(worker) not in living and process.pid not in living:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                found.append(process.pid)
    return found


def end_group(worker: int) -> None:
    """Kills what is left of a dead worker's process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)


def _children() -> frozenset[int]:
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found |= {int(pid) for pid in Path(f"/proc/self/task/{thread}/children").read_text().split()}
    return frozenset(found)


class _Capped(io.RawIOBase):
    """A file descriptor that takes only so many bytes a call, and swallows the rest."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number, self.left = number, OUTPUT_A_CALL

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def write(self, data: bytes) -> int:  # type: ignore[override]
        size = len(data)
        if self.left > 0:
            os.write(self._number, bytes(data[: self.left]))
            if size >= self.left:
                os.write(self._number, b"\n[more output of this reward call is dropped]\n")
            self.left -= size
        return size


_capped: dict[int, _Capped] = {}


def _text(number: int) -> io.TextIOWrapper:
    raw = _capped[number] = _Capped(number)
    return io.TextIOWrapper(
        io.BufferedWriter(cast(io.RawIOBase, raw)), encoding="utf-8", errors="replace", line_buffering=True
    )
