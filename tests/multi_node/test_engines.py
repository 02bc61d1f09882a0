"""The nodes of `--vllm_mode colocate` before their ranks start: one key, all addresses, and one end. Real processes on
two hosts; no model."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import until

# What `swift rlhf` does on a node, with its error handling, from the checks to the launcher. A file keeps it waiting.
MEET = """
import json, os, sys, time
from pathlib import Path
from swift_r1.flags import World
from swift_r1.cli import main, rlhf
from swift_r1.errors import RunFailed
from swift_r1.launch.nodes import launching

def run(words):
    world, _ = World.from_environment(os.environ)
    mine = Path(f"node{world.node_rank}")

    def check():
        mine.with_suffix(".waits").touch()
        if mine.with_suffix(".fails").exists():
            raise RunFailed("the engine ended with 2")

    with launching(world) as nodes:
        if world.node_rank:
            [key] = nodes.ask(["key"])
            nodes.tell(f"engines/{world.node_rank}", json.dumps(["http://there"]))
            [told] = nodes.ask(["engines"], check)
            urls = json.loads(told)
        else:
            key, urls = "secret", ["http://here"]
            nodes.tell("key", key)
            for others in nodes.ask([f"engines/{node}" for node in range(1, world.nnodes)], check):
                urls += json.loads(others)
            while not Path("go").exists():
                check()
                nodes.look()
                time.sleep(0.05)
            nodes.tell("engines", json.dumps(urls))
    mine.with_suffix(".met").write_text(json.dumps([key, urls]))
    # The launcher that replaces this process meets the others at the same port.
    os.execv(sys.executable, [sys.executable, "-c", AGAIN])

AGAIN = '''
import os
from swift_r1.flags import World
from swift_r1.launch.nodes import launching
world, _ = World.from_environment(os.environ)
with launching(world) as nodes:
    nodes.tell(f"again/{world.node_rank}", "1")
    nodes.ask(["again/0", "again/1"])
'''
rlhf.run = run
sys.exit(main.main(["rlhf"]))
"""
WITHIN = 60.0


@pytest.fixture
def meet(hosts: Any, tmp_path: Path) -> Iterator[Callable[[], list[Any]]]:
    """Starts both nodes; each one's output is in `node<k>.log`."""
    started: list[Any] = []

    def start() -> list[Any]:
        for number in range(2):
            environ = {
                "NNODES": "2",
                "NODE_RANK": str(number),
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": "29514",
            }
            words = [sys.executable, "-c", MEET]
            started.append(
                hosts[number].start(words, tmp_path, tmp_path / f"node{number}.log", **environ)
            )
        return started

    yield start
    for number, process in enumerate(started):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)
        print((tmp_path / f"node{number}.log").read_text())


def ended(processes: list[Any], within_s: float = WITHIN) -> list[int]:
    deadline = time.monotonic() + within_s
    return [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]


@pytest.mark.long
def test_nodes_agree_and_meet_again_at_the_same_port(meet: Any, tmp_path: Path) -> None:
    processes = meet()
    (tmp_path / "go").touch()
    assert ended(processes) == [0, 0]
    met = [(tmp_path / f"node{number}.met").read_text() for number in range(2)]
    assert met == ['["secret", ["http://here", "http://there"]]'] * 2


@pytest.mark.long
@pytest.mark.parametrize("node", [0, 1])
def test_an_engine_that_does_not_start_ends_all_nodes(meet: Any, tmp_path: Path, node: int) -> None:
    processes = meet()
    until(lambda: all((tmp_path / f"node{number}.waits").exists() for number in range(2)))
    (tmp_path / f"node{node}.fails").touch()
    assert ended(processes, 20) == [5, 5]
    for number in range(2):
        assert (
            "the engine ended with 2"
            in (tmp_path / f"node{number}.log").read_text().splitlines()[-1]
        )


@pytest.mark.long
def test_ctrl_c_on_one_node_ends_all(meet: Any, tmp_path: Path) -> None:
    processes = meet()
    until(lambda: all((tmp_path / f"node{number}.waits").exists() for number in range(2)))
    processes[1].send_signal(signal.SIGINT)
    assert ended(processes, 20) == [130, 130]
    assert "node 1: interrupted" in (tmp_path / "node0.log").read_text()
