"""The one writer of a server's weights: the lease that makes it so, and the push of a version under it.

Rank 0 sends a version to a few servers, and each of those passes it on to a few others, bucket by bucket. With N
servers, a fan-out of F and B buckets rank 0 sends F times the weights instead of N times, and the last server has them
after about F * (B + log_F N) times a bucket's time on the network instead of N * B.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from swift_r1.errors import RunFailed, ServerUnreachable, SwiftError, UsageError
from swift_r1.sync.buckets import Tensors, content_hash, entries_digest, parts_of
from swift_r1.sync.snapshot import SnapshotBucket, SnapshotReader, Superseded
from swift_r1.sync.transport import (
    AUTO,
    HTTP,
    IPC,
    NCCL,
    SHM,
    NcclSender,
    chunks_of,
    incoming,
    overlapped,
    packed,
    seconds_for,
    shared,
    streamed,
    usable_folder,
    write_file,
)
from swift_r1.wire import protocol as wire
from swift_r1.wire.client import QUICK_S, WORK_S, Answer, RolloutClient
from swift_r1.wire.protocol import NOT_NOW, ServerRefused

logger = logging.getLogger(__name__)

LEASE_TTL_S = 30.0
_NO_SUCH_BASE = (409, 413, 422)  # how a server refuses a change to what it does not hold
_POLL_S = 0.5
_REPORT_EVERY_S = 5.0
_TOKEN_FILE = ".lease"
_NOT_PASSED_ON = 502
_RENEWAL_S = 10.0
# without an answer: the server that is to pass weights on is silent
_RELAY_S = wire.RELAY_ANSWER_S + QUICK_S
_RENEWALS_PER_TTL = 5
_LONGEST_TTL_S = 200.0
_RENEWALS_A_SECOND = 25
_LOOK_S = 2.0
_AUTO_FANOUT = 2
_AUTO_FROM = 5

Bucket = Tensors | SnapshotBucket


def saved_token(run_dir: Path | None) -> str | None:
    """The token of the lease that a run held when it was killed: a resumed run need not wait for its own lease."""
    if run_dir is None:
        return None
    path = run_dir / _TOKEN_FILE
    if not path.is_file():
        return None
    token = path.read_text(encoding="ascii", errors="replace").strip()
    return token if re.fullmatch("[0-9a-f]{32}", token) else None


def save_token(run_dir: Path, token: str) -> None:
    """Keeps a token for `saved_token`; only the run's user can read it."""
    path = run_dir / _TOKEN_FILE
    path.unlink(missing_ok=True)
    with open(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii"
    ) as file:
        file.write(token)


def fanout_of(asked: int | None, servers: int) -> int:
    """Returns to how many of so many servers over the network rank 0 sends weights, as `--weight_fanout` asks: 0 is to
    all, None chooses."""
    if asked is None:
        return _AUTO_FANOUT if servers >= _AUTO_FROM else 0
    return asked if asked < servers else 0


def parent_of(index: int, fanout: int) -> int | None:
    """Returns whose weights the server at `index` gets, None for rank 0's: the tree is filled level by level."""
    return index // fanout - 1 if index >= fanout else None


@dataclass(eq=False)
class Link:
    """A server's place in the tree, for one push: whom the weights come from, None for rank 0, and to how many it
    passes them on. `is_wanted` says whether its push goes on."""

    client: RolloutClient
    token: str
    is_wanted: Callable[[], bool] = lambda: True
    parent: Link | None = None
    children: int = 0
    _told: threading.Event = field(default_factory=threading.Event)
    _open: bool = False

    def tell(self, is_open: bool) -> None:
        """Whether the server takes this version; the first word counts."""
        if not self._told.is_set():
            self._open = is_open
            self._told.set()

    def wait_until_open(self) -> bool:
        """Waits until the server takes this version, or is known not to."""
        while not self._told.wait(_LOOK_S):
            if not self.is_wanted():
                return False
        return self._open


def joined(links: Sequence[Link], fanout: int) -> Iterator[Link]:
    """Makes a tree of them; yields them."""
    for index, link in enumerate(links):
        above = parent_of(index, fanout) if fanout else None
        if above is not None:
            link.parent = links[above]
            links[above].children += 1
    yield from links


class WeightWriter:
    """Holds the lease on a server's weights and pushes versions.

    Args:
        owner: shown to others who want the lease; default `host:pid`.
        ttl_s: seconds of silence after which the server takes the lease back.
        token: of a lease that an earlier process of this run may still hold, at least 32 hexadecimal digits.
        policy: what updates do with running rollouts; None leaves that to the server.
    """

    def __init__(
        self,
        client: RolloutClient,
        owner: str | None = None,
        ttl_s: float = LEASE_TTL_S,
        token: str | None = None,
        policy: wire.UpdatePolicy | None = None,
    ) -> None:
        self.client = client
        self.token = token or secrets.token_hex(16)
        self.headers = {wire.LEASE_HEADER: self.token}
        self._owner = owner or f"{socket.gethostname()}:{os.getpid()}"
        self._ttl_s = ttl_s
        self.policy = policy
        self.transport: str | None = None  # of the last version
        self.sent_bytes = 0  # of all buckets from here, also those through shared memory
        # Whether other servers reach this one, as far as is known.
        self.takes_relays = re.match(wire.RELAY_URL, client.base_url) is not None
        self.nccl = NcclSender(client, self.headers)
        self._closed = False
        self._ending = asyncio.Event()
        self._renewing: Future[None] | None = None

    def __enter__(self) -> WeightWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self) -> None:
        """Takes the lease, or renews it. Raises ServerRefused (409) with the owner's name while another writes."""
        self.client.loop.run(self._take(QUICK_S))

    async def _take(self, timeout_s: float) -> None:
        request = wire.LeaseRequest(
            owner=self._owner, ttl_seconds=self._time_to_live_s(), token=self.token
        )
        await self.client.called(
            "POST", "/v1/weights/lease", wire.Lease, request, timeout_s=timeout_s
        )

    def _time_to_live_s(self) -> float:
        """Returns the seconds for which the lease is taken: longer where there are many, so that renewals stay rare."""
        many_s = self.client.loop.users * _RENEWALS_PER_TTL / _RENEWALS_A_SECOND
        return max(self._ttl_s, min(_LONGEST_TTL_S, many_s))

    def hold(self, wait_s: float, report: Callable[[str], None] = logger.info) -> None:
        """Takes the lease as `take_when_free`, and renews it until `close`. What the client generates belongs to it
        from now on."""
        self.take_when_free(wait_s, report)
        self.client.lease = self.token
        self._renewing = self.client.loop.start(self._renew())

    def take_when_free(self, wait_s: float, report: Callable[[str], None] = logger.info) -> None:
        """Takes the lease; waits at most `wait_s` seconds for the end of one that a dead trainer has left. Raises as
        `take` then, and UsageError where another trainer writes to this server."""
        began = next_report = time.monotonic()
        ends = None
        while True:
            try:
                self.take()
                return
            except (ServerRefused, ServerUnreachable) as refused:
                now = time.monotonic()
                left = (
                    refused.retry_after
                    if isinstance(refused, ServerRefused) and refused.status == 409
                    else None
                )
                if left is not None:
                    ends = ends or now + left
                    # Renewed meanwhile, by more than rounding and the way here: its owner lives.
                    if now + left > ends + 2.0 or now > began + wait_s:
                        raise UsageError(
                            f"{refused}; stop that trainer, or start another `swift rollout`"
                        ) from None
                elif now > began + wait_s or (
                    isinstance(refused, ServerRefused) and refused.status != NOT_NOW
                ):
                    raise
                if now >= next_report:
                    why = (
                        "in case its owner is dead, waiting for the end of a lease"
                        if left
                        else "waiting for a lease"
                    )
                    report(f"{why}: {refused}")
                    next_report = now + _REPORT_EVERY_S
                time.sleep(_POLL_S)

    def close(self) -> None:
        """Gives the lease back. Best effort: it expires by itself too."""
        if self._closed:
            return
        self._closed = True
        if self._renewing is not None:
            self.client.loop.run(self._end_renewals())
        self.nccl.close()
        try:
            self.client.call(
                "DELETE", "/v1/weights/lease", wire.UpdateStatus, None, self.headers, QUICK_S
            )
        except SwiftError as error:
            logger.info("the lease on the rollout server's weights was not given back: %s", error)

    def push(
        self,
        version: int,
        buckets: Iterable[Bucket],
        transport: str = AUTO,
        adapter: wire.AdapterConfig | None = None,
        link: Link | None = None,
    ) -> wire.UpdateStatus:
        """Sends a whole version of the weights; returns once the server serves it.

        Buckets that have a change to what the server holds go as that by HTTP; where the server refuses it, all are
        sent whole.

        Args:
            version: higher than the served one.
            buckets: named tensors (Hugging Face state-dict names, a tied head left out), or those of a snapshot, which
                can be iterated again. One is sent while the next is taken; they must not change before this returns.
            transport: `http`, `shm`, `nccl`, `ipc` (out of the memory of a GPU that the engine sees too), or `auto`:
                through shared memory if the server is on this host.
            adapter: of `buckets` that hold a LoRA adapter alone, under peft's names.
            link: the server's place in a tree, see there. What does not come from its parent is sent from here.

        Raises:
            ServerRefused: the server then serves the old version, or says that it is not ready.
            ServerUnreachable: the connection broke.
        """
        link = link or Link(self.client, self.token)
        delivery = _Delivery(self.client, version, link, link.parent)
        try:
            return self._send_all(delivery, buckets, transport, adapter)
        except ServerRefused as refused:
            return self._send_all(delivery.whole_instead(refused), buckets, transport, adapter)
        finally:
            link.tell(False)

    def sleep(self, level: int) -> None:
        """Has the server's engine give its memory back; a push wakes its weights, `wake` all of it. Raises as
        `push`."""
        self.take()
        self._once_drained(
            "/v1/sleep", wire.SleepStatus, wire.SleepRequest.model_validate({"level": level})
        )

    def wake(self) -> None:
        """Wakes the server's engine where it sleeps; raises as `push`."""
        self.take()
        self.client.call("POST", "/v1/wake", wire.SleepStatus, None, self.headers)

    def _send_all(
        self,
        delivery: _Delivery,
        buckets: Iterable[Bucket],
        transport: str,
        adapter: wire.AdapterConfig | None,
    ) -> wire.UpdateStatus:
        # A server that was started again, or did not hear of this process for long, knows of no lease.
        self.take()
        try:
            if transport == NCCL:
                self.nccl.connect()
            begin = wire.UpdateBegin(
                version=delivery.version, adapter=adapter, relays=delivery.link.children
            )
            begun = self.client.call(
                "POST", "/v1/weights/begin", wire.UpdateStatus, begin, self.headers
            )
            delivery.link.tell(True)
            delivery.base = begun.base
            delivery.folder = usable_folder(begun.folder) if transport in (AUTO, SHM) else None
            if transport == SHM and delivery.folder is None:
                raise RunFailed(
                    f"--weight_transport shm: the rollout server at {self.client.base_url} is on another host, runs as "
                    "another user, or has too little shared memory; use http"
                )
            chosen = (
                transport if transport in (NCCL, IPC) else HTTP if delivery.folder is None else SHM
            )
            if chosen != self.transport:
                self.transport = chosen
                logger.info(
                    "weights go to the rollout server at %s by %s", self.client.base_url, chosen
                )
            if isinstance(buckets, SnapshotReader):  # it has the next one while this one is sent
                digests = [
                    self._send(delivery, index, bucket) for index, bucket in enumerate(buckets)
                ]
            else:
                digests = overlapped(
                    buckets, lambda index, bucket: self._send(delivery, index, bucket)
                )
            commit = wire.UpdateCommit(
                version=delivery.version,
                buckets=len(digests),
                content_hash=content_hash(digests),
                policy=self.policy,
            )
            limit = seconds_for(WORK_S, delivery.bytes)
            committed = self._once_drained("/v1/weights/commit", wire.UpdateStatus, commit, limit)
            if delivery.unreached:
                logger.warning("from now on weights go straight to %s", self.client.base_url)
                self.takes_relays = False
            return committed
        except BaseException:
            self._abort(delivery.version)
            raise

    def _send(self, delivery: _Delivery, index: int, bucket: Bucket) -> str:
        """Sends one bucket; returns its digest."""
        if self.transport == NCCL:
            assert not isinstance(bucket, SnapshotBucket)
            self._sent(delivery, sum(tensor.nbytes for _, tensor in bucket))
            return self.nccl.send(delivery.version, index, bucket)
        if self.transport == IPC:
            assert not isinstance(bucket, SnapshotBucket)
            return self._lend(delivery, index, bucket)
        if not isinstance(bucket, SnapshotBucket):
            bucket = SnapshotBucket.of(parts_of(bucket))
        if delivery.parent is not None and delivery.folder is None:
            self._wait_for_parent(delivery, delivery.parent)
        if index < delivery.arrived:
            delivery.bytes += bucket.size
            return bucket.digest
        if delivery.folder is not None and self._put_file(delivery, index, bucket):
            body = wire.BucketFile(version=delivery.version, index=index, digest=bucket.digest)
            limit = self._sent(delivery, bucket.size)
            self.client.call(
                "POST", "/v1/weights/file", wire.UpdateStatus, body, self.headers, limit
            )
            return bucket.digest
        parts = bucket.parts()
        headers = self.headers | {
            wire.VERSION_HEADER: str(delivery.version),
            wire.BUCKET_HEADER: str(index),
        }
        if bucket.change is not None and bucket.base == delivery.base and not delivery.whole:
            parts = [memoryview(bucket.change)]
            delivery.changes = True
            headers[wire.BASE_HEADER] = str(bucket.base)
        size = sum(map(len, parts))
        headers |= {wire.DIGEST_HEADER: bucket.digest, "Content-Length": str(size)}
        limit = self._sent(delivery, size)
        self.client.call(
            "PUT", "/v1/weights/bucket", wire.UpdateStatus, chunks_of(parts), headers, limit
        )
        return bucket.digest

    def _wait_for_parent(self, delivery: _Delivery, parent: Link) -> None:
        """Until the server has all buckets from its parent, or no more come from there: then the update goes on from
        here, so that the servers below this one notice nothing. Raises Superseded where the push is not wanted any
        more."""
        ask = wire.RelayRequest(
            version=delivery.version, url=self.client.base_url, lease=self.token, base=delivery.base
        )
        headers = {wire.LEASE_HEADER: parent.token}
        try:
            if not parent.wait_until_open():
                raise ServerUnreachable(f"{parent.client.base_url} does not take this version")
            while not parent.client.call(
                "POST", "/v1/weights/relay", wire.RelayStatus, ask, headers, _RELAY_S
            ).whole:
                if not delivery.link.is_wanted():
                    raise Superseded
            delivery.parent = None
            delivery.arrived = sys.maxsize
        except (ServerUnreachable, ServerRefused) as error:
            delivery.straight_instead(error)

    def _lend(self, delivery: _Delivery, index: int, bucket: Tensors) -> str:
        """Has the engine load the bucket out of this process's GPU memory."""
        block = packed(bucket)
        entries = streamed(bucket)
        limit = self._sent(delivery, block.nbytes)
        body = wire.StreamedBucket(
            version=delivery.version, index=index, tensors=entries, memory=shared(block)
        )
        self._once_drained("/v1/weights/stream", wire.UpdateStatus, body, limit)
        del block  # until here: the engine has read it
        return entries_digest(entries)

    def _put_file(self, delivery: _Delivery, index: int, bucket: SnapshotBucket) -> bool:
        """Whether the bucket could be put into the server's folder; after a failure the rest goes by HTTP."""
        assert delivery.folder is not None
        path = incoming(delivery.folder, index)
        try:
            if not bucket.link(path):
                write_file(path, bucket.parts())
        except OSError as error:
            delivery.http_instead(index, error)
        return delivery.folder is not None

    def _sent(self, delivery: _Delivery, nbytes: int) -> float:
        """Counts a bucket; the longest that sending it may take."""
        self.sent_bytes += nbytes
        delivery.bytes += nbytes
        return seconds_for(WORK_S, nbytes)

    def _once_drained(
        self, path: str, answer: type[Answer], body: BaseModel, limit_s: float = WORK_S
    ) -> Answer:
        """Asks again for as long as completions are under way."""
        while True:
            try:
                return self.client.call("POST", path, answer, body, self.headers, limit_s)
            except ServerRefused as refused:
                if refused.status != NOT_NOW:
                    raise
                self.client.info()  # a server that does not serve at all says so
                logger.info("%s; asking again", refused)
                time.sleep(_POLL_S)  # the server has waited already

    def _abort(self, version: int) -> None:
        """Best effort: without it the server waits until the update times out."""
        try:
            body = wire.UpdateAbort(version=version)
            self.client.call(
                "POST", "/v1/weights/abort", wire.UpdateStatus, body, self.headers, QUICK_S
            )
        except SwiftError as error:
            logger.warning(
                "the update to weight version %d could not be aborted: %s", version, error
            )

    async def _renew(self) -> None:
        """Renews the lease five times in its time to live. A loss is logged once: the next push takes the lease again,
        or says who has it."""
        lost = False
        while not self._ending.is_set():
            after = self._time_to_live_s() / _RENEWALS_PER_TTL * (2 if lost else 1)
            with suppress(TimeoutError):
                async with asyncio.timeout(after):
                    await self._ending.wait()
                return
            try:
                await self._take(_RENEWAL_S)
                lost = False
            except Exception as error:
                if not lost:
                    text = "the lease on the rollout server's weights could not be renewed: %s"
                    logger.info(text, error, exc_info=not isinstance(error, SwiftError))
                lost = True

    async def _end_renewals(self) -> None:
        """Also waits for a renewal that is under way: it would take the lease again after it was given back."""
        assert self._renewing is not None
        self._ending.set()
        await asyncio.wait([asyncio.wrap_future(self._renewing)], timeout=QUICK_S)


@dataclass(slots=True)
class _Delivery:
    """One attempt at a version. Where a way of its buckets fails, they go another one, which is decided here alone:

        from the parent --it refuses, or is silent--> straight from rank 0, behind the buckets that came
        as files in shared memory --they cannot be written--> by HTTP, this bucket and those behind it
        as changes --the server does not hold their base--> whole, all of them once more

    Any other failure ends the attempt; `rollout/pool/health.py` has what follows for the server.
    """

    client: RolloutClient
    version: int
    link: Link
    parent: Link | None = None  # passes buckets on to this server; None once it has ended
    whole: bool = False  # nothing goes as a change
    changes: bool = False  # something went as a change
    base: str | None = None  # content hash of what changes may be to
    folder: Path | None = None  # the server's, in shared memory; None for HTTP
    bytes: int = 0  # that are there so far
    unreached: bool = False  # the parent did not reach this server
    arrived: int = 0  # buckets that came from the parent

    def straight_instead(self, error: ServerRefused | ServerUnreachable) -> None:
        """Goes on without the parent. Raises Superseded where the push is not wanted any more."""
        if not self.link.is_wanted():
            raise Superseded from error
        here = self.client.base_url
        logger.warning(
            "the rest of weight version %d goes straight to %s: %s", self.version, here, error
        )
        self.parent = None
        self.unreached = isinstance(error, ServerRefused) and error.status == _NOT_PASSED_ON
        update = self.client.call("GET", "/v1/weights/update", wire.UpdateStatus, timeout_s=QUICK_S)
        self.arrived = update.buckets

    def http_instead(self, index: int, error: OSError) -> None:
        """Goes on without shared memory."""
        logger.warning(
            "bucket %d of weight version %d cannot be written to %s, the rollout server's shared memory (%s): "
            "the rest of this version goes by http",
            *(index, self.version, self.folder, error.strerror),
        )
        self.folder = None

    def whole_instead(self, refused: ServerRefused) -> _Delivery:
        """Begins again without changes. Raises the refusal where it is not of a change."""
        if not self.changes or refused.status not in _NO_SUCH_BASE:
            raise refused
        logger.warning("%s: sending all weights", refused)
        return _Delivery(self.client, self.version, self.link, whole=True)
