"""Weights from GPU to GPU: the trainer's end of vLLM's NCCL weight transfer, opened and driven over our own wire.

Both ends join one NCCL group, the trainer as rank 0 and the engine's workers after it. The group's id is made here and
goes over HTTP under the lease, so nothing is pickled and no further port is opened by us. Each bucket is announced by
HTTP, which the workers answer by receiving, and broadcast at the same time. A collective whose other side is gone never
ends by itself: everything here has a deadline, and after a failure the group is given up and made anew.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from swift_r1.errors import ServerUnreachable, UsageError
from swift_r1.weights.hashing import entries_digest
from swift_r1.weights.transport import seconds_for
from swift_r1.wire import protocol as wire

if TYPE_CHECKING:
    import torch

    from swift_r1.sampling.pool.client import RolloutClient

_POLL_S = 0.002


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
        nccl: made at the first use.
    """

    def __init__(
        self,
        client: RolloutClient,
        headers: dict[str, str],
        deadline_s: float,
        nccl: Callable[[], Nccl] | None = None,
    ) -> None:
        self._client, self._headers, self._deadline_s = client, headers, deadline_s
        self._make_nccl = nccl or _VllmNccl
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
        nccl = self._make_nccl()
        unique_id, size = nccl.unique_id(), 1 + info.nccl_workers
        body = wire.ChannelRequest(unique_id=base64.b64encode(unique_id).decode(), world_size=size)
        asked = _start(self._client.call, "POST", "/v1/weights/channel", wire.UpdateStatus, body, self._headers)
        joined = _start(nccl.join, unique_id, size)
        self._until(lambda: joined.done() and asked.done(), (asked, joined), self._deadline_s, "join the NCCL group")
        self._group, self._instance = joined.result(), info.instance

    def send(self, version: int, index: int, bucket: Sequence[tuple[str, torch.Tensor]]) -> str:
        """Sends one bucket; the digest is of names, dtypes and shapes, since the bytes never pass a hash on their way.

        Raises:
            ServerRefused: the server's answer to the announcement.
            ServerUnreachable: no answer, or the workers did not take it in time.
        """
        group = self._group
        assert group is not None
        entries = tuple(
            wire.StreamedTensor(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
            for name, tensor in bucket
        )
        body = wire.StreamedBucket(version=version, index=index, tensors=entries)
        try:
            asked = _start(self._client.call, "POST", "/v1/weights/stream", wire.UpdateStatus, body, self._headers)
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


def _start(work: Callable[..., Any], *args: Any) -> Future[Any]:
    """Runs it in a thread that nothing waits for, not even the interpreter's end: it may hang in a collective."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work(*args))
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
        sent = torch.cuda.Event()
        sent.record(stream)

        def taken() -> bool:
            # Holds the tensors until then.
            return bool(whole) and sent.query()

        return taken

    def close(self) -> None:
        self._communicator.destroy()
