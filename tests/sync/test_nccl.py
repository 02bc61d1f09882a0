"""Weights over NCCL, without a GPU: our wire and both ends' code with a communicator that is two queues.

The worker is our mixin over stand-ins of vLLM's own methods, which note their calls: order and arguments count.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch

from swift_r1.errors import ServerUnreachable, UsageError
from swift_r1.rollout.pool.health import GatherAgain
from swift_r1.rollout.pool.session import Expected
from swift_r1.serving.engines import vllm_worker
from swift_r1.serving.engines.base import EngineInfo
from swift_r1.serving.engines.vllm_worker import SwiftWorker
from swift_r1.sync.transport import NcclSender
from swift_r1.sync.writer import WeightWriter
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import DeviceMemory, EngineDead, ServerRefused, StreamedTensor
from tests.live_servers import pool_of

DEADLINE_S = 20
BUCKETS = [
    [("a", torch.arange(6.0).view(2, 3))],
    [("b", torch.ones(4)), ("c", torch.full((1,), 7.0))],
]
SHAPES = {"a": (2, 3), "b": (4,), "c": (1,)}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))

    @torch.no_grad()
    def load_weights(self, weights: Any) -> set[str]:
        names = set()
        for name, tensor in weights:
            getattr(self, name).copy_(tensor)
            names.add(name)
        return names


class Cable:
    """What the two sides of a group share: who is in, and tensors on their way."""

    def __init__(self) -> None:
        self.seats = threading.Barrier(2, timeout=DEADLINE_S)
        self.tensors: queue.Queue[torch.Tensor] = queue.Queue()
        self.receiving = threading.Semaphore(0)
        self.events: list[str] = []


class Worker(SwiftWorker):
    """vLLM's worker as far as the mixin uses it, with one GPU less."""

    def __init__(self, cable: Cable) -> None:
        self.cable, self.model = cable, Model()
        self.model_runner = self.weight_transfer_engine = self
        self._weight_update_active = False

    def reset_weight_update_target(self) -> None: ...

    def get_model(self) -> Model:
        return self.model

    def shutdown_weight_transfer_engine(self) -> None:
        if self._weight_update_active:
            raise RuntimeError("Cannot release a trainer connection during a weight update")
        self.cable.events.append("worker: leave")

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        assert (info["rank_offset"], info["world_size"], info["packed"]) == (1, 2, False)
        self.cable.seats.wait()
        self.cable.events.append("worker: join")

    def start_weight_update(self) -> None:
        if self._weight_update_active:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self._weight_update_active = True
        self.cable.events.append("worker: start")

    def update_weights(self, info: dict[str, Any]) -> None:
        assert self._weight_update_active
        try:
            self.receive(info)
        except BaseException:
            self._weight_update_active = False
            raise

    def receive(self, info: dict[str, Any]) -> None:
        self.cable.receiving.release()
        for name, dtype, shape in zip(
            info["names"], info["dtype_names"], info["shapes"], strict=True
        ):
            tensor = self.cable.tensors.get(timeout=1.0)
            assert (str(tensor.dtype), list(tensor.shape)) == (f"torch.{dtype}", shape)
            self.model.load_weights([(name, tensor)])
            self.cable.events.append(f"worker: {name}")

    def finish_weight_update(self) -> None:
        assert self._weight_update_active
        self._weight_update_active = False
        self.cable.events.append("worker: finish")


class Engine:
    dead = False
    scores_alone = False

    def __init__(self, cable: Cable, workers: int = 1) -> None:
        self.info = EngineInfo("fake", "0", 100, "hash", 64, "float32", nccl_workers=workers)
        self.worker = Worker(cable)

    async def join_nccl(self, unique_id: str, world_size: int) -> None:
        await asyncio.to_thread(self.worker.swift_join_nccl, unique_id, world_size)

    async def receive_weights(
        self, tensors: Sequence[StreamedTensor], first: bool, memory: DeviceMemory | None = None
    ) -> None:
        names, dtypes = [one.name for one in tensors], [one.dtype for one in tensors]
        shapes = [list(one.shape) for one in tensors]
        try:
            fields = memory and memory.model_dump()
            await asyncio.to_thread(self.worker.swift_receive, names, dtypes, shapes, first, fields)
        except queue.Empty as error:
            self.dead = True
            raise EngineDead("its workers waited for weights that did not come") from error

    async def finish_receiving(self, version: int) -> None:
        await asyncio.to_thread(self.worker.swift_finish_receiving)

    def shutdown(self) -> None: ...


class FakeNccl:
    """The trainer's side of the cable; `fails_at` is the number of the broadcast that raises."""

    def __init__(self, cable: Cable, fails_at: int | None = None) -> None:
        self.cable, self.fails_at, self.broadcasts = cable, fails_at, 0

    def unique_id(self) -> bytes:
        return bytes(128)

    def join(self, unique_id: bytes, world_size: int) -> None:
        assert (unique_id, world_size) == (bytes(128), 2)
        self.cable.seats.wait()

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> Callable[[], bool]:
        self.broadcasts += 1
        if self.broadcasts == self.fails_at:
            assert self.cable.receiving.acquire(
                timeout=DEADLINE_S
            ) and self.cable.receiving.acquire(timeout=DEADLINE_S)
            raise RuntimeError("unhandled cuda error")
        for tensor in tensors:
            self.cable.tensors.put(tensor)
        return self.cable.tensors.empty

    def close(self) -> None:
        self.cable.events.append("trainer: leave")


@pytest.fixture
def cable() -> Cable:
    return Cable()


@pytest.fixture
def engine(cable: Cable, monkeypatch: pytest.MonkeyPatch) -> Engine:
    # Both need vLLM's model classes.
    monkeypatch.setattr(
        vllm_worker, "repack_embeddings", lambda _model: cable.events.append("worker: repack")
    )
    monkeypatch.setattr(
        vllm_worker,
        "_leave_reload",
        lambda _model, _runner: cable.events.append("worker: break off"),
    )
    return Engine(cable)


@pytest.fixture
def client(engine: Engine, serve_engine: Callable[..., str]) -> Iterator[RolloutClient]:
    with RolloutClient(serve_engine(engine, SHAPES)) as client:
        yield client


def writer_with(client: RolloutClient, nccl: FakeNccl) -> WeightWriter:
    writer = WeightWriter(client)
    writer.nccl = NcclSender(client, writer.headers, DEADLINE_S, lambda: nccl)
    return writer


def test_the_order_of_calls(client: RolloutClient, cable: Cable, engine: Engine) -> None:
    with writer_with(client, FakeNccl(cable)) as writer:
        assert writer.push(1, BUCKETS, "nccl").weight_version == 1
        version = ["start", "a", "b", "c", "finish", "repack"]
        assert cable.events == [f"worker: {what}" for what in ["leave", "join", *version]]
        # The group stays: no second rendezvous.
        more = [[(name, tensor + 1) for name, tensor in bucket] for bucket in BUCKETS]
        assert writer.push(2, more, "nccl").weight_version == 2
        assert cable.events[8:] == [f"worker: {what}" for what in version]
    assert cable.events[-1] == "trainer: leave"
    assert (
        torch.equal(engine.worker.model.a, BUCKETS[0][0][1] + 1)
        and engine.worker.model.c.item() == 8.0
    )


def test_a_missing_weight_leaves_no_version(client: RolloutClient, cable: Cable) -> None:
    with writer_with(client, FakeNccl(cable)) as writer:
        with pytest.raises(ServerRefused, match="1 of 3 weights were not sent: a"):
            writer.push(1, BUCKETS[1:], "nccl")
        info = client.info()
        assert info.weight_version == 0 and "a full push of a version repairs it" in str(
            info.broken
        )
        assert writer.push(1, BUCKETS, "nccl").weight_version == 1
        assert client.info().broken is None


def test_a_broadcast_that_fails_ends_the_wait_of_both_sides(
    client: RolloutClient, cable: Cable
) -> None:
    """The workers are stuck in a collective then, which on a GPU nothing ends: the server gives up on its engine."""
    with (
        writer_with(client, FakeNccl(cable, fails_at=2)) as writer,
        pytest.raises(RuntimeError, match="cuda error"),
    ):
        writer.push(1, BUCKETS, "nccl")
    assert "trainer: leave" in cable.events
    with httpx.Client(base_url=client.base_url, trust_env=False) as http:
        end = time.monotonic() + DEADLINE_S
        while http.get("/health").status_code == 200:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert http.get("/health").json() == {"error": "the engine died"}
    assert "worker: a" in cable.events and "worker: break off" in cable.events
    assert "worker: b" not in cable.events


def test_an_announcement_that_is_never_followed_up_breaks_the_update_only(
    client: RolloutClient, cable: Cable, engine: Engine
) -> None:
    """Called off between two buckets: half a version is in the engine, and a whole one repairs it."""

    def buckets() -> Iterator[list[tuple[str, torch.Tensor]]]:
        yield BUCKETS[0]
        yield BUCKETS[1][:1]
        raise ValueError("the gather failed")

    with writer_with(client, FakeNccl(cable)) as writer:
        with pytest.raises(ValueError, match="the gather failed"):
            writer.push(1, buckets(), "nccl")
        assert "it broke off" in str(client.info().broken) and not engine.dead
        assert not client.info().own_base
        assert writer.push(1, BUCKETS, "nccl").weight_version == 1


@pytest.mark.parametrize(
    ("bucket", "sentence"),
    [
        ([("nobody", torch.ones(1))], "unexpected weight nobody"),
        ([("a", torch.ones(3, 2))], r"a has shape \[3, 2\]"),
        ([("b", torch.ones(4)), ("b", torch.ones(4))], "comes twice"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_engine_is_touched(
    client: RolloutClient, cable: Cable, bucket: list[tuple[str, torch.Tensor]], sentence: str
) -> None:
    with (
        writer_with(client, FakeNccl(cable)) as writer,
        pytest.raises(ServerRefused, match=sentence),
    ):
        writer.push(1, [bucket], "nccl")
    assert "worker: start" not in cable.events
    assert client.info().broken is None and client.info().weight_version == 0


def test_who_has_no_gpu_is_told_so(
    cable: Cable, serve_engine: Callable[..., str], client: RolloutClient
) -> None:
    with (
        RolloutClient(serve_engine(Engine(cable, workers=0), SHAPES)) as without,
        writer_with(without, FakeNccl(cable)) as writer,
        pytest.raises(UsageError, match=r"the rollout server at http://127.0.0.1:\d+ has no GPU"),
    ):
        writer.push(1, BUCKETS, "nccl")
    copies = Engine(cable)
    copies.info = replace(copies.info, nccl_workers=0, copies=2)  # as `Replicas` say
    with (
        RolloutClient(serve_engine(copies, SHAPES)) as of_two,
        writer_with(of_two, FakeNccl(cable)) as writer,
        pytest.raises(UsageError, match=r"has 2 copies of the model .*by http or shm"),
    ):
        writer.push(1, BUCKETS, "nccl")
    if torch.cuda.is_available():
        return
    with WeightWriter(client) as writer, pytest.raises(UsageError, match="the trainer has no GPU"):
        writer.push(1, BUCKETS, "nccl")


def test_workers_that_do_not_join_are_waited_for_with_a_deadline(
    client: RolloutClient, cable: Cable
) -> None:
    class Alone(FakeNccl):
        def join(self, unique_id: bytes, world_size: int) -> None:
            started.set()
            cable.seats.wait()

    started = threading.Event()
    engine_may_join = threading.Event()

    def late(_info: dict[str, Any]) -> None:
        engine_may_join.wait(DEADLINE_S)

    worker = Worker.init_weight_transfer_engine
    Worker.init_weight_transfer_engine = lambda _self, info: late(info)  # type: ignore[method-assign]
    try:
        with WeightWriter(client) as writer:
            writer.nccl = NcclSender(client, writer.headers, 0.5, lambda: Alone(cable))
            with pytest.raises(
                ServerUnreachable, match=r"waited 0.5 s for the workers .* to join the NCCL group"
            ):
                writer.push(1, BUCKETS, "nccl")
    finally:
        engine_may_join.set()
        cable.seats.abort()
        Worker.init_weight_transfer_engine = worker  # type: ignore[method-assign]
    assert started.is_set()


def test_weights_that_a_server_lost_are_gathered_again(client: RolloutClient, cable: Cable) -> None:
    """They are in no snapshot."""
    pool = pool_of([client], Expected("none", "hash", 100, None), DEADLINE_S, "nccl")
    [session] = pool.sessions
    session.writer.nccl = NcclSender(
        client, session.writer.headers, DEADLINE_S, lambda: FakeNccl(cable)
    )
    pool.publish(BUCKETS)
    assert pool.version == client.info().weight_version == 1 and not pool.snapshot.whole
    with pytest.raises(ServerRefused, match="were not sent"):
        session.writer.push(2, BUCKETS[1:], "nccl")
    pool.health.lose(pool.health.ready[0])
    with pytest.raises(GatherAgain):
        pool.health.wait_for_any()
    pool.publish(BUCKETS)
    assert (
        pool.health.ready
        and pool.version == client.info().weight_version == 2
        and client.info().broken is None
    )
    pool.close()


def test_vllm_takes_what_it_is_told() -> None:
    """What else is used of it is in tests/packaging/test_private_interfaces.py."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    init = NCCLWeightTransferEngine.init_info_cls(
        nccl_unique_id_b64="A" * 171 + "=", rank_offset=1, world_size=2, packed=False
    )
    assert init.nccl_unique_id_bytes == bytes(128)
    NCCLWeightTransferEngine.update_info_cls(names=["a"], dtype_names=["float32"], shapes=[[1]])
