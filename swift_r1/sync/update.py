"""The weight update as a state machine, without HTTP, engine and clock.

    idle --lease--> leased --begin--> open --bucket*--> open --commit--> loading --loaded--> leased (version N+1)
                                        |                                  `------failed--> leased (broken)
                                        |--abort, lease lost, refused commit--> version N as before
                                        `--stream, received*--commit--> loading --loaded--> leased (version N+1)
                                              `--abort, lease lost, refused commit--> leased (broken)

`broken` means that the engine may hold a mixture: nothing is served until a later load succeeds.
"""

from __future__ import annotations

import hmac
import math
import secrets
from collections.abc import Callable, Set
from dataclasses import dataclass, field

from swift_r1.models.expected import Shapes, of_parts, parts_of
from swift_r1.sync.buckets import TensorEntry, check_bucket, content_hash, entries_digest
from swift_r1.sync.staging import StagedBucket
from swift_r1.wire.protocol import HTTPError, StreamedBucket


@dataclass(slots=True)
class _Lease:
    owner: str
    token: str
    ttl: float
    expires: float


@dataclass(slots=True)
class PendingUpdate:
    """An update from its beginning on, see the states above. `whole`: all its buckets came; `dropped`: it is over, for
    better or worse."""

    version: int
    progress: float
    expected: Shapes
    digests: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    buckets: list[StagedBucket] = field(default_factory=list)
    streamed: bool = False
    loading: bool = False
    whole: bool = False
    dropped: bool = False


def needed(expected: Shapes, names: Set[str]) -> set[str]:
    """Returns the weights that an update must bring which has these: all of the language model, and of each part beside it
    that it has something of. The others stay as they are."""
    return set(of_parts(expected, parts_of(names)))


class UpdateMachine:
    """One server's weight version, and the one update that may be under way. Methods raise HTTPError: 409 for a wrong
    lease, version or order, 422 for wrong content."""

    def __init__(
        self,
        expected: Shapes,  # of all the model's weights
        clock: Callable[[], float],  # monotonic seconds
        # seconds without progress after which an open update is forgotten, whatever its lease
        patience: float,
        # gets those no longer needed
        discard: Callable[[list[StagedBucket]], None] = lambda _buckets: None,
    ) -> None:
        self._expected = expected
        self._clock = clock
        self._patience = patience
        self.discard = discard
        self._lease: _Lease | None = None
        self._pending: PendingUpdate | None = None
        self._committed: tuple[int, str] | None = None  # version and content hash
        self.version = 0
        self.broken: str | None = None

    @property
    def pending_version(self) -> int | None:
        return self._pending.version if self._pending else None

    @property
    def newest_version(self) -> int:
        """The version that the engine's newest token may have come from: one that is being loaded counts."""
        return self._pending.version if self._pending and self._pending.loading else self.version

    @property
    def staged(self) -> int:
        return len(self._pending.digests) if self._pending else 0

    @property
    def owner(self) -> str | None:
        return self._lease.owner if self._lease else None

    def holds(self, token: str | None) -> bool:
        """Whether this is the token of the lease in force."""
        lease = self._lease
        return (
            lease is not None
            and token is not None
            and hmac.compare_digest(token.encode(), lease.token.encode())
        )

    def take_lease(self, owner: str, ttl: float, token: str | None = None) -> str:
        """Returns the lease's token, `token` where one is given. With the token in force the lease is renewed."""
        self.expire()
        lease = self._lease
        if lease is not None and not self.holds(token):
            left = math.ceil(max(lease.expires - self._clock(), 0.0))
            raise HTTPError(
                409,
                f"{lease.owner} writes this server's weights (its lease has {left} s left)",
                left,
            )
        self._lease = _Lease(owner, token or secrets.token_hex(16), ttl, self._clock() + ttl)
        return self._lease.token

    def release(self, token: str | None) -> None:
        self._holder(token)
        self._refuse_while_loading()
        self._drop_pending()
        self._lease = None

    def expire(self) -> str | None:
        """Ends a lease whose time is over, and an update that stands still; says so if it did.

        A running load is left to finish.
        """
        now = self._clock()
        pending = self._pending
        lease = self._lease
        if lease is None or (pending is not None and pending.loading):
            return None
        if now >= lease.expires:
            self._drop_pending()
            self._lease = None
            return f"the lease of {lease.owner} expired"
        if pending is not None and now >= pending.progress + self._patience:
            self._drop_pending()
            return f"{lease.owner} left the update to version {pending.version} for {self._patience:g} s"
        return None

    def begin(
        self, token: str | None, version: int, expected: Shapes | None = None
    ) -> PendingUpdate:
        """Opens the update to `version`, and returns it; an update that the same holder left open is forgotten.

        `expected` are the names and shapes of this update where it is not of the whole model.
        """
        self._holder(token)
        self._refuse_while_loading()
        if version <= self.version:
            raise HTTPError(
                409, f"version {version} is not after the served version {self.version}"
            )
        self._drop_pending()
        self._pending = PendingUpdate(
            version, self._clock(), self._expected if expected is None else expected
        )
        return self._pending

    def check_holder(self, token: str | None, also_while_loading: bool = False) -> None:
        """Refuses anyone but the lease's holder, and everyone while an update is in the engine, unless
        `also_while_loading`."""
        self._holder(token)
        if not also_while_loading:
            self._refuse_while_loading()

    def check_bucket_welcome(self, token: str | None, version: int, index: int) -> None:
        """Checks what can be known before the bytes are read, and again when they have arrived."""
        pending = self._open(token, version)
        if pending.streamed or index > len(pending.buckets):
            raise HTTPError(
                409, f"bucket {index} came out of order, the next one is {len(pending.buckets)}"
            )

    def add_bucket(self, token: str | None, version: int, bucket: StagedBucket) -> None:
        """Takes a staged bucket in; the same one again is taken for a repeated request."""
        self.check_bucket_welcome(token, version, bucket.index)
        pending = self._open(token, version)
        if bucket.index < len(pending.buckets):
            if pending.buckets[bucket.index].digest != bucket.digest:
                raise HTTPError(409, f"bucket {bucket.index} came twice with different bytes")
            self.discard([bucket])
            return
        check_bucket(bucket.tensors, pending.expected, pending.names)
        pending.buckets.append(bucket)
        pending.digests.append(bucket.digest)
        pending.names |= bucket.tensors.keys()
        pending.progress = self._clock()

    def check_stream_welcome(self, token: str | None, bucket: StreamedBucket) -> None:
        """Checks what can be known before the engine is touched."""
        pending = self._open(token, bucket.version)
        if pending.buckets or bucket.index != len(pending.digests):
            raise HTTPError(
                409,
                f"bucket {bucket.index} came out of order, the next one is {len(pending.digests)}",
            )
        tensors = {one.name: TensorEntry(one.dtype, one.shape) for one in bucket.tensors}
        if len(tensors) < len(bucket.tensors):
            raise HTTPError(422, "a weight's name comes twice in one bucket")
        check_bucket(tensors, pending.expected, pending.names)

    def stream(self, token: str | None, bucket: StreamedBucket) -> None:
        """The engine loads this bucket as it comes; `received` or `failed` must follow. From the first one on there is
        no way back to the old version."""
        self.check_stream_welcome(token, bucket)
        pending = self._open(token, bucket.version)
        pending.loading = pending.streamed = True
        pending.digests.append(entries_digest(bucket.tensors))
        pending.names |= {one.name for one in bucket.tensors}

    def received(self) -> None:
        assert self._pending is not None and self._pending.loading
        self._pending.loading = False
        self._pending.progress = self._clock()

    def already_committed(self, token: str | None, version: int, hash_of_all: str) -> bool:
        """True for a commit that was done before (its answer got lost)."""
        self._holder(token)
        return self._pending is None and self._committed == (version, hash_of_all)

    def opened(self, token: str | None, version: int) -> object:
        """The open update, for `check_still_open`; a commit that waits for its turn counts as progress."""
        pending = self._open(token, version)
        # The wait may take as long as the patience; it can be repeated within another.
        pending.progress = self._clock() + self._patience
        return pending

    def check_still_open(self, opened: object) -> None:
        """Refuses an update that was dropped, or begun again by another process of the same run."""
        if self._pending is not opened:
            raise HTTPError(
                409, "the update that was to be committed is gone: it was dropped, or begun again"
            )

    def start_loading(
        self, token: str | None, version: int, buckets: int, hash_of_all: str
    ) -> list[StagedBucket]:
        """Checks the whole update and hands out its buckets; `loaded` or `failed` must follow. One that is not whole
        (422) is forgotten, and the old version stays."""
        pending = self._open(token, version)
        try:
            if buckets != len(pending.digests):
                raise HTTPError(422, f"{len(pending.digests)} buckets arrived, {buckets} were sent")
            if not hmac.compare_digest(content_hash(pending.digests), hash_of_all):
                raise HTTPError(
                    422, f"the content hash of version {version} differs: bytes changed on the way"
                )
            missing = sorted(needed(pending.expected, pending.names) - pending.names)
            if missing:
                shown = ", ".join(missing[:5]) + (", …" if len(missing) > 5 else "")
                raise HTTPError(
                    422, f"{len(missing)} of {len(pending.expected)} weights were not sent: {shown}"
                )
        except HTTPError:
            self._drop_pending()
            raise
        pending.loading = pending.whole = True
        self._committed = version, hash_of_all
        return pending.buckets

    def loaded(self) -> None:
        assert self._pending is not None and self._pending.loading
        self.version = self._pending.version
        self._finish()
        self.broken = None

    def failed(self, cause: str) -> None:
        """The load went wrong: the engine may hold parts of two versions."""
        assert self._pending is not None and self._pending.loading
        broken = _broken(self._pending.version, cause)
        self._committed = None
        self._finish()
        self.broken = broken

    def discarded(self) -> None:
        """The engine has no weights any more."""
        self._committed = None
        self.broken = (
            "the engine slept at level 2 and holds no weights; a full push of a version repairs it"
        )

    def abort(self, token: str | None, version: int) -> None:
        self._holder(token)
        self._refuse_while_loading()
        if self._pending is not None and self._pending.version != version:
            raise HTTPError(409, f"version {self._pending.version} is being updated, not {version}")
        self._drop_pending()

    def _finish(self) -> None:
        """After a load: forget the buckets, and give the lease its full time again."""
        self._drop_pending()
        if self._lease is not None:
            self._lease.expires = self._clock() + self._lease.ttl

    def _holder(self, token: str | None) -> None:
        """Only the lease's holder may go on; doing so renews the lease."""
        self.expire()
        if self._lease is None:
            raise HTTPError(
                409,
                "no one holds the lease on this server's weights (never taken, given back or expired)",
            )
        if not self.holds(token):
            raise HTTPError(409, f"this is not the lease in force, {self._lease.owner} holds it")
        self._lease.expires = self._clock() + self._lease.ttl

    def _open(self, token: str | None, version: int) -> PendingUpdate:
        """The open update, for the lease's holder."""
        self._holder(token)
        if self._pending is None:
            raise HTTPError(
                409, f"no update is open (version {version} was not begun, or was dropped)"
            )
        if self._pending.version != version:
            raise HTTPError(409, f"version {self._pending.version} is being updated, not {version}")
        self._refuse_while_loading()
        return self._pending

    def _refuse_while_loading(self) -> None:
        if self._pending is not None and self._pending.loading:
            raise HTTPError(409, f"version {self._pending.version} is being loaded right now")

    def _drop_pending(self) -> None:
        """Forgets the open update; one that is in the engine in part leaves it broken."""
        pending = self._pending
        self._pending = None
        if pending is None:
            return
        pending.dropped = True
        self.discard(pending.buckets)
        if pending.streamed:
            self.broken = _broken(pending.version, "it broke off")


def _broken(version: int, cause: str) -> str:
    return f"the update to version {version} failed while loading ({cause}); a full push of a version repairs it"
