"""How our processes end: with the one that started them, and for good. Linux."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <sys/prctl.h>
_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent(number: signal.Signals) -> None:
    """Makes the kernel send this process a signal when the thread that started it ends, however it does."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """What this process's descendants leave behind when they end becomes its child, and is found."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def stop_at_once() -> None:
    """From here on SIGINT and SIGTERM end this process with 130 and 143: nothing has begun that must end in order."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _frame: os._exit(128 + received))


def leave(code: int) -> NoReturn:
    """Ends this process with an exit code, without taking the interpreter apart.

    That is not safe beside threads of C++: one that gives back a tensor of Python's while the interpreter ends (gloo's,
    after a collective) is made to exit by it, which C++ answers with `std::terminate`. Others (vLLM's) keep it waiting.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
