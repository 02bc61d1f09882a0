"""Nodes that are started by hand, as two processes of this machine: whether they belong together is found at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import forks
from tests.conftest import free_port, until
from tests.e2e.live_run import words_of
from tests.forks import ForkedProcess


def with_another_version(version: str) -> None:
    """Called in a node's process before it begins."""
    from swift_r1.launch import run_folder

    run_folder.package_versions = lambda: {"torch": version}


@pytest.fixture
def node(tiny_model: Path, tmp_path: Path) -> Iterator[Callable[..., ForkedProcess]]:
    """`node(number, version="1", **flags)` starts one, which says what it has to say in `node<number>`."""
    started: list[ForkedProcess] = []
    port = str(free_port())

    def start(number: int, version: str = "1", **flags: Any) -> ForkedProcess:
        environ = {
            "NNODES": "2",
            "NODE_RANK": str(number),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        with (tmp_path / f"node{number}").open("w") as log:
            started.append(
                forks.start(
                    ["-m", "swift_r1", "rlhf", *words_of(tiny_model, tmp_path / "run", **flags)],
                    environ=environ,
                    stdout=log,
                    stderr=forks.STDOUT,
                    prepare=["tests.fleet.test_nodes", "with_another_version", version],
                )
            )
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.wait(20)


@pytest.mark.parametrize(
    ("version", "flags", "faults"),
    [
        ("1", {"learning_rate": 0.5}, "--learning_rate is 0.5 on node 1, and 1e-05 on node 0"),
        ("1", {"deepspeed": "zero2"}, "--deepspeed is zero2 on node 1, and None on node 0"),
        ("2", {}, "torch is 2 on node 1, and 1 on node 0"),
    ],
)
def test_nodes_that_differ_end_with_2(
    node: Callable[..., ForkedProcess],
    tmp_path: Path,
    version: str,
    flags: dict[str, Any],
    faults: str,
) -> None:
    both = [node(0), node(1, version, **flags)]
    assert [one.wait(100) for one in both] == [2, 2]
    line = f"all nodes need the same: {faults}"
    assert (tmp_path / "node0").read_text().splitlines()[-1] == f"swift rlhf: node 1: {line}"
    assert (tmp_path / "node1").read_text().splitlines()[-1] == f"swift rlhf: {line}"


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        pytest.param(
            {"external_plugins": "no.py"},
            "--external_plugins no.py: there is no such file",
            marks=pytest.mark.long,
        ),
        ({"wrong": 1}, "unknown flag --wrong"),
    ],
)
def test_node_0_says_whom_it_waits_for_and_learns_that_it_has_ended(
    node: Callable[..., ForkedProcess], tmp_path: Path, flags: dict[str, Any], fault: str
) -> None:
    first = node(0)
    until(lambda: "waiting for node 1, of 2 (NODE_RANK)" in (tmp_path / "node0").read_text(), 60)
    assert node(1, **flags).wait(60) == 2
    assert first.wait(30) == 2
    assert (
        (tmp_path / "node0").read_text().splitlines()[-1].startswith(f"swift rlhf: node 1: {fault}")
    )
