"""What a command says while it waits."""

from __future__ import annotations

import errno
import os
import pty
import sys

from swift_r1.runtime.processes import say, waiting


def shown_on(terminal: int) -> str:
    """Returns what a terminal has shown whose other side is closed: it may come in several pieces."""
    pieces = []
    with os.fdopen(terminal, "rb", buffering=0) as screen:
        while True:
            try:
                pieces.append(screen.read(4096))
            except OSError as error:
                if error.errno != errno.EIO:  # how Linux says that the other side is closed
                    raise
                return b"".join(pieces).decode()


def test_on_a_terminal_a_wait_is_one_line_that_goes_away(monkeypatch):
    master, slave = pty.openpty()
    with open(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("COLUMNS", "24")
        with waiting() as report:
            report("240 s left of a long time")
            report("235 s\x1b[2J left")
        say("there")
    clear = "\r\x1b[K"
    assert (
        shown_on(master) == f"{clear}swift rlhf: 240 s left {clear}swift rlhf: 235 s␛[2J l{clear}"
        "swift rlhf: there\r\n"
    )
