"""Parts of the driver beside things that a whole launch seldom meets."""

from __future__ import annotations

import sys
import time
from queue import SimpleQueue

import pytest

from swift_r1.fleet.backend import Node, ProcessPipe
from swift_r1.fleet.backends.local import LocalClusterBackend
from swift_r1.fleet.client import AgentClient
from swift_r1.fleet.flags import LaunchArguments
from swift_r1.fleet.fleet import Fleet
from swift_r1.fleet.placement import NodeSlot
from swift_r1.fleet.run_file import read_run_file
from swift_r1.fleet.servers import FleetServers
from swift_r1.fleet.tasks import LaunchContext
from swift_r1.fleet.training import Training


class Instead:
    """A backend with a program in the place of its agents."""

    def __init__(self, program):
        self.program = program

    def connect(self, node):
        return ProcessPipe([sys.executable, "-c", self.program])


def test_an_agent_that_does_not_read_keeps_nobody_waiting():
    events = SimpleQueue()
    client = AgentClient(
        Instead('import time; print(\'{"event": "hello"}\', flush=True); time.sleep(60)'),
        Node("n"),
        events,
    )
    events.get(timeout=20)
    began = time.monotonic()
    for _ in range(100):
        client.tell("write", text=10_000 * "x")
    assert time.monotonic() - began < 1
    client._pipe._process.kill()
    assert events.get(timeout=20)[1]["event"] == "gone"
    client.close(10)


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


@pytest.mark.parametrize(("restarts", "code"), [(3, None), (0, 5)])
def test_a_node_that_is_lost_before_training_begins(write_run, tmp_path, restarts, code):
    fleet = Fleet(LocalClusterBackend([], 60), SimpleQueue(), 60)
    said = []
    run = read_run_file(write_run({"train": {}}))
    args = LaunchArguments(max_restarts=restarts, node_timeout=60)
    launch = LaunchContext(
        run,
        fleet,
        args,
        {},
        lambda task: tmp_path / "log",
        list,
        lambda task, what: said.append(what),
    )
    training = Training(launch, str(tmp_path), False, FleetServers(launch, None))
    training.tasks[0].place = NodeSlot("lost", (), None)
    training.begin()
    assert training.code == code
    training.look(None)
    assert [line.partition(" (")[0] for line in said] == [
        "lost is gone: training waits for nodes"
    ] * (code is None)
