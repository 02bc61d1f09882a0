"""Clusters of real parts on this machine: hosts in network namespaces, and Slurm on them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.slurm import Slurm
from tests.hosts import Host, made_hosts

NODES = 3


@pytest.fixture(scope="session")
def hosts() -> Iterator[list[Host]]:
    """One to give orders from, and nodes."""
    with made_hosts(1 + NODES) as made:
        yield made


@pytest.fixture
def slurm(hosts: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    cluster = Slurm(tmp_path_factory.mktemp("slurm"), hosts)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        print(cluster.said())
