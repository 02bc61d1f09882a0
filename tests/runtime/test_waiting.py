"""What a command says while it waits."""

from __future__ import annotations

import os
import pty
import sys

from swift_r1.runtime.processes import say, waiting


def test_on_a_terminal_a_wait_is_one_line_that_goes_away(monkeypatch):
    master, slave = pty.openpty()
    with open(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("COLUMNS", "24")
        with waiting() as report:
            report("240 s left of a long time")
            report("235 s\x1b[2J left")
        say("there")
        shown = os.read(master, 4096).decode()
    clear = "\r\x1b[K"
    assert (
        shown == f"{clear}swift rlhf: 240 s left {clear}swift rlhf: 235 s␛[2J l{clear}"
        "swift rlhf: there\r\n"
    )


def test_elsewhere_each_is_a_line(capsys):
    with waiting("launch") as report:
        report("one")
        report("two")
    assert capsys.readouterr().err.splitlines() == ["swift launch: one", "swift launch: two"]
