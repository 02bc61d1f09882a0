"""The display of a launch: its lines on standard error, what the trainer says on standard output."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from swift_r1.runtime.visible import visible


@contextmanager
def _closed_allowed(stream: TextIO) -> Iterator[None]:
    """Silences the stream from then on if nobody can read it any more: a terminal that is closed, or a pipe that nobody
    reads, ends what is shown, not the run."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EPIPE):
            raise
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)


def say_line(text: str) -> None:
    """Prints a line about the launch."""
    with _closed_allowed(sys.stderr):
        print(f"swift launch: {visible(text)}", file=sys.stderr, flush=True)


def show_output(text: str) -> None:
    """Shows what the trainer says, whole lines of it."""
    with _closed_allowed(sys.stdout):
        print(text, end="", flush=True)
