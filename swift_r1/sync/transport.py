"""How a bucket travels: over HTTP, through a file in shared memory on one host, from GPU to GPU by NCCL, or on one GPU
out of the trainer's memory, which the engine opens (CUDA IPC). torch would pickle the handle of that memory; here its
fields go over the wire, one by one.

By NCCL the trainer is rank 0 of a group whose id goes over HTTP under the lease: no pickle, no further port of ours.
"""

from __future__ import annotations

import base64
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from swift_r1.errors import ServerUnreachable, UsageError
from swift_r1.sync.buckets import Hash, Tensors, entries_digest
from swift_r1.wire import protocol as wire
from swift_r1.wire.client import RolloutClient

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

AUTO = "auto"
SHM = "shm"
HTTP = "http"
NCCL = "nccl"
IPC = "ipc"
MIN_BYTES_A_SECOND = 64 << 20
"""Weights that move slower than this count as stuck: half of what 1 Gbit/s carries."""
_SHARED_MEMORY = Path("/dev/shm")
_PIECE = 1 << 20
_POLL_S = 0.002
_ALIGNMENT = 256  # bytes; of each tensor's place in GPU memory


def usable_folder(folder: str | None) -> Path | None:
    """The server's folder in shared memory if this process can write there too, else None. Its name is random: no other
    host has one of that name. Nor may a server have weights written anywhere else."""
    if folder is None:
        return None
    path = Path(folder)
    if path.parent != _SHARED_MEMORY or path.is_symlink() or path.name == "..":
        return None
    # Not by permission alone: root may write there, and a server of another user could not read what root has written.
    mine = path.is_dir() and path.stat().st_uid == os.geteuid()
    return path if mine and os.access(path, os.W_OK | os.X_OK) else None


def incoming(folder: Path, index: int) -> Path:
    """Returns where bucket `index` is put; the server names it, so that no path ever comes over the wire."""
    return folder / f"incoming-{index:06d}"


def seconds_for(base_s: float, nbytes: int) -> float:
    """The longest that work on so many bytes of weights may take."""
    return base_s + nbytes / MIN_BYTES_A_SECOND


def reserve(descriptor: int, size: int) -> None:
    """Allocates `size` bytes of a file before they are written: several engines see the same free bytes of `/dev/shm`.
    Raises OSError where there is no room."""
    if size:
        os.posix_fallocate(descriptor, 0, size)


def fill(descriptor: int, parts: Sequence[memoryview]) -> str:
    """Makes the parts all that the file holds, and returns their hash (hex). Raises OSError where there is no room."""
    digest = Hash()
    reserve(descriptor, sum(map(len, parts)))
    with open(descriptor, "wb", closefd=False) as file:
        file.seek(0)
        for part in _pieces(parts):
            digest.update(part)
            file.write(part)
        file.truncate()
    return digest.hexdigest()


def write_file(path: Path, parts: Sequence[memoryview]) -> str:
    """`fill` for a file by name, which may be there already; it is removed where that fails."""
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
    """The parts for an HTTP body, in chunks that are neither huge nor tiny."""
    pending: list[memoryview] = []
    size = 0
    for part in _pieces(parts):
        pending.append(part)
        size += len(part)
        if size >= _PIECE:
            yield b"".join(pending)
            pending = []
            size = 0
    if pending:
        yield b"".join(pending)


def overlapped(items: Iterable[T], send: Callable[[int, T], str]) -> list[str]:
    """The results of `send(index, item)` for each item in order, in a thread, while the next item is being made. The
    first failure ends it."""
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


def streamed(bucket: Tensors) -> tuple[wire.StreamedTensor, ...]:
    """Describes a bucket that stays on its device."""
    return tuple(
        wire.StreamedTensor.model_validate(
            {
                "name": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": tuple(tensor.shape),
            }
        )
        for name, tensor in bucket
    )


class NcclGroup:
    """NCCL as vLLM loads it, on this process's current GPU, which is rank 0; raises UsageError without one."""

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise UsageError("--weight_transport nccl: the trainer has no GPU")
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._communicator: Any = None
        streams: Any = torch.cuda  # torch has no types for a new one
        self._stream = streams.Stream(self._device)

    def unique_id(self) -> bytes:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        return bytes(NCCLLibrary().ncclGetUniqueId().internal)

    def join(self, unique_id: bytes, world_size: int) -> None:
        """Waits for the whole group."""
        import torch
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        torch.cuda.set_device(self._device)  # of this thread
        self._communicator = PyNcclCommunicator.from_unique_id_bytes(
            unique_id, 0, world_size, self._device
        )

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> Callable[[], bool]:
        """Starts to send the tensors, in order; the result says whether all have been taken."""
        import torch

        # A stream of its own: in the one that gathers weights, the next bucket would come after this broadcast.
        stream = self._stream
        whole = [tensor.to(self._device).contiguous() for tensor in tensors]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        for tensor in whole:
            self._communicator.broadcast(tensor, src=0, stream=stream)
        sent: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types for it
        sent.record(stream)
        # Naming `whole` holds the tensors until then.
        return lambda: bool(whole) and bool(sent.query())

    def close(self) -> None:
        self._communicator.destroy()


class NcclSender:
    """Sends buckets to the workers of one server. Each is announced by HTTP, which the workers answer by receiving, and
    broadcast at the same time. A collective whose other side is gone never ends by itself: everything has a deadline,
    and after a failure the group is given up.

    Args:
        headers: of the lease.
        deadline_s: longest wait for the workers to join, and with `seconds_for` its bytes to take one bucket.
        open_group: called for each new group.
    """

    def __init__(
        self,
        client: RolloutClient,
        headers: Mapping[str, str],
        deadline_s: float = 120.0,
        open_group: Callable[[], NcclGroup] = NcclGroup,
    ) -> None:
        self._client = client
        self._headers = headers
        self._deadline_s = deadline_s
        self._open_group = open_group
        self._group: NcclGroup | None = None
        self._instance: str | None = None

    def connect(self) -> None:
        """Joins a group with the server's workers, once after each start of the server. Raises UsageError where one of
        the two has no GPU or the server several copies, ServerUnreachable where the workers did not join in time."""
        info = self._client.info()
        if self._group is not None and info.instance == self._instance:
            return
        if not info.nccl_workers:
            why = "no GPU"
            if info.copies > 1:
                why = f"{info.copies} copies of the model (--vllm_data_parallel_size), which take weights by http or shm"
            raise UsageError(
                f"--weight_transport nccl: the rollout server at {self._client.base_url} has {why}"
            )
        self.close()
        group = self._open_group()
        unique_id = group.unique_id()
        size = 1 + info.nccl_workers
        body = wire.ChannelRequest(unique_id=base64.b64encode(unique_id).decode(), world_size=size)
        asked = self._ask("/v1/weights/channel", body)
        joined = _start(lambda: group.join(unique_id, size))
        self._until(
            lambda: joined.done() and asked.done(),
            (asked, joined),
            self._deadline_s,
            "join the NCCL group",
        )
        self._group = group
        self._instance = info.instance

    def send(self, version: int, index: int, bucket: Tensors) -> str:
        """Sends one bucket; the digest is of names, dtypes and shapes, since no hash sees the bytes. Raises as the
        announcing call, and ServerUnreachable where the workers did not take it in time."""
        group = self._group
        assert group is not None
        entries = streamed(bucket)
        try:
            asked = self._ask(
                "/v1/weights/stream",
                wire.StreamedBucket(version=version, index=index, tensors=entries),
            )
            taken = group.broadcast([tensor.detach() for _, tensor in bucket])
            limit = seconds_for(self._deadline_s, sum(tensor.nbytes for _, tensor in bucket))
            self._until(
                lambda: asked.done() and taken(),
                (asked,),
                limit,
                f"take bucket {index} of version {version}",
            )
        except BaseException:
            self.close()  # the workers may wait in a collective forever
            raise
        return entries_digest(entries)

    def close(self) -> None:
        group = self._group
        self._group = None
        if group is not None:
            group.close()

    def _ask(self, path: str, body: BaseModel) -> Future[wire.UpdateStatus]:
        return self._client.loop.start(
            self._client.called("POST", path, wire.UpdateStatus, body, self._headers)
        )

    def _until(
        self, done: Callable[[], bool], futures: Sequence[Future[Any]], limit_s: float, what: str
    ) -> None:
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
    """Runs it in a daemon thread, since it may hang in a collective."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where the future is read
            future.set_exception(error)

    threading.Thread(target=run, name="nccl", daemon=True).start()
    return future


def gpu_id(device: torch.device | int) -> str:
    """Returns the id of a GPU, the same in every process of the host."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def own_gpu() -> str | None:
    """Returns the id of this process's current GPU."""
    import torch

    return gpu_id(torch.cuda.current_device()) if torch.cuda.is_available() else None


def packed(bucket: Tensors) -> torch.Tensor:
    """A copy of the bucket as one block of bytes, on its device."""
    import torch

    kinds = [(tensor.dtype, tensor.shape) for _, tensor in bucket]
    block = torch.empty(sum(map(_room, kinds)), dtype=torch.uint8, device=bucket[0][1].device)
    for place, (_, tensor) in zip(tensors_in(block, kinds), bucket, strict=True):
        place.copy_(tensor.detach())
    return block


def tensors_in(
    block: torch.Tensor, kinds: Iterable[tuple[torch.dtype, Sequence[int]]]
) -> Iterator[torch.Tensor]:
    """The tensors of these dtypes and shapes that `packed` has put there; views. Raises RuntimeError where the block
    is too small."""
    start = 0
    for kind in kinds:
        dtype, shape = kind
        yield block[start : start + prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
        start += _room(kind)


def _room(kind: tuple[torch.dtype, Sequence[int]]) -> int:
    dtype, shape = kind
    return -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def shared(block: torch.Tensor) -> wire.DeviceMemory:
    """Returns what another process opens it by, once all that was to write to it has; it must live on until that is
    done."""
    import torch

    torch.cuda.current_stream(block.device).synchronize()
    storage: Any = block.untyped_storage()
    _, handle, size, offset, counter, counter_offset, event, waits = storage._share_cuda_()
    return wire.DeviceMemory(
        gpu=gpu_id(block.device),
        handle=base64.b64encode(handle).decode(),
        size=size,
        offset=offset,
        counter=counter.decode(),
        counter_offset=counter_offset,
        event=base64.b64encode(event).decode(),
        waits=waits,
    )


def opened(memory: wire.DeviceMemory) -> torch.Tensor:
    """Another process's block. Raises RuntimeError where this one does not see that GPU, or CUDA does not open it."""
    import torch

    found = [index for index in range(torch.cuda.device_count()) if gpu_id(index) == memory.gpu]
    if not found:
        raise RuntimeError(f"the weights are on GPU {memory.gpu}, which this process does not see")
    handle = base64.b64decode(memory.handle)
    event = base64.b64decode(memory.event)
    counter = memory.counter.encode(), memory.counter_offset
    kind: Any = torch.UntypedStorage
    storage = kind._new_shared_cuda(
        found[0], handle, memory.size, memory.offset, *counter, event, memory.waits
    )
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
