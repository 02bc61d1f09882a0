"""Two launchers on two hosts: ranks meet, and all of them end with the first cause. Real processes, no model."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

WORKER = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from swift_r1.runtime.ranks import lost_peer
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
open("ready" + os.environ["RANK"], "w").write(str(os.getpid()))
try:
    for _ in range(int(sys.argv[1])):
        dist.all_reduce(torch.ones(1))
        time.sleep(0.05)
except RuntimeError as error:
    print(error, file=sys.stderr)
    sys.stderr.flush()
    os._exit(75 if lost_peer(error) else 1)
dist.destroy_process_group()
"""
LAUNCH = """
import os, sys
from swift_r1.flags import World
from swift_r1.launch.elastic import run_workers
from swift_r1.launch.environment import interface_to
from swift_r1.errors import SwiftError
world, faults = World.from_environment(os.environ)
assert not faults, faults
os.environ["GLOO_SOCKET_IFNAME"] = interface_to(world.master_addr)
try:
    sys.exit(run_workers(world, (sys.executable, "worker.py", sys.argv[1])))
except SwiftError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
WITHIN = 20.0


class Run:
    def __init__(self, hosts, folder: Path, rounds: int, nodes: int = 2) -> None:
        (folder / "worker.py").write_text(WORKER)
        self.folder = folder
        self.nodes = [
            hosts[number].start(
                [sys.executable, "-c", LAUNCH, str(rounds)],
                folder,
                folder / f"node{number}.log",
                NNODES="2",
                NODE_RANK=str(number),
                MASTER_ADDR=hosts[0].address,
                MASTER_PORT="29511",
                TORCH_CPP_LOG_LEVEL="ERROR",
            )
            for number in range(nodes)
        ]

    def pid(self, rank: int) -> int:
        """Of the rank, once it has met the others."""
        path = self.folder / f"ready{rank}"
        deadline = time.monotonic() + 120
        while not (path.exists() and path.read_text()):
            assert time.monotonic() < deadline and self.nodes[rank].poll() is None, self.said()
            time.sleep(0.05)
        return int(path.read_text())

    def codes(self, within: float = 120) -> list[int]:
        deadline = time.monotonic() + within
        return [node.wait(max(0.1, deadline - time.monotonic())) for node in self.nodes]

    def said(self) -> list[str]:
        return [path.read_text() for path in sorted(self.folder.glob("node*.log"))]

    def close(self) -> None:
        for node in self.nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait(20)


@pytest.fixture
def launched(hosts, tmp_path):
    runs = []

    def launch(rounds: int, nodes: int = 2) -> Run:
        runs.append(Run(hosts, tmp_path, rounds, nodes))
        return runs[-1]

    yield launch
    for run in runs:
        run.close()


@pytest.mark.long
@pytest.mark.parametrize("node", [0, 1])
def test_a_host_that_vanishes_ends_the_other(launched, hosts, node):
    """Its network goes silent: nobody is told that connections are over."""
    run = launched(100_000)
    run.pid(0), run.pid(1)
    hosts[node].unplug()
    try:
        other = 1 - node
        assert run.nodes[other].wait(WITHIN + 40) == 5, run.said()
        assert "it lost another rank" in run.said()[other].splitlines()[-1]
    finally:
        hosts[node].plug_in()


@pytest.mark.long
def test_a_stopped_rank_ends_all(launched):
    run = launched(100_000)
    pids = [run.pid(0), run.pid(1)]
    os.kill(pids[1], signal.SIGSTOP)
    assert run.codes(WITHIN + 15) == [5, 5], run.said()
    assert "rank 0 on node 0 was the first to end: it lost another rank" in run.said()[0]


def test_a_taken_port_is_said(hosts, launched, tmp_path):
    listen = "import socket, time; s = socket.create_server(('', 29511)); print('up', flush=True); time.sleep(100)"
    taker = hosts[0].start([sys.executable, "-c", listen], tmp_path, tmp_path / "taker.txt")
    try:
        while not (tmp_path / "taker.txt").read_text():
            assert taker.poll() is None
            time.sleep(0.05)
        run = launched(1, nodes=1)
        assert run.codes() == [4]
        assert "MASTER_PORT 29511 is taken" in run.said()[0]
    finally:
        taker.kill()
        taker.wait(20)
