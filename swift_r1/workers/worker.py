"""What runs inside a worker process: its limits, and what is around each call of a user's code there."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from swift_r1.workers.confine import MEMORY_EXIT, ONE_THREAD, confine, limit_memory
from swift_r1.workers.killing import contained

# seconds over its limit at which a worker ends itself, its parent being gone
_SELF_DESTRUCT_AFTER = 10.0
_ends: int | None = None  # the pipe that tells the host of the end of each call


def become_worker(
    load: Callable[[], object],
    kept: Sequence[str],
    memory: float,
    own: Sequence[str],
    mark: str,
    ends: int,
) -> None:
    """Makes this process a worker, and loads users' code into it.

    Args:
        kept: variables that users' code sees although they look like secrets.
        memory: GiB that it may take beside what it has once it is loaded.
        own: variables with keys that only `own_key` gives.
        mark: the pool's; this process's children carry it in their environment, so that none can outlive the pool.
        ends: a pipe; a byte in it says that what is printed then is of another call.
    """
    global _ends
    _ends = ends
    # New ones: those of the host may be for a file, and would seek.
    for name, number in (("stdout", 1), ("stderr", 2)):
        text = open(number, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        setattr(sys, name, text)
    os.environ.update(ONE_THREAD)
    confine(mark, kept, own)
    # Ctrl-C and the launcher's SIGTERM reach the whole process group; the trainer decides when its workers end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    load()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    limit_memory(memory)


@contextmanager
def guarded(limit: float) -> Iterator[None]:
    """Guards one call of a user's code in a worker process, which ends itself long after `limit` seconds, or where the
    memory is used up; what the call started and printed ends with it, and the working folder is what it was."""
    try:
        here = os.open(".", os.O_PATH)
        with open(os.devnull, "w") as nowhere, contained():
            # A C thread that needs no GIL: it ends even a process that spins inside a C function.
            faulthandler.dump_traceback_later(limit + _SELF_DESTRUCT_AFTER, exit=True, file=nowhere)
            try:
                yield
            except MemoryError:
                # The memory left may be too little for anything: a new worker takes over.
                os._exit(MEMORY_EXIT)
            finally:
                faulthandler.cancel_dump_traceback_later()
        os.fchdir(here)
        os.close(here)
        if _ends is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os.write(_ends, b".")
    except (OSError, ValueError):  # ValueError: of a closed file
        # The call closed what is not its own, or left no room for files: a new worker has all of it.
        os._exit(1)
