"""Servers, clients and pushes for the tests of `rollout`, `serving` and `sync`, whose fixtures they are."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from transformers import AutoTokenizer

from swift_r1.errors import SwiftError
from swift_r1.flags.server import RolloutArguments
from swift_r1.models.loading import load_model
from swift_r1.models.weights import Weight
from swift_r1.rollout.pool.pool import ServerPool
from swift_r1.rollout.pool.session import Expected, ServerSession
from swift_r1.serving.engines.base import PromptTokenizer
from swift_r1.serving.routes import create_app
from swift_r1.serving.service import Lifecycle
from swift_r1.sync.buckets import Tensors, parts_of
from swift_r1.sync.writer import WeightWriter
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.optimizer import OptimizerConfig
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import UpdateStatus
from tests import tool_templates as templates

WAIT_S = 60


def to_bytes(bucket: Tensors) -> bytes:
    """The bucket as one safetensors file in memory."""
    return b"".join(parts_of(bucket))


def in_buckets(
    weights: Iterable[tuple[str, torch.Tensor]], max_bytes: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Groups a lazy stream of named tensors; a bucket exceeds `max_bytes` only if one tensor alone does."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def push_weights(
    client: RolloutClient,
    version: int,
    buckets: Iterable[Tensors],
    transport: str = "auto",
    owner: str | None = None,
) -> UpdateStatus:
    """One push under a lease of its own."""
    with WeightWriter(client, owner) as writer:
        return writer.push(version, buckets, transport)


def pool_of(
    clients: Sequence[RolloutClient],
    expected: Expected,
    timeout_s: float,
    transport: str = "auto",
    compare: bool | None = None,
    fanout: int | None = None,
    source: str | None = None,
    **writing: Any,
) -> ServerPool:
    """Sessions with all of these servers; `writing` are arguments of their `WeightWriter`s. To be closed."""
    sessions = []
    for client in clients:
        client.wait_until_ready(timeout_s, or_asleep=True)
        writer = WeightWriter(client, **writing)
        writer.hold(timeout_s)
        try:
            sessions.append(ServerSession(writer, expected, timeout_s, transport))
        except SwiftError:
            writer.close()
            raise
    return ServerPool(sessions, timeout_s, transport, compare, fanout, source=source)


@pytest.fixture(scope="session")
def server_url(rollout_server: Callable[..., str], tiny_model: Path) -> str:
    return rollout_server(tiny_model, torch_dtype="float32")


@pytest.fixture
def client(server_url: str) -> Iterator[RolloutClient]:
    with RolloutClient(server_url) as client:
        client.wait_until_ready(60)
        yield client


@pytest.fixture
def tool_tokenizer(tiny_model: Path) -> Any:
    # In this thread: while a server's thread imports it, which takes longest on a busy machine, its clients give up.
    import vllm.entrypoints.openai.chat_completion.protocol
    import vllm.tool_parsers  # noqa: F401

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = templates.HERMES
    return tokenizer


@pytest.fixture
def serve_engine() -> Iterator[Callable[..., str]]:
    """`serve_engine(engine, expected weights, **config) -> url`: the real HTTP server in a thread, over any engine."""
    stops: list[Callable[[], None]] = []

    def serve(engine: Any, expected: Any, **config: Any) -> str:
        if not hasattr(engine, "prompts"):
            engine.prompts = PromptTokenizer(None)  # of an engine that is asked for no text
        lifecycle = Lifecycle(RolloutArguments(model="none", **config), lambda: (engine, expected))
        app = create_app(lifecycle, config.get("api_key"))
        # As `swift rollout`: a trainer relies on it that the server keeps connections for longer than its clients.
        server = uvicorn.Server(
            uvicorn.Config(app, port=0, log_level="error", timeout_keep_alive=120)
        )
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


class OneWeightABucket(LocalBackend):
    """Sends each weight alone, and calls `at_bucket` with its number before."""

    at_bucket: Callable[[int], None] = staticmethod(lambda _number: None)

    def weight_buckets(
        self, weights: Sequence[Weight], to: int = 0, on_host: bool = True
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        for number, weight in enumerate(weights):
            self.at_bucket(number)
            yield [(weight.name, weight.value().clone())]


@pytest.fixture
def backend(tiny_model: Path) -> OneWeightABucket:
    """Far from the folder's weights, so that a server which was not brought up to date would show."""
    backend = OneWeightABucket(
        load_model(tiny_model, "float32", False), OptimizerConfig(1e-3, 0.0, 0.9, 0.99, 1e-8, 1.0)
    )
    learn(backend, 0.3)
    return backend


@torch.no_grad()
def learn(backend: LocalBackend, by: float) -> None:
    generator = torch.Generator().manual_seed(5)
    for weight in backend.model.parameters():
        weight.add_(by * torch.randn(weight.shape, generator=generator))
