"""Parts of the driver beside things that a whole launch seldom meets."""

from __future__ import annotations

import sys
from queue import SimpleQueue

import pytest

from swift_r1.fleet.backend import Node, ProcessPipe
from swift_r1.fleet.client import AgentClient


class Instead:
    """A backend with a program in the place of its agents."""

    def __init__(self, program):
        self.program = program

    def connect(self, node):
        return ProcessPipe([sys.executable, "-c", self.program])


@pytest.mark.parametrize("said", ["Welcome", "7", "{}"])
def test_a_shell_that_prints_at_login(said):
    events = SimpleQueue()
    client = AgentClient(Instead(f"print({said!r})"), Node("n"), events)
    _, event = events.get(timeout=20)
    assert event == {
        "event": "gone",
        "text": f"{said!r} came in the place of an agent's words: does its shell print at login?",
    }
    client.close(10)
