"""One shared server and client for the tests of the rollout package."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from swift_r1.arguments.server import RolloutArguments
from swift_r1.inference.routes import create_app
from swift_r1.inference.service import Lifecycle
from swift_r1.sampling.pool.client import RolloutClient

WAIT_S = 60


@pytest.fixture(scope="session")
def server_url(rollout_server: Callable[..., str], tiny_model: Path) -> str:
    return rollout_server(tiny_model, torch_dtype="float32")


@pytest.fixture
def client(server_url: str) -> Iterator[RolloutClient]:
    with RolloutClient(server_url) as client:
        client.wait_until_ready(60)
        yield client


@pytest.fixture
def serve_engine() -> Iterator[Callable[..., str]]:
    """`serve_engine(engine, expected weights, **config) -> url`: the real HTTP server in a thread, over any engine."""
    stops: list[Callable[[], None]] = []

    def serve(engine: Any, expected: Any, **config: Any) -> str:
        lifecycle = Lifecycle(RolloutArguments(model="none", **config), lambda: (engine, expected))
        server = uvicorn.Server(uvicorn.Config(create_app(lifecycle, None), port=0, log_level="error"))
        listening = threading.Event()

        async def run() -> None:
            life = asyncio.create_task(lifecycle.run())
            http = asyncio.create_task(server.serve())
            while not server.started or lifecycle.service is None:
                await asyncio.sleep(0.01)
            listening.set()
            await http
            life.cancel()
            lifecycle.close()

        def stop() -> None:
            server.should_exit = True
            thread.join(WAIT_S)

        thread = threading.Thread(target=asyncio.run, args=(run(),))
        thread.start()
        stops.append(stop)
        assert listening.wait(WAIT_S)
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    yield serve
    for stop in stops:
        stop()
