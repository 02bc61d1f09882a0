"""The one writer of a server's weights: the lease that makes it so, and the push of a version under it."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel

from swift_r1.errors import RunFailed, ServerUnreachable, SwiftError, UsageError
from swift_r1.weights.hashing import content_hash, parts_digest
from swift_r1.weights.nccl import Nccl, NcclSender
from swift_r1.weights.snapshot import Prepared
from swift_r1.weights.transport import (
    AUTO,
    HTTP,
    NCCL,
    SHM,
    chunks_of,
    incoming,
    overlapped,
    seconds_for,
    usable_folder,
    write_file,
)
from swift_r1.wire import protocol as wire
from swift_r1.wire.http_errors import NOT_NOW, ServerRefused

if TYPE_CHECKING:
    import torch

    from swift_r1.sampling.pool.client import RolloutClient

logger = logging.getLogger("swift_r1.sampling.pool.client")

LEASE_TTL_S = 30.0
_RENEWALS_PER_TTL = 5
QUICK_S = 30.0
"""For what a server answers at once, also a busy one."""
WORK_S = 600.0
"""For what takes it long, whatever the model's size (see `seconds_for`)."""
_NO_SUCH_BASE = (409, 413, 422)
"""How a server refuses a change to what it does not hold (any more), or whose outcome is not what was promised."""
_POLL_S = 0.5
_REPORT_EVERY_S = 5.0


Answer = TypeVar("Answer", bound=BaseModel)
Bucket = Sequence[tuple[str, "torch.Tensor"]] | Prepared


class WeightWriter:
    """Holds the lease on a server's weights and pushes versions.

    Attributes:
        transport: how the last version went, None before the first one.
        sent_bytes: of all buckets so far.

    Args:
        owner: shown to others who want the lease; default `host:pid`.
        ttl_s: seconds of silence after which the server takes the lease back.
        token: of a lease that an earlier process of this run may still have, at least 32 hexadecimal digits.
        nccl_deadline_s, nccl: see `NcclSender`.
        policy: what updates do with running rollouts; None leaves that to the server.
    """

    def __init__(
        self,
        client: RolloutClient,
        owner: str | None = None,
        ttl_s: float = LEASE_TTL_S,
        token: str | None = None,
        nccl_deadline_s: float = 120.0,
        nccl: Callable[[], Nccl] | None = None,
        policy: wire.UpdatePolicy | None = None,
    ) -> None:
        self.client = client
        self.token = token or secrets.token_hex(16)
        self._request = wire.LeaseRequest(
            owner=owner or f"{socket.gethostname()}:{os.getpid()}", ttl_seconds=ttl_s, token=self.token
        )
        self._policy = policy
        self.transport: str | None = None
        self.sent_bytes = 0
        self._nccl = NcclSender(client, self._headers, nccl_deadline_s, nccl)
        self._closed = threading.Event()
        self._renewals: threading.Thread | None = None

    def __enter__(self) -> WeightWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self) -> None:
        """Takes the lease, or renews it.

        Raises:
            ServerRefused: 409 with the owner's name while another writes.
            ServerUnreachable: no answer.
        """
        self.client.call("POST", "/v1/weights/lease", wire.Lease, self._request, timeout_s=QUICK_S)

    def hold(self, wait_s: float, report: Callable[[str], None] = logger.info) -> None:
        """Takes the lease as `take_when_free` does, and renews it in a thread until `close`. What the client generates
        is under it from now on."""
        self.take_when_free(wait_s, report)
        self.client.lease = self.token
        self._renewals = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._renewals.start()

    def take_when_free(self, wait_s: float, report: Callable[[str], None] = logger.info) -> None:
        """Takes the lease. A trainer that died may have left one: its end is waited for, at most `wait_s` seconds.

        Raises:
            UsageError: another trainer writes to this server.
            ServerRefused, ServerUnreachable: as `take`, after `wait_s` seconds.
        """
        began = next_report = time.monotonic()
        ends = None
        while True:
            try:
                self.take()
                return
            except (ServerRefused, ServerUnreachable) as refused:
                now = time.monotonic()
                left = refused.retry_after if isinstance(refused, ServerRefused) and refused.status == 409 else None
                if left is not None:
                    ends = ends or now + left
                    # Renewed meanwhile, by more than rounding and the way here: its owner lives.
                    if now + left > ends + 2.0 or now > began + wait_s:
                        raise UsageError(f"{refused}; stop that trainer, or start another `swift rollout`") from None
                elif not _comes_back(refused) or now > began + wait_s:
                    raise
                if now >= next_report:
                    why = "in case its owner is dead, waiting for the end of a lease" if left else "waiting for a lease"
                    report(f"{why}: {refused}")
                    next_report = now + _REPORT_EVERY_S
                time.sleep(_POLL_S)

    def close(self) -> None:
        """Gives the lease back, so that the next trainer need not wait. Best effort: it expires by itself too."""
        self._closed.set()
        if self._renewals is not None:
            self._renewals.join(QUICK_S)
        self._nccl.close()
        try:
            self.client.call("DELETE", "/v1/weights/lease", wire.UpdateStatus, None, self._headers, QUICK_S)
        except SwiftError as error:
            logger.info("the lease on the rollout server's weights was not given back: %s", error)

    def push(
        self,
        version: int,
        buckets: Iterable[Bucket],
        transport: str = AUTO,
        adapter: wire.AdapterConfig | None = None,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> wire.UpdateStatus:
        """Sends a whole version of the weights; returns once the server serves it.

        A bucket is sent while the next one is taken from `buckets`. Those that have a change to what the server holds
        go as that by HTTP; where the server does not take it so, all are sent whole.

        Args:
            version: higher than the served one.
            buckets: named tensors (Hugging Face state-dict names, a tied head left out), taken one at a time; they
                must not change before this returns. After a failure none is taken. With changes they can be gone
                through again.
            transport: `http`, `shm`, `nccl`, or `auto`: through shared memory if the server is on this host.
            adapter: of `buckets` that hold a LoRA adapter alone, under peft's names.
            while_waiting: called now and then while running completions are waited for; all `buckets` are taken then.

        Raises:
            ServerRefused: if the server refused; it then serves the old version, or says that it is not ready.
            ServerUnreachable: if the connection broke.
        """
        push = _Push(version, transport, adapter, while_waiting)
        try:
            return self._push(push, buckets)
        except ServerRefused as refused:
            if not push.changes or refused.status not in _NO_SUCH_BASE:
                raise
            logger.warning("%s: sending all weights", refused)
            return self._push(_Push(version, transport, adapter, while_waiting, whole=True), buckets)

    def sleep(self, level: int) -> None:
        """Has the server's engine give its memory back; a push wakes its weights, `wake` all of it.

        Raises as `push` does.
        """
        self.take()
        body = wire.SleepRequest.model_validate({"level": level})
        self._once_drained("/v1/sleep", wire.SleepStatus, body)

    def wake(self) -> None:
        """Wakes the server's engine where it sleeps; raises as `push` does."""
        self.take()
        self.client.call("POST", "/v1/wake", wire.SleepStatus, None, self._headers)

    def _push(self, push: _Push, buckets: Iterable[Bucket]) -> wire.UpdateStatus:
        call = self.client.call
        # A server that was started anew, or did not hear of this process for long, knows of no lease.
        self.take()
        try:
            begin = wire.UpdateBegin(version=push.version, adapter=push.adapter)
            if push.transport == NCCL:
                self._nccl.connect()
            begun = call("POST", "/v1/weights/begin", wire.UpdateStatus, begin, self._headers)
            digests = overlapped(buckets, self._sender(push, begun))
            commit = wire.UpdateCommit(
                version=push.version, buckets=len(digests), content_hash=content_hash(digests), policy=self._policy
            )
            limit = seconds_for(WORK_S, push.bytes)
            return self._once_drained("/v1/weights/commit", wire.UpdateStatus, commit, push.while_waiting, limit)
        except BaseException:
            self._call_off(push.version)
            raise

    def _once_drained(
        self,
        path: str,
        answer: type[Answer],
        body: BaseModel,
        while_waiting: Callable[[], None] = lambda: None,
        limit_s: float = WORK_S,
    ) -> Answer:
        """Asks again for as long as completions are under way, which is no fault."""
        while True:
            try:
                return self.client.call("POST", path, answer, body, self._headers, limit_s)
            except ServerRefused as refused:
                if refused.status != NOT_NOW:
                    raise
                self.client.info()  # a server that does not serve at all says so
                logger.info("%s; asking again", refused)
                while_waiting()
                time.sleep(_POLL_S)  # the server has waited already

    def _sender(self, push: _Push, begun: wire.UpdateStatus) -> Callable[[int, Bucket], str]:
        """A function that sends one bucket and returns its digest."""
        from swift_r1.weights.push import parts_of

        call, headers, version, transport = self.client.call, self._headers, push.version, push.transport
        shared = usable_folder(begun.folder) if transport in (AUTO, SHM) else None
        if transport == SHM and shared is None:
            raise RunFailed(
                f"--weight_transport shm: the rollout server at {self.client.base_url} is on another host, runs as "
                "another user, or has too little shared memory; use http"
            )
        chosen = SHM if shared is not None else NCCL if transport == NCCL else HTTP
        if chosen != self.transport:
            self.transport = chosen
            logger.info("weights go to the rollout server by %s", chosen)

        def sent(nbytes: int) -> float:
            """Counts a bucket; the longest that it may take."""
            self.sent_bytes += nbytes
            push.bytes += nbytes
            return seconds_for(WORK_S, nbytes)

        def by_file(index: int, bucket: Bucket) -> str:
            assert shared is not None
            if push.overflows:
                return by_http(index, bucket)
            parts = bucket.parts if isinstance(bucket, Prepared) else parts_of(bucket)
            try:
                digest = write_file(incoming(shared, index), parts)
            except OSError as error:
                logger.warning(
                    "bucket %d of weight version %d cannot be written to %s, the rollout server's shared memory (%s): "
                    "the rest of this version goes by http",
                    *(index, version, shared, error.strerror),
                )
                push.overflows = True
                return by_http(index, bucket)
            body = wire.BucketFile(version=version, index=index, digest=digest)
            call("POST", "/v1/weights/file", wire.UpdateStatus, body, headers, sent(_size(parts)))
            return digest

        def by_http(index: int, bucket: Bucket) -> str:
            about = {wire.VERSION_HEADER: str(version), wire.BUCKET_HEADER: str(index)}
            if isinstance(bucket, Prepared):
                parts, digest = bucket.parts, bucket.digest
                if not push.whole and bucket.change is not None and bucket.base == begun.base:
                    parts, push.changes = (memoryview(bucket.change),), True
                    about[wire.BASE_HEADER] = str(bucket.base)
            else:
                parts = tuple(parts_of(bucket))
                digest = parts_digest(parts)
            about |= {wire.DIGEST_HEADER: digest, "Content-Length": str(_size(parts))}
            call("PUT", "/v1/weights/bucket", wire.UpdateStatus, chunks_of(parts), headers | about, sent(_size(parts)))
            return digest

        def by_nccl(index: int, bucket: Bucket) -> str:
            assert not isinstance(bucket, Prepared)
            sent(sum(tensor.nbytes for _, tensor in bucket))
            return self._nccl.send(version, index, bucket)

        return {SHM: by_file, HTTP: by_http, NCCL: by_nccl}[chosen]

    def _call_off(self, version: int) -> None:
        """Best effort: without it the server waits for the update's time to be over."""
        try:
            abort = wire.UpdateAbort(version=version)
            self.client.call("POST", "/v1/weights/abort", wire.UpdateStatus, abort, self._headers, QUICK_S)
        except SwiftError as error:
            logger.warning("the update to weight version %d could not be called off: %s", version, error)

    @property
    def _headers(self) -> dict[str, str]:
        return {wire.LEASE_HEADER: self.token}

    def _renew(self) -> None:
        """Until closed. A loss is told once: the next push takes the lease again, or says who has it now."""
        told = False
        while not self._closed.wait(self._request.ttl_seconds / _RENEWALS_PER_TTL):
            try:
                self.take()
                told = False
            except SwiftError as error:
                if not told:
                    logger.info("the lease on the rollout server's weights could not be renewed: %s", error)
                told = True


@dataclass(slots=True)
class _Push:
    """One attempt at a version. `whole`: nothing goes as a change; `changes`: something did; `overflows`: shared memory
    was full; `bytes` sent so far."""

    version: int
    transport: str
    adapter: wire.AdapterConfig | None
    while_waiting: Callable[[], None]
    whole: bool = False
    changes: bool = False
    overflows: bool = False
    bytes: int = 0


def _size(parts: Sequence[memoryview]) -> int:
    return sum(len(part) for part in parts)


def _comes_back(error: ServerRefused | ServerUnreachable) -> bool:
    return isinstance(error, ServerUnreachable) or error.status == NOT_NOW
