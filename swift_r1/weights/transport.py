"""The ways for a bucket: over HTTP anywhere, through a file in shared memory on one host, or from GPU to GPU by NCCL.

By HTTP and shared memory the bytes are those of a safetensors file, and the server checks their hash, names and shapes.
For NCCL both ends join one group, the trainer as rank 0 and the engine's workers after it. The group's id is made here
and goes over HTTP under the lease, so nothing is pickled and we open no further port. Each bucket is announced by HTTP,
which the workers answer by receiving, and broadcast at the same time. A collective whose other side is gone never ends
by itself: everything here has a deadline, and after a failure the group is given up and made again.
"""

from __future__ import annotations

import base64
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pydantic import BaseModel

from swift_r1.errors import ServerUnreachable, UsageError
from swift_r1.weights.buckets import Hash, Tensors, entries_digest
from swift_r1.wire import protocol as wire

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Answer = TypeVar("Answer", bound=BaseModel)

AUTO, SHM, HTTP, NCCL = "auto", "shm", "http", "nccl"
MIN_BYTES_A_SECOND = 64 << 20
"""Weights that move slower than this count as stuck: half of what 1 Gbit/s carries."""
_PIECE = 1 << 20
_POLL_S = 0.002


class Connection(Protocol):
    """A client of one server, as far as weights need it (see `RolloutClient`)."""

    base_url: str
    lease: str | None

    def info(self) -> wire.ServerInfo: ...

    def call(
        self,
        method: str,
        path: str,
        answer: type[Answer],
        body: BaseModel | Iterable[bytes] | None = ...,
        headers: Mapping[str, str] | None = ...,
        timeout_s: float = ...,
    ) -> Answer: ...


def usable_folder(folder: str | None) -> Path | None:
    """The server's folder in shared memory if this process can write there too, else None.

    Its name is random, so a folder of that name is the server's own and no other host's.
    """
    if folder is None:
        return None
    path = Path(folder)
    # Not by permission alone: root may write there, and a server of another user could not read what root has written.
    mine = path.is_dir() and path.stat().st_uid == os.geteuid()
    return path if mine and os.access(path, os.W_OK | os.X_OK) else None


def incoming(folder: Path, index: int) -> Path:
    """Where bucket `index` is put; the server names it, so that no path ever comes over the wire."""
    return folder / f"incoming-{index:06d}"


def seconds_for(base_s: float, nbytes: int) -> float:
    """The longest that work on weights may take: what any model is given, and the time of its bytes at
    `MIN_BYTES_A_SECOND`."""
    return base_s + nbytes / MIN_BYTES_A_SECOND


def reserve(descriptor: int, size: int) -> None:
    """Memory or disk for `size` bytes of a file, before the first is written: several engines share `/dev/shm`, and
    each of them sees the same free bytes.

    Raises:
        OSError: there is no room.
    """
    if size:
        os.posix_fallocate(descriptor, 0, size)


def fill(descriptor: int, parts: Sequence[memoryview]) -> str:
    """Makes the parts all that the file holds, and returns their hash (hex).

    Raises:
        OSError: there is no room.
    """
    digest, size, position = Hash(), sum(len(part) for part in parts), 0
    reserve(descriptor, size)
    for part in _pieces(parts):
        digest.update(part)
        written = 0
        while written < len(part):
            written += os.pwrite(descriptor, part[written:], position + written)
        position += written
    os.ftruncate(descriptor, size)
    return digest.hexdigest()


def write_file(path: Path, parts: Sequence[memoryview]) -> str:
    """`fill` for a file by name, which may be there already.

    Raises:
        OSError: there is no room; then there is no file.
    """
    if path.exists() and path.lstat().st_nlink > 1:
        path.unlink()  # another server has the same file
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        return fill(descriptor, parts)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


def chunks_of(parts: Sequence[memoryview]) -> Iterator[bytes]:
    """The parts for an HTTP body, neither huge nor tiny."""
    pending: list[memoryview] = []
    size = 0
    for part in _pieces(parts):
        pending.append(part)
        size += len(part)
        if size >= _PIECE:
            yield b"".join(pending)
            pending, size = [], 0
    if pending:
        yield b"".join(pending)


def overlapped(items: Iterable[T], send: Callable[[int, T], str]) -> list[str]:
    """`send(index, item)` for each item in order, in a thread, while the next item is being made; the results.

    At most two items exist at a time. The first failure ends it; an item that is being made then is not sent.
    """
    results: list[str] = []
    with ThreadPoolExecutor(1, "weights") as pool:
        pending = None
        for index, item in enumerate(items):
            if pending is not None:
                results.append(pending.result())
            pending = pool.submit(send, index, item)
        if pending is not None:
            results.append(pending.result())
    return results


def _pieces(parts: Sequence[memoryview]) -> Iterator[memoryview]:
    """So small that what was hashed is still in the processor's cache when it is written."""
    for part in parts:
        for start in range(0, len(part), _PIECE):
            yield part[start : start + _PIECE]


class Group(Protocol):
    """An open NCCL group, in which this process is rank 0."""

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> Callable[[], bool]:
        """Starts to send the tensors, in order; the result says whether all have been taken."""

    def close(self) -> None: ...


class Nccl(Protocol):
    """The NCCL library. `join` waits for the whole group."""

    def unique_id(self) -> bytes: ...

    def join(self, unique_id: bytes, world_size: int) -> Group: ...


class NcclSender:
    """Sends buckets to the workers of one server.

    Args:
        headers: of the lease.
        deadline_s: longest wait for the workers to join, and with `seconds_for` its bytes to take one bucket.
        open_nccl: called at the first use; default: NCCL as vLLM loads it.
    """

    def __init__(
        self,
        client: Connection,
        headers: Mapping[str, str],
        deadline_s: float = 120.0,
        open_nccl: Callable[[], Nccl] | None = None,
    ) -> None:
        self._client, self._headers, self._deadline_s = client, headers, deadline_s
        self._open_nccl = open_nccl or _VllmNccl
        self._group: Group | None = None
        self._instance: str | None = None

    def connect(self) -> None:
        """Joins a group with the server's workers, where that has not been done since the server was started.

        Raises:
            UsageError: one of the two has no GPU.
            ServerUnreachable: the workers did not join in time.
        """
        info = self._client.info()
        if self._group is not None and info.instance == self._instance:
            return
        if not info.nccl_workers:
            raise UsageError(f"--weight_transport nccl: the rollout server at {self._client.base_url} has no GPU")
        self.close()
        nccl = self._open_nccl()
        unique_id, size = nccl.unique_id(), 1 + info.nccl_workers
        body = wire.ChannelRequest(unique_id=base64.b64encode(unique_id).decode(), world_size=size)
        asked = self._ask("/v1/weights/channel", body)
        joined = _start(lambda: nccl.join(unique_id, size))
        self._until(lambda: joined.done() and asked.done(), (asked, joined), self._deadline_s, "join the NCCL group")
        self._group, self._instance = joined.result(), info.instance

    def send(self, version: int, index: int, bucket: Tensors) -> str:
        """Sends one bucket; the digest is of names, dtypes and shapes, since the bytes never pass a hash on their way.

        Raises:
            ServerRefused: the server's answer to the announcement.
            ServerUnreachable: no answer, or the workers did not take it in time.
        """
        group = self._group
        assert group is not None
        entries = tuple(
            wire.StreamedTensor.model_validate(
                {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": tuple(tensor.shape)}
            )
            for name, tensor in bucket
        )
        try:
            asked = self._ask("/v1/weights/stream", wire.StreamedBucket(version=version, index=index, tensors=entries))
            taken = group.broadcast([tensor.detach() for _, tensor in bucket])
            limit = seconds_for(self._deadline_s, sum(tensor.nbytes for _, tensor in bucket))
            self._until(lambda: asked.done() and taken(), (asked,), limit, f"take bucket {index} of version {version}")
        except BaseException:
            # The workers may wait in a collective for ever: this group is of no more use.
            self.close()
            raise
        return entries_digest(entries)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _ask(self, path: str, body: BaseModel) -> Future[wire.UpdateStatus]:
        return _start(lambda: self._client.call("POST", path, wire.UpdateStatus, body, self._headers))

    def _until(self, done: Callable[[], bool], futures: Sequence[Future[Any]], limit_s: float, what: str) -> None:
        """Waits for `done`; a future that failed ends the wait at once with what it raised."""
        end = time.monotonic() + limit_s
        while True:
            for future in futures:
                if future.done():
                    future.result()
            if done():
                return
            if time.monotonic() > end:
                raise ServerUnreachable(
                    f"the trainer waited {limit_s:.3g} s for the workers of the rollout server at "
                    f"{self._client.base_url} to {what}"
                )
            time.sleep(_POLL_S)


def _start(work: Callable[[], T]) -> Future[T]:
    """Runs it in a thread that nothing waits for, not even the interpreter's end: it may hang in a collective."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where the future is read
            future.set_exception(error)

    threading.Thread(target=run, name="nccl", daemon=True).start()
    return future


class _VllmNccl:
    """NCCL as vLLM loads it, on this process's current GPU."""

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise UsageError("--weight_transport nccl: the trainer has no GPU")
        self._device = torch.device("cuda", torch.cuda.current_device())

    def unique_id(self) -> bytes:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        return bytes(NCCLLibrary().ncclGetUniqueId().internal)

    def join(self, unique_id: bytes, world_size: int) -> Group:
        import torch
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        torch.cuda.set_device(self._device)  # of this thread
        return _VllmGroup(PyNcclCommunicator.from_unique_id_bytes(unique_id, 0, world_size, self._device), self._device)


class _VllmGroup:
    def __init__(self, communicator: Any, device: torch.device) -> None:
        self._communicator, self._device = communicator, device

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> Callable[[], bool]:
        import torch

        stream = torch.cuda.current_stream(self._device)
        whole = [tensor.to(self._device).contiguous() for tensor in tensors]
        for tensor in whole:
            self._communicator.broadcast(tensor, src=0, stream=stream)
        sent: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types for it
        sent.record(stream)

        def taken() -> bool:
            # Holds the tensors until then.
            return bool(whole) and bool(sent.query())

        return taken

    def close(self) -> None:
        self._communicator.destroy()
