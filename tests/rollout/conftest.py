"""One shared server and client for the tests of the rollout package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swift_r1.rollout.client import RolloutClient


@pytest.fixture(scope="session")
def server_url(rollout_server: Callable[..., str], tiny_model: Path) -> str:
    return rollout_server(tiny_model, torch_dtype="float32")


@pytest.fixture
def client(server_url: str) -> Iterator[RolloutClient]:
    with RolloutClient(server_url, request_timeout_s=120) as client:
        client.wait_until_ready(60)
        yield client
