"""How our processes start and end, and which of them may write to a run folder. Linux."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from typing import BinaryIO, NoReturn

from swift_r1.errors import UsageError
from swift_r1.runtime.visible import harmless

LOCK = ".lock"
LOCK_WAIT_S = 120.0
# <sys/prctl.h>
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CLEARED = "\r\x1b[K"  # the terminal's line
_FLOCK = "hhqqi4x"  # struct flock of <fcntl.h>: type, whence, start, length, pid
_held: list[tuple[int, int]] = []  # device and inode of the locks of this process
_LOCKS_NOT_SUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_libc = ctypes.CDLL(None, use_errno=True)


def module_words(module: str, *words: str) -> list[str]:
    """Returns what follows the interpreter's name in the command of a module of ours. It does not import from the folder
    that it runs in, where a model or data with files like `triton.py` may lie."""
    return ["-P", "-m", module, *words]


def end_with_parent(number: signal.Signals) -> None:
    """Makes the kernel send this process a signal when the thread that started it ends, however it ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Makes descendants whose parent ends children of this process, so that it can find them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


@contextmanager
def handlers_kept(*numbers: int) -> Iterator[None]:
    """Puts back in the end the handlers that these signals have now, whatever others take their place."""
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_at_once() -> None:
    """Makes SIGINT and SIGTERM end this process with 130 and 143: there is nothing to clean up yet."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _frame: os._exit(128 + received))


def leave(code: int) -> NoReturn:
    """Ends this process with an exit code, without tearing down the interpreter.

    Teardown is not safe with C++ threads: a gloo thread that releases a Python tensor is made to exit, and C++ then
    calls `std::terminate`. Others (vLLM's) keep the process waiting.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def run_folder_held(run_dir: Path, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """Holds the run folder's lock while open: an orphan of a killed run may still save when the run is resumed. The
    system releases the lock when the process dies, however it dies. Raises UsageError: another process has held it for
    `wait_s` seconds."""
    with open(run_dir / LOCK, "ab") as file:
        _lock(file, run_dir, time.monotonic() + wait_s)
        own = os.fstat(file.fileno())
        _held.append((own.st_dev, own.st_ino))
        try:
            yield
        finally:
            _held.remove((own.st_dev, own.st_ino))


def run_folder_is_held(run_dir: Path) -> bool:
    """Says whether a process of this machine, this one too, holds the run folder's lock; nothing is written. False
    where that cannot be found out."""
    try:
        own = (run_dir / LOCK).stat()
        if (own.st_dev, own.st_ino) in _held:
            return True  # to open and close the file would release this process's own lock
        with open(run_dir / LOCK, "rb") as file:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, *_ = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
            return bool(kind != fcntl.F_UNLCK)
    except OSError:
        return False


def _lock(file: BinaryIO, run_dir: Path, deadline: float) -> None:
    said = False
    while True:
        try:
            # Not `flock`, whose lock processes that are forked later would hold too, and longer.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except (BlockingIOError, PermissionError):
            if time.monotonic() > deadline:
                raise UsageError(
                    f"{run_dir}: another process still trains in it; stop that one first"
                ) from None
        except OSError as error:
            if error.errno not in _LOCKS_NOT_SUPPORTED:
                raise
            say(
                f"{run_dir} cannot be locked ({error.strerror}): make sure that only one run writes to it"
            )
            return
        if not said:
            say(f"waiting for another process that still works in {run_dir}")
            said = True
        time.sleep(0.1)


def say(text: str, command: str = "rlhf") -> None:
    """Prints a line of a command on standard error."""
    print(f"swift {command}: {harmless(text)}", file=sys.stderr, flush=True)


@contextmanager
def waiting(command: str = "rlhf") -> Iterator[Callable[[str], None]]:
    """Yields what says how a wait goes. On a terminal each line takes the place of the one before, and the last one
    goes away."""
    if not sys.stderr.isatty():
        yield partial(say, command=command)
        return

    def rewrite(text: str) -> None:
        line = f"swift {command}: {harmless(text)}"
        print(
            _CLEARED + line[: get_terminal_size().columns - 1], end="", file=sys.stderr, flush=True
        )

    try:
        yield rewrite
    finally:
        print(end=_CLEARED, file=sys.stderr, flush=True)
