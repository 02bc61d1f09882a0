"""The newest version of the weights in the trainer's memory, for servers that take it at their own time.

One thread writes a version bucket by bucket; others read it, those of the same version while it is written. The copy
is what a server that comes back is brought up to date with, without the other ranks, and what the next version is
compared with to know what has changed. It costs the model's size in its own dtype, on the main rank's host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from swift_r1.weights import delta
from swift_r1.weights.hashing import content_hash, parts_digest

if TYPE_CHECKING:
    import torch

    from swift_r1.wire.protocol import AdapterConfig

_LOOK_S = 1.0


class Superseded(Exception):
    """The version that was being read is no longer the newest."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A bucket ready for any number of servers.

    Attributes:
        parts: the bytes of its safetensors file.
        digest: their XXH3 (hex).
        base: content hash of the version that `change` is to; None where there is no change, or none that is smaller.
        change: see `delta`.
    """

    parts: tuple[memoryview, ...]
    digest: str
    base: str | None = None
    change: bytes | None = None


@dataclass(slots=True)
class _Kept:
    """A bucket's bytes, whose first `header` ones say what it holds."""

    data: NDArray[np.uint16]
    header: int
    prepared: Prepared


class KeptWeights:
    """The newest version.

    Attributes:
        version: of what is kept, or being written.
        adapter: what `begin` was told.
        whole: whether all its buckets are there.
        changed, total: words of 16 bits that are not those of the version before, and all that were compared with it.
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._buckets: list[_Kept] = []
        self._count = 0
        self._hash: str | None = None
        self._failed = False
        self._compare = False
        self.version = -1
        self.adapter: AdapterConfig | None = None
        self.whole = False
        self.changed = self.total = 0

    def begin(self, version: int, adapter: AdapterConfig | None, compare: bool) -> None:
        """Readers of the version before get `Superseded`. With `compare` buckets also come as what has changed."""
        with self._turn:
            # What was broken off in the middle is compared with nothing.
            self._hash = content_hash(one.prepared.digest for one in self._buckets) if self.whole else None
            self._compare = compare and self._hash is not None and adapter == self.adapter
            self.version, self.adapter, self.whole, self._failed = version, adapter, False, False
            self._count = self.changed = self.total = 0
            self._turn.notify_all()

    def add(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Copies the version's next bucket."""
        from swift_r1.weights.push import parts_of

        parts = parts_of(bucket)
        with self._turn:
            if self._count < len(self._buckets) and _same_table(self._buckets[self._count], parts[0]):
                kept = self._buckets[self._count]
                kept.prepared = self._overwritten(kept, parts)
            else:
                kept = _copied(parts)
                self._buckets[self._count :] = [kept]
            self._count += 1
            self._turn.notify_all()

    def finish(self) -> None:
        with self._turn:
            del self._buckets[self._count :]
            self.whole = True
            self._turn.notify_all()

    def fail(self) -> None:
        """The version will not become whole."""
        with self._turn:
            self._failed = True
            self._turn.notify_all()

    def reading(self, version: int, copy: bool, wanted: Callable[[], bool] = lambda: True) -> Iterable[Prepared]:
        """The version's buckets in order, each as soon as it is there; can be gone through again.

        Args:
            copy: a bucket is the reader's own, and stays what it is when the next version is written.
            wanted: whether the reader is to go on.

        Raises:
            Superseded: the version is no longer kept, or not wanted. Without `copy` a bucket in hand then changes.
        """
        return _Reading(self, version, copy, wanted)

    def bucket(self, version: int, index: int, copy: bool) -> Prepared | None:
        """None after the last one."""
        with self._turn:
            # Whoever writes is heard within the deadlines of its collectives: it finishes, or fails.
            while self.version == version and not (self.whole or self._failed or index < self._count):
                self._turn.wait(_LOOK_S)
            if self.version != version or self._failed:
                raise Superseded
            if index >= self._count:
                return None
            found = self._buckets[index].prepared
            if not copy:
                return found
            return Prepared(tuple(memoryview(bytes(part)) for part in found.parts), found.digest)

    def _overwritten(self, kept: _Kept, parts: Sequence[memoryview]) -> Prepared:
        at, places = kept.header // 2, [np.empty(0, np.int64)]
        for new in delta.words_of(parts[1:]):
            old = kept.data[at : at + len(new)]
            if self._compare:
                changed = delta.changed_words(new, old)
                self.changed, self.total = self.changed + len(changed), self.total + len(new)
                places.append(changed + at)
            np.copyto(old, new)
            at += len(new)
        whole = kept.prepared.parts
        digest = parts_digest(whole)
        if not self._compare:
            return Prepared(whole, digest)
        change = delta.encode(kept.data, np.concatenate(places))
        if len(change) >= kept.data.nbytes:
            return Prepared(whole, digest)
        return Prepared(whole, digest, self._hash, change)


class _Reading:
    """`KeptWeights.reading`."""

    def __init__(self, kept: KeptWeights, version: int, copy: bool, wanted: Callable[[], bool]) -> None:
        self._kept, self._version, self._copy, self._wanted = kept, version, copy, wanted

    def __iter__(self) -> Iterator[Prepared]:
        index = 0
        while (bucket := self._kept.bucket(self._version, index, self._copy)) is not None:
            if not self._wanted():
                raise Superseded
            yield bucket
            index += 1


def _same_table(kept: _Kept, header: memoryview) -> bool:
    return kept.header == len(header) and kept.data[: kept.header // 2].tobytes() == bytes(header)


def _copied(parts: Sequence[memoryview]) -> _Kept:
    data = np.concatenate(delta.words_of(parts))
    whole = (memoryview(data).cast("B"),)
    return _Kept(data, len(parts[0]), Prepared(whole, parts_digest(whole)))
