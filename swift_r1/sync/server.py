"""The server's half of a push, over one engine: what arrives is staged, passed on to other servers, and loaded.
`update.py` has its states."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import httpx

from swift_r1.errors import SwiftError
from swift_r1.flags.server import RolloutArguments
from swift_r1.models.expected import Shapes, adapter_shapes, of_parts
from swift_r1.sync.buckets import most_bytes
from swift_r1.sync.staging import StagedBucket, Staging
from swift_r1.sync.transport import chunks_of, seconds_for
from swift_r1.sync.update import PendingUpdate, UpdateMachine
from swift_r1.wire import protocol as wire
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import (
    AdapterConfig,
    DeviceMemory,
    EngineDead,
    HTTPError,
    StreamedTensor,
)

logger = logging.getLogger("swift_r1.serving")

_HEADER_ROOM = 16 << 20
_LEASES_EVERY_S = 1.0
_PIECE = 1 << 20
# in which the other server takes no piece of a bucket, or does not answer when it has all
_SILENCE_S = 60.0
_NO_NCCL = "this engine takes no weights over NCCL"


class EngineFacts(Protocol):
    """What an update asks of an engine's `EngineInfo`."""

    @property
    def nccl_workers(self) -> int: ...

    @property
    def gpu(self) -> str | None: ...

    @property
    def can_sleep(self) -> bool: ...


class WeightEngine(Protocol):
    """An engine as its weights see it; `InferenceEngine` is one that also generates."""

    info: EngineFacts

    async def load_weights(self, files: Sequence[Path], version: int) -> None:
        """Replaces all weights by those of the safetensors files, which are `version`, and forgets cached prefixes.
        After an exception the engine may hold a mixture, until a later call succeeds."""

    async def join_nccl(self, unique_id: str, world_size: int) -> None:
        """The workers join the NCCL group of this id (base64) as ranks 1, 2, ..., and leave an earlier one."""
        raise RuntimeError(_NO_NCCL)

    async def receive_weights(
        self, tensors: Sequence[StreamedTensor], first: bool, memory: DeviceMemory | None = None
    ) -> None:
        """Loads tensors that rank 0 of the group broadcasts now, one after another, or that are in `memory`; `first`
        opens an update. Raises EngineDead where they did not come in time: the workers wait in a collective that
        nothing ends."""
        raise RuntimeError(_NO_NCCL)

    async def finish_receiving(self, version: int) -> None:
        """Ends the update that `receive_weights` opened; every weight must have come."""
        raise RuntimeError(_NO_NCCL)

    async def load_adapter(
        self, files: Sequence[Path], config: AdapterConfig, version: int
    ) -> None:
        """Generates and scores with the adapter of the safetensors files from now on; `load_weights` ends that. After
        an exception the one before stays in use."""

    async def sleep(self, level: int) -> None:
        """Gives its memory back, while nothing runs: 1 keeps the weights on the host, 2 discards them. Raises
        EngineDead where that failed."""

    async def wake(self, weights_only: bool = False) -> None:
        """Takes its memory again, or that of the weights alone, which is all that a load needs. Raises as `sleep`."""


class Admits(Protocol):
    """Keeps work out of the engine while its weights change, as `Admission` does."""

    exclusive: asyncio.Lock
    asleep: str | None

    def notify(self) -> None: ...

    async def drained(self, waiting_for: str) -> None: ...


def update_machine(config: RolloutArguments, expected: Shapes) -> UpdateMachine:
    """Returns the states of a server whose model has weights of these names and shapes."""
    return UpdateMachine(
        expected, time.monotonic, seconds_for(config.update_timeout, most_bytes(expected))
    )


class Sleeping:
    """Puts one engine to sleep between rounds (`--sleep_level`) and wakes it, for the holder of the lease on the
    weights (409 for others). `level` is 0 while the whole engine is awake.

        awake --sleep--> asleep --wake--> awake (same version)
                           |  `--commit--> asleep, but the new weights are in place --wake--> awake (version N+1)

    At level 1 the weights are kept in host memory. At level 2 they are gone: the server then holds no whole version
    (`UpdateMachine.broken`) until a full push has been committed.
    """

    def __init__(
        self,
        config: RolloutArguments,
        engine: WeightEngine,
        admission: Admits,
        machine: UpdateMachine,
        staging: Staging,
    ) -> None:
        self._adapters = config.vllm_enable_lora
        self._engine = engine
        self._admission = admission
        self._machine = machine
        self._staging = staging
        self.level = 0
        self._weights_away = False

    def status(self) -> wire.SleepStatus:
        return wire.SleepStatus(
            asleep=self.level, weight_version=self._machine.version, broken=self._machine.broken
        )

    async def sleep(self, token: str | None, request: wire.SleepRequest) -> wire.SleepStatus:
        """New work is refused from now on; what runs ends first. An engine that sleeps already stays at its level.
        Raises HTTPError: 409 while an update is open, 422 where the engine cannot sleep, 503 if running work did not
        end in time (it stays awake)."""
        self._machine.check_holder(token)
        if not self._engine.info.can_sleep:
            raise HTTPError(
                422, "this engine cannot sleep: vLLM can on a GPU, started with enable_sleep_mode"
            )
        if self._adapters and request.level > 1:
            raise HTTPError(
                422,
                "with --vllm_enable_lora true adapters need the weights that sleep level 2 discards",
            )
        self._check_no_update()
        if self.level and self._weights_away:
            return self.status()
        self._refuse_work(request.level)
        try:
            await self._admission.drained("the engine's sleep")
            async with self._admission.exclusive:
                self._check_no_update()
                if self._weights_away:  # a second call at the same time has done it
                    return self.status()
                await self._engine.sleep(request.level)
                self.level = request.level
                self._weights_away = True
                if request.level > 1:
                    self._machine.discarded()
                    self._staging.base = None  # changes to what is gone are not accepted
        finally:
            self._refuse_work(self.level)
        logger.info("the engine sleeps at level %d", self.level)
        return self.status()

    async def wake(self, token: str | None) -> wire.SleepStatus:
        """Brings all its memory back; an engine that is awake stays so."""
        self._machine.check_holder(token)
        async with self._admission.exclusive:
            if self.level:
                await self._engine.wake()
                self.level = 0
                self._weights_away = False
                self._refuse_work(0)
                logger.info("the engine is awake")
        return self.status()

    async def wake_weights(self) -> None:
        """Makes room for new weights alone. Whoever loads them holds the admission's `exclusive`."""
        if self._weights_away:
            await self._engine.wake(weights_only=True)
            self._weights_away = False

    def _refuse_work(self, level: int) -> None:
        self._admission.asleep = (
            f"the engine sleeps (level {level}) until its trainer wakes it" if level else None
        )
        self._admission.notify()

    def _check_no_update(self) -> None:
        version = self._machine.pending_version
        if version is not None:
            raise HTTPError(
                409,
                f"the update to weight version {version} is open: commit it before the engine sleeps",
            )


class Relays:
    """Passes the update that arrives here on to the servers that the lease's holder names. They stay under its lease:
    this server shows them the token that came with the name, and its own API key, which they share.

    A child that is slow or gone holds up neither this server nor its other children: each has a task of its own. The
    files of the update are kept until all children have them, or the next update begins.
    """

    def __init__(self, machine: UpdateMachine, api_key: str | None) -> None:
        self._machine = machine
        self._api_key = api_key
        self._update: PendingUpdate | None = None
        self._awaited = 0  # children that do not have the update yet
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._later: list[Callable[[], None]] = []
        self._news = asyncio.Event()

    @property
    def awaited(self) -> bool:
        """Whether children are still to get the update."""
        return self._awaited > 0

    async def stop(self) -> None:
        """Ends what is left of the last update."""
        tasks = list(self._tasks.values())
        self._tasks = {}
        self._update = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._end()

    def expect(self, update: PendingUpdate, children: int) -> None:
        """This update is to go on to so many servers; they are named later."""
        self._update = update if children else None
        self._awaited = children

    def once_sent(self, work: Callable[[], None]) -> None:
        """Does `work`, which ends the use of the update's files here, when all children have them."""
        if self._awaited and self._update is not None and self._update.whole:
            self._later.append(work)
        else:
            work()

    def notify(self) -> None:
        """A bucket has come, or the update is over."""
        news = self._news
        self._news = asyncio.Event()
        news.set()

    async def relay(self, token: str | None, request: wire.RelayRequest) -> wire.RelayStatus:
        """Passes the update on to the server that is named, and answers when that has all of it, or after
        `wire.RELAY_ANSWER_S`: then the same is asked again. Raises HTTPError: 409 where the update is not here any
        more, 502 where the other server refuses a bucket or is not reached."""
        self._machine.check_holder(token, also_while_loading=True)
        task = self._tasks.get(request.url)
        if task is None:
            if self._update is None or self._update.version != request.version:
                raise HTTPError(409, f"version {request.version} does not arrive here")
            task = self._tasks[request.url] = asyncio.create_task(
                self._pass_on(self._update, request)
            )
            task.add_done_callback(self._one_less)
        await asyncio.wait({task}, timeout=wire.RELAY_ANSWER_S)
        if task.cancelled():
            raise HTTPError(409, f"version {request.version} was begun again")
        if task.done():
            task.result()
        return wire.RelayStatus(whole=task.done())

    def _one_less(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # it is raised where the trainer asks
            self._awaited -= 1
            if not self._awaited:
                self._end()

    def _end(self) -> None:
        self._update = None
        self._awaited = 0
        later = self._later
        self._later = []
        for work in later:
            work()

    async def _pass_on(self, update: PendingUpdate, request: wire.RelayRequest) -> None:
        index = 0
        try:
            with RolloutClient(request.url, self._api_key) as client:
                bucket = await self._arrived(update, index)
                while bucket is not None:
                    headers, body = _body(bucket, request)
                    sent = client.called(
                        "PUT", "/v1/weights/bucket", wire.UpdateStatus, body, headers, _SILENCE_S
                    )
                    await asyncio.wrap_future(client.loop.start(sent))
                    index += 1
                    bucket = await self._arrived(update, index)
        except httpx.InvalidURL as error:
            raise HTTPError(422, f"url: {error}") from error
        except SwiftError as error:
            raise HTTPError(502, f"bucket {index} was not passed on: {error}") from error
        except OSError as error:
            raise HTTPError(
                409, f"bucket {index} is not here any more: {error.strerror}"
            ) from error

    async def _arrived(self, update: PendingUpdate, index: int) -> StagedBucket | None:
        """The next bucket once it is here, None after the last one. The machine forgets an update that stands still."""
        while True:
            if update.dropped and not update.whole:
                raise HTTPError(409, f"the update to version {update.version} broke off")
            if index < len(update.buckets):
                return update.buckets[index]
            if update.whole:
                return None
            await self._news.wait()


def _body(
    bucket: StagedBucket, request: wire.RelayRequest
) -> tuple[dict[str, str], Iterator[bytes]]:
    """Returns what goes to the other server: what has changed, if it holds what changes, else the whole file."""
    headers = {
        wire.LEASE_HEADER: request.lease,
        wire.VERSION_HEADER: str(request.version),
        wire.BUCKET_HEADER: str(bucket.index),
        wire.DIGEST_HEADER: bucket.digest,
    }
    change = bucket.change if bucket.base is not None and bucket.base == request.base else None
    headers["Content-Length"] = str(bucket.path.stat().st_size if change is None else len(change))
    if change is not None:
        return headers | {wire.BASE_HEADER: str(bucket.base)}, chunks_of([memoryview(change)])
    return headers, _file(bucket.path)


def _file(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        yield from iter(partial(file.read, _PIECE), b"")


class WeightUpdates:
    """The state machine of `update.py` with an engine, files, and the servers that it passes them on to. Methods raise
    HTTPError as it does."""

    def __init__(
        self,
        config: RolloutArguments,
        engine: WeightEngine,
        expected: Shapes,
        machine: UpdateMachine,
        admission: Admits,
        # called with `loaded` or `failed`, and the seconds from the commit on
        count: Callable[[str, float], None],
        committed: Callable[[], None],  # called when a new version is served
    ) -> None:
        self._config = config
        self._engine = engine
        self._count = count
        self._committed = committed
        self._expected = expected
        self.machine = machine
        self.staging = Staging(most_bytes(expected) + _HEADER_ROOM)
        self.relays = Relays(machine, config.api_key)
        machine.discard = self._forget
        self.admission = admission
        self.sleeping = Sleeping(config, engine, admission, machine, self.staging)
        self.own_base = True  # no whole weights have been pushed
        self._adapter: wire.AdapterConfig | None = None
        self._base: str | None = None
        self._commit: asyncio.Task[None] | None = None

    def status(self, **more: Any) -> wire.UpdateStatus:
        machine = self.machine
        return wire.UpdateStatus(
            weight_version=machine.version,
            pending_version=machine.pending_version,
            buckets=machine.staged,
            **more,
        )

    @contextmanager
    def _changes(self) -> Iterator[None]:
        """Around all that uses the machine, whose state may change also where it raises."""
        try:
            yield
        finally:
            self._notify()

    def _notify(self) -> None:
        self.admission.notify()
        self.relays.notify()

    def _forget(self, buckets: list[StagedBucket]) -> None:
        self.relays.once_sent(lambda: self.staging.forget(buckets))

    async def take_lease(self, request: wire.LeaseRequest) -> wire.Lease:
        with self._changes():
            token = self.machine.take_lease(request.owner, request.ttl_seconds, request.token)
        return wire.Lease(token=token, ttl_seconds=request.ttl_seconds)

    async def release_lease(self, token: str | None) -> wire.UpdateStatus:
        with self._changes():
            self.machine.release(token)
        return self.status()

    async def begin(self, token: str | None, request: wire.UpdateBegin) -> wire.UpdateStatus:
        expected = self._adapter_shapes(request.adapter) if request.adapter is not None else None
        with self._changes():
            self.machine.check_holder(token)
            await self.relays.stop()
            update = self.machine.begin(token, request.version, expected)
            self.relays.expect(update, request.relays)
            self._adapter = request.adapter
            self._base = self.staging.base
        return self.status(folder=self.staging.shared, base=self._base)

    async def bucket(
        self,
        token: str | None,
        version: int,
        index: int,
        digest: str | None,
        chunks: AsyncIterator[bytes],
        base: str | None,
        size: int,
    ) -> wire.UpdateStatus:
        """Stages one bucket; a refused one leaves the update open at the bucket before it. With a `base`, the content
        hash of a version that was loaded before, only what has changed comes. `size` is the body's, 0 where it is
        unknown."""
        with self._changes():
            self.machine.check_bucket_welcome(token, version, index)
            if base is None:
                staged = await self.staging.write(index, chunks, digest, size)
            elif digest is None:
                raise HTTPError(
                    422, f"a change needs the hash of what it makes ({wire.DIGEST_HEADER})"
                )
            elif base != self._base:
                raise HTTPError(
                    409, "this server does not hold the version that changes: send the bucket whole"
                )
            else:
                staged = await self.staging.change(
                    index, chunks, digest, base if self.relays.awaited else None
                )
            return self._add(token, version, staged)

    async def file(self, token: str | None, request: wire.BucketFile) -> wire.UpdateStatus:
        """Stages a bucket that the lease's holder has written into the staging folder."""
        with self._changes():
            self.machine.check_bucket_welcome(token, request.version, request.index)
            return self._add(
                token, request.version, await self.staging.take(request.index, request.digest)
            )

    def _add(self, token: str | None, version: int, staged: StagedBucket) -> wire.UpdateStatus:
        try:
            self.machine.add_bucket(token, version, staged)
        except HTTPError:
            self.staging.forget([staged])
            raise
        return self.status()

    async def relay(self, token: str | None, request: wire.RelayRequest) -> wire.RelayStatus:
        """See `Relays.relay`."""
        with self._changes():
            return await self.relays.relay(token, request)

    async def channel(self, token: str | None, request: wire.ChannelRequest) -> wire.UpdateStatus:
        """Takes the engine's workers into the NCCL group of the lease's holder."""
        workers = self._engine.info.nccl_workers
        with self._changes():
            self.machine.check_holder(token)
            if request.world_size != 1 + workers:
                raise HTTPError(
                    422, f"this server has {workers} workers that take weights over NCCL"
                )
            async with self.admission.exclusive:
                await self._engine.join_nccl(request.unique_id, request.world_size)
        return self.status()

    async def stream(self, token: str | None, bucket: wire.StreamedBucket) -> wire.UpdateStatus:
        """Loads one bucket while the lease's holder broadcasts it, or out of its memory. Running rollouts end first,
        whatever the policy."""
        with self._changes():
            self.machine.check_stream_welcome(token, bucket)
            known = self._engine.info
            memory = bucket.memory
            if self._adapter is not None or not (
                known.nccl_workers if memory is None else memory.gpu == known.gpu
            ):
                raise HTTPError(
                    422,
                    "a streamed bucket is of a whole model, and comes over NCCL to an engine on a GPU, or in the memory of "
                    "that GPU",
                )
            await self._make_way(bucket.version, self._config.update_policy, keep=False)
            async with self.admission.exclusive:
                self.machine.stream(token, bucket)
                self.own_base = False
                try:
                    await self.sleeping.wake_weights()
                    await asyncio.shield(
                        self._engine.receive_weights(bucket.tensors, bucket.index == 0, memory)
                    )
                    self.machine.received()
                except Exception as error:
                    raise self._load_failed(error, []) from error
        return self.status()

    async def commit(self, token: str | None, request: wire.UpdateCommit) -> wire.UpdateStatus:
        """Loads the staged version into the engine; the policy says what becomes of running rollouts. Raises HTTPError:
        503 if these did not finish in time (the update stays open), 500 if the engine could not load it (then nothing
        is served until a full push succeeds)."""
        started = time.monotonic()
        with self._changes():
            if self.machine.already_committed(token, request.version, request.content_hash):
                return self.status()
            opened = self.machine.opened(token, request.version)
            await self._make_way(request.version, request.policy or self._config.update_policy)
            self.machine.check_still_open(opened)
            buckets = self.machine.start_loading(
                token, request.version, request.buckets, request.content_hash
            )
            # A task of its own: a trainer that hangs up must not leave the engine half loaded.
            self._commit = asyncio.create_task(self._load(request, buckets))
            await asyncio.shield(self._commit)
        seconds = time.monotonic() - started
        self._count("loaded", seconds)
        return self.status(seconds=seconds)

    async def abort(self, token: str | None, request: wire.UpdateAbort) -> wire.UpdateStatus:
        with self._changes():
            self.machine.abort(token, request.version)
        return self.status()

    async def watch_leases(self) -> None:
        """Ends leases and updates of silent trainers, for as long as the server runs."""
        while True:
            await asyncio.sleep(_LEASES_EVERY_S)
            try:
                what = self.machine.expire()
            except OSError:
                logger.exception("the files of an update could not be removed")
                continue
            if what is not None:
                logger.warning("%s; version %d stays", what, self.machine.version)
                self._notify()

    async def _make_way(self, version: int, policy: str, keep: bool = True) -> None:
        if policy != "keep" or not keep:
            await self.admission.drained(f"the update to weight version {version}")

    def _adapter_shapes(self, adapter: wire.AdapterConfig) -> Shapes:
        highest = self._config.vllm_max_lora_rank
        if not self._config.vllm_enable_lora:
            raise HTTPError(
                422, "this server takes no adapters: start it with --vllm_enable_lora true"
            )
        if adapter.rank > highest:
            raise HTTPError(
                422,
                f"the adapter has rank {adapter.rank}, more than --vllm_max_lora_rank {highest}",
            )
        shapes = adapter_shapes(of_parts(self._expected, ("llm",)), adapter)
        if not self.own_base:
            raise HTTPError(
                409, "whole weights were pushed, and adapters need the server's own: start it again"
            )
        return shapes

    async def _load(self, request: wire.UpdateCommit, buckets: Sequence[StagedBucket]) -> None:
        with self._changes():
            async with self.admission.exclusive:
                try:
                    paths = [bucket.path for bucket in buckets]
                    self.own_base = self.own_base and self._adapter is not None
                    await self.sleeping.wake_weights()
                    if self._adapter is not None:
                        await self._engine.load_adapter(paths, self._adapter, request.version)
                    elif paths:
                        await self._engine.load_weights(paths, request.version)
                    else:
                        await self._engine.finish_receiving(request.version)
                except Exception as error:
                    raise self._load_failed(error, buckets) from error
                self.machine.loaded()
                self.relays.once_sent(lambda: self._hold(len(buckets), request))
                self._committed()

    def _hold(self, buckets: int, request: wire.UpdateCommit) -> None:
        if self.machine.version == request.version and self.machine.broken is None:
            self.staging.hold(buckets, request.content_hash)

    def _load_failed(self, error: Exception, buckets: Sequence[StagedBucket]) -> Exception:
        """Returns what to raise for it."""
        self._count("failed", 0.0)
        # The engine may still read them: not to be written to for the next version.
        for bucket in buckets:
            bucket.path.unlink(missing_ok=True)
        if isinstance(error, EngineDead):
            self.machine.failed("the engine died")
            return error
        logger.error(
            "loading weight version %s failed", self.machine.pending_version, exc_info=error
        )
        self.machine.failed(f"{type(error).__name__}: {error}".splitlines()[0][:300])
        return HTTPError(500, self.machine.broken or "")
