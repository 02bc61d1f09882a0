"""Clusters of real parts on this machine: hosts in network namespaces, Slurm on them, and Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import until
from tests.fleet.cluster.running import Launch, processes_in
from tests.fleet.cluster.slurm import Slurm
from tests.hosts import Host, made_hosts

NODES = 3
STEPS = 40  # at 0.4 s
ROLES = {"train": {}, "rollout": {"replicas": 2}}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def hosts() -> Iterator[list[Host]]:
    """One to give orders from, and nodes."""
    with made_hosts(1 + NODES) as made:
        yield made


@pytest.fixture(scope="session")
def slurm(hosts: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    cluster = Slurm(tmp_path_factory.mktemp("slurm"), hosts)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        print(cluster.said())


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """`launched(engine, enter, **environ) -> Launch`; nothing of it is left on any node at the end."""
    made: list[Launch] = []

    def make(engine: str, enter: Any = (), **environ: str) -> Launch:
        made.append(Launch(tmp_path / f"{engine}-{len(made)}", engine, enter, **environ))
        return made[-1]

    yield make
    for one in made:
        one.stop()
        until(lambda one=one: not processes_in(one.folder), 60)


@pytest.fixture(scope="session")
def undisturbed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """What a run of `STEPS` steps of `ROLES` learns where nothing happens to it."""
    launch = Launch(tmp_path_factory.mktemp("undisturbed"), "local")
    launch.write(ROLES, tiny_model, rlhf={"max_steps": STEPS})
    try:
        assert launch.start().wait() == 0, launch.said
    finally:
        launch.stop()
    return launch.learned
