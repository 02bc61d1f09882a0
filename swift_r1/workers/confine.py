"""Limits of a reward worker process: its memory, environment and children. Linux."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from swift_r1.runtime.processes import adopt_orphans
from swift_r1.wire.urls import has_password

MEMORY_EXIT = 77  # exit code of a worker that went over its memory limit
MARK = "SWIFT_R1_REWARD_POOL"

# Variables that are hidden from rewards, unless --reward_env names them.
_SECRET = re.compile(
    "TOKEN(?!IZER)|SECRET|PASSW(OR)?D|PASSPHRASE|CREDENTIAL|(API|ACCESS|PRIVATE)_?KEY|(^|_)KEY$|_PROXY", re.IGNORECASE
)
_set_aside: dict[str, str] = {}  # what the built-in rewards show to servers
_END_SECONDS = 10.0  # for what was killed to be gone


def confine(mark: str, kept: Sequence[str], own: Sequence[str] = ()) -> None:
    """Strips secrets and proxies (except `kept`) from `os.environ`, makes this process lead its own group and adopt
    what its descendants leave behind. Its children inherit the `mark`, with its process id. `own_key` still gives those
    that `own` names."""
    _set_aside.update({name: os.environ[name] for name in own if name in os.environ})
    for name, value in list(os.environ.items()):
        if name not in kept and (name in own or _SECRET.search(name) or has_password(value)):
            del os.environ[name]
    os.environ[MARK] = f"{mark}:{os.getpid()}"
    os.setpgid(0, 0)
    # Processes that a reward's own children leave behind become children of this one, and are found.
    adopt_orphans()


def own_key(name: str) -> str | None:
    """A variable with a key of a built-in reward, which plugins beside it do not see."""
    return os.environ.get(name) or _set_aside.get(name)


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
    """A context around one call: the processes that it started end with it, and their descendants too."""
    before = _children()
    try:
        yield
    finally:
        for pid in _children() - before:
            with contextlib.suppress(psutil.NoSuchProcess):
                child = psutil.Process(pid)
                _kill([*child.children(recursive=True), child])
                child.wait(5)


def end_whole(workers: Sequence[int]) -> None:
    """Kills workers and everything below them. They are stopped first, so that they still adopt what their descendants
    leave, and nothing can escape between two looks."""
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + _END_SECONDS
    while (below := _below(workers)) and time.monotonic() < deadline:
        _kill(below)
        time.sleep(0.01)
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        end_group(pid)


def end_strays(mark: str, living: frozenset[int]) -> list[int]:
    """Kills what workers of the pool `mark` started and left, except `living` ones and theirs; returns the ids."""
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


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _below(workers: Sequence[int]) -> list[psutil.Process]:
    """What runs below the workers, without zombies, which a stopped worker does not collect."""
    found: list[psutil.Process] = []
    for pid in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
    return found


def _children() -> frozenset[int]:
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found |= {int(pid) for pid in Path(f"/proc/self/task/{thread}/children").read_text().split()}
    return frozenset(found)
