"""Weights that an engine on the trainer's GPU reads where they are: the whole way without a GPU, with memory of this
process in place of a device's; and on a GPU between two processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swift_r1.rollout.pool.session import Expected, ServerSession
from swift_r1.sync import transport
from swift_r1.sync import writer as writer_module
from swift_r1.sync.writer import WeightWriter
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import DeviceMemory, ServerRefused
from tests.live_servers import pool_of
from tests.sync.test_nccl import (
    BUCKETS,
    DEADLINE_S,
    SHAPES,
    Cable,
    Engine,
    FakeNccl,
    cable,
    engine,
    writer_with,
)

__all__ = ["cable", "engine"]  # fixtures
GPU = "01234567-89ab-cdef-0123-456789abcdef"


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> dict[str, torch.Tensor]:
    """What is lent, by its handle. The trainer takes it back at once after the engine's answer: there it is erased."""
    found: dict[str, torch.Tensor] = {}

    def shared(block: torch.Tensor) -> DeviceMemory:
        for old in found.values():
            old.fill_(255)
        handle = "A" * (4 + 4 * len(found))
        found[handle] = block
        return DeviceMemory(
            **{"gpu": GPU, "handle": handle, "size": block.nbytes, "offset": 0},
            **{"counter": "/torch_1_2_3", "counter_offset": 0, "event": "", "waits": False},
        )

    monkeypatch.setattr(writer_module, "shared", shared)
    monkeypatch.setattr(transport, "opened", lambda memory: found[memory.handle])
    monkeypatch.setattr("swift_r1.rollout.pool.session.own_gpu", lambda: GPU)
    engine.info = replace(engine.info, nccl_workers=0, gpu=GPU)
    engine.worker.vllm_config = None
    return found


@pytest.fixture
def client(engine: Engine, serve_engine: Callable[..., str]) -> Iterator[RolloutClient]:
    with RolloutClient(serve_engine(engine, SHAPES)) as client:
        yield client


def test_an_engine_on_the_same_gpu_reads_the_trainers_memory(
    client: RolloutClient,
    engine: Engine,
    lent: dict[str, torch.Tensor],
) -> None:
    """`auto` chooses it by itself; the engine keeps copies, since the memory is used again."""
    pool = pool_of([client], Expected("none", "hash", 100, None), DEADLINE_S, "auto")
    assert pool.from_device(adapter=False) and not pool.from_device(adapter=True)
    pool.publish(BUCKETS)
    assert pool.version == client.info().weight_version == 1 and len(lent) == len(BUCKETS)
    assert pool.sessions[0].writer.transport == "ipc" and not pool.snapshot.whole
    for name, tensor in BUCKETS[0] + BUCKETS[1]:
        assert torch.equal(getattr(engine.worker.model, name), tensor)
    pool.close()


def test_several_engines_get_a_snapshot(
    cable: Cable, engine: Engine, serve_engine: Callable[..., str], lent: dict[str, torch.Tensor]
) -> None:
    """Also the one on the GPU of rank 0."""
    loaded: list[int] = []

    async def load_weights(files: Sequence[Path], version: int) -> None:
        loaded.append(version)

    engines: list[Any] = [engine, Engine(cable)]
    for one in engines:
        one.load_weights = load_weights
    with ExitStack() as opened:
        clients = [
            opened.enter_context(RolloutClient(serve_engine(one, SHAPES))) for one in engines
        ]
        pool = opened.enter_context(
            closing(pool_of(clients, Expected("none", "hash", 100, None), DEADLINE_S))
        )
        assert [one.shares_gpu for one in pool.sessions] == [True, False] and not pool.from_device(
            adapter=False
        )
        pool.publish(BUCKETS)
        assert loaded == [1, 1] and not lent


@pytest.mark.parametrize(("policy", "gpu"), [("keep", GPU), ("wait", None)])
def test_it_is_not_chosen(
    client: RolloutClient,
    lent: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    policy: Any,
    gpu: str | None,
) -> None:
    """Where completions are to go on over an update, and where the engine is on another GPU."""
    monkeypatch.setattr("swift_r1.rollout.pool.session.own_gpu", lambda: gpu)
    with WeightWriter(client, policy=policy) as writer:
        session = ServerSession(writer, Expected("none", "hash", 100, None), DEADLINE_S)
        assert not session.shares_gpu and session.takes_files


def test_memory_of_another_gpu_is_refused(
    client: RolloutClient,
    cable: Cable,
    engine: Engine,
    lent: dict[str, torch.Tensor],
) -> None:
    engine.info = replace(engine.info, gpu=None)
    with (
        writer_with(client, FakeNccl(cable)) as writer,
        pytest.raises(ServerRefused, match="of a whole model"),
    ):
        writer.push(1, BUCKETS, "ipc")
    assert client.info().broken is None and "worker: start" not in cable.events


def test_a_block_holds_tensors_of_any_size_and_dtype() -> None:
    bucket = [
        ("a", torch.arange(3.0)),
        ("b", torch.arange(10, dtype=torch.bfloat16).view(2, 5).t()),
        ("c", torch.ones(1, dtype=torch.float16)),
    ]
    block = transport.packed(bucket)
    kinds = [(tensor.dtype, tensor.shape) for _, tensor in bucket]
    for found, (_, tensor) in zip(transport.tensors_in(block, kinds), bucket, strict=True):
        assert torch.equal(found, tensor)
    with pytest.raises(RuntimeError):
        list(transport.tensors_in(block[:-256], kinds))


OTHER = """
import sys
import torch
from swift_r1.sync.transport import opened, tensors_in
from swift_r1.wire.protocol import DeviceMemory

block = opened(DeviceMemory.model_validate_json(sys.stdin.readline()))
a, b = tensors_in(block, [(torch.float32, (3,)), (torch.bfloat16, (2, 2))])
print(a.tolist(), b.tolist())
"""


@pytest.mark.gpu
def test_another_process_reads_it() -> None:
    bucket = [
        ("a", torch.arange(3.0, device="cuda")),
        ("b", torch.ones(2, 2, dtype=torch.bfloat16, device="cuda")),
    ]
    for _ in range(2):
        block = transport.packed(bucket)
        memory = transport.shared(block)
        done = subprocess.run(
            [sys.executable, "-c", OTHER],
            input=memory.model_dump_json(),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.stdout == "[0.0, 1.0, 2.0] [[1.0, 1.0], [1.0, 1.0]]\n", done.stderr
