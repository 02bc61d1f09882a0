"""One process at a time writes to a run folder: an orphan of a killed run may still save when the run is resumed."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swift_r1.errors import UsageError

LOCK = ".lock"
WAIT_S = 120.0
_NOT_SUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def run_folder_held(run_dir: Path, wait_s: float = WAIT_S) -> Iterator[None]:
    """Holds the folder while open; the system lets go of it when the process dies, however it does.

    Raises:
        UsageError: another process has held it for `wait_s` seconds.
    """
    descriptor = os.open(run_dir / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        _wait_for(descriptor, run_dir, time.monotonic() + wait_s)
        yield
    finally:
        os.close(descriptor)


def _wait_for(descriptor: int, run_dir: Path, deadline: float) -> None:
    said = False
    while True:
        try:
            # Not `flock`, which the prompt workers that are forked later would hold too, and longer.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except (BlockingIOError, PermissionError):
            if time.monotonic() > deadline:
                raise UsageError(f"{run_dir}: another process still trains in it; stop that one first") from None
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            _say(f"{run_dir} cannot be locked ({error.strerror}): see to it that only one run writes to it")
            return
        if not said:
            _say(f"waiting for another process that still works in {run_dir}")
            said = True
        time.sleep(0.1)


def _say(text: str) -> None:
    print(f"swift rlhf: {text}", file=sys.stderr, flush=True)
