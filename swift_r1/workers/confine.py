"""Limits of a process that runs users' code: its memory, its threads and what it sees of the environment. Linux."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Sequence

import psutil

from swift_r1.runtime.processes import adopt_orphans
from swift_r1.wire.urls import has_password
from swift_r1.workers.killing import MARK

MEMORY_EXIT = 77  # exit code of a worker that went over its memory limit
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)

# Variables that are hidden from rewards, unless --reward_env names them.
_SECRET = re.compile(
    "TOKEN(?!IZER)|SECRET|PASSW(OR)?D|PASSPHRASE|CREDENTIAL|(API|ACCESS|PRIVATE)_?KEY|(^|_)KEY$|_PROXY",
    re.IGNORECASE,
)
_set_aside: dict[str, str] = {}  # what the built-in rewards show to servers


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
    """Returns a variable with a key of a built-in reward, which plugins beside it do not see."""
    return os.environ.get(name) or _set_aside.get(name)


def limit_memory(gib: float) -> None:
    """Lets this process take `gib` GiB more than it has: an allocation over it is a MemoryError.

    The limit is on private writable memory, whether touched or not (RLIMIT_DATA), so the resident memory is below it.
    Children inherit it, each for itself.
    """
    now = psutil.Process().memory_info().data
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = now + int(gib * 2**30)
    resource.setrlimit(
        resource.RLIMIT_DATA,
        (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard),
    )
