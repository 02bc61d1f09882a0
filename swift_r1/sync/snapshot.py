"""The newest weights, gathered once by all ranks and kept on rank 0: a server that comes back is brought up to date
without the other ranks, and the next version is compared with this one."""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from swift_r1.sync.buckets import (
    Tensors,
    Words,
    changed_words,
    content_hash,
    encode_change,
    parts_digest,
    parts_of,
    words_of,
)
from swift_r1.sync.transport import fill

if TYPE_CHECKING:
    from swift_r1.wire.protocol import AdapterConfig

_LOOK_S = 1.0
_SHARED_MEMORY = "/dev/shm"


class Superseded(Exception):
    """The version that was being read is no longer the newest."""


@dataclass(frozen=True, slots=True)
class SnapshotBucket:
    """A bucket ready for any number of servers: the bytes of a safetensors file."""

    data: Sequence[memoryview] | SharedFile
    size: int
    digest: str  # XXH3 (hex)
    base: str | None = None  # content hash of the version that `change` is to
    change: bytes | None = None  # see `buckets`; None where it would not be smaller

    @classmethod
    def of(cls, parts: Sequence[memoryview]) -> SnapshotBucket:
        """Makes a bucket of these parts, where they are."""
        return cls(parts, sum(map(len, parts)), parts_digest(parts))

    def parts(self) -> Sequence[memoryview]:
        return (
            [memoryview(self.data.read(self.size))]
            if isinstance(self.data, SharedFile)
            else self.data
        )

    def link(self, path: Path) -> bool:
        """Whether it could be put there without copying it."""
        return isinstance(self.data, SharedFile) and self.data.link(path)


class SharedFile:
    """A file in shared memory without a name of its own: servers on this host get links to it; it goes with the last
    process that has it. Raises OSError where there is no such memory."""

    def __init__(self) -> None:
        self._descriptor = os.open(_SHARED_MEMORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self._descriptor)
        self._places: set[Path] = set()

    def write(self, parts: Sequence[memoryview]) -> str:
        """Replaces the contents; returns their hash. Raises OSError where there is no room."""
        return fill(self._descriptor, parts)

    def read(self, size: int) -> bytes:
        # Not by `os.pread`, which ends at 2 GiB; opened anew it has a position of its own.
        with open(f"/proc/self/fd/{self._descriptor}", "rb") as file:
            return file.read(size)

    def link(self, path: Path) -> bool:
        """Puts it at `path`, in place of what is there; False where that cannot be, as on another file system."""
        if self._is_at(path):
            return True
        try:
            path.unlink(missing_ok=True)
            # Only with a folder's descriptor does Python have the link followed, to the file behind it.
            os.link(
                f"/proc/self/fd/{self._descriptor}",
                path,
                src_dir_fd=self._descriptor,
                follow_symlinks=True,
            )
        except OSError:
            return False
        self._places.add(path)
        return True

    @property
    def can_be_linked(self) -> bool:
        """The kernel makes no link to a file that has lost all of its own."""
        return not self._places or os.fstat(self._descriptor).st_nlink > 0

    @property
    def is_unused(self) -> bool:
        """Whether no server reads it any more: one that does has moved it elsewhere."""
        return os.fstat(self._descriptor).st_nlink == sum(map(self._is_at, self._places))

    def _is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(path.lstat(), os.fstat(self._descriptor))
        except OSError:
            return False


@dataclass(slots=True)
class _Kept:
    """A bucket, and the `header` that says what it holds."""

    bucket: SnapshotBucket
    header: bytes
    memory: Words | None  # its words, where it is in own memory
    # to a server that comes back, which reads at its own time: not to be written to again
    lent: bool = False


class WeightSnapshot:
    """The newest version. One thread writes it bucket by bucket; others read it, also while it is written.

    It takes the model's size in its own dtype. Where a server on this host takes weights through shared memory, that is
    the only copy. Where versions are compared, and where shared memory has no room, it is in own memory.
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._kept: list[_Kept] = []
        self._count = 0
        self._hash: str | None = None
        self._compare = self._shared = False
        self._room = 0  # of shared memory, for new files
        self.version = -1  # of what is here, or being written
        self.adapter: AdapterConfig | None = None
        self.writing = self.whole = False  # whole: all buckets of the newest version are here
        # 16-bit words that differ from the version before, and all that were compared
        self.changed = self.total = 0

    def begin(
        self, version: int, adapter: AdapterConfig | None, compare: bool, shared: bool
    ) -> None:
        """Begins a version; readers of the one before get `Superseded`. With `compare` buckets also come as what has
        changed; with `shared` a server on this host may take them from shared memory."""
        with self._turn:
            # An incomplete version is no base for comparison.
            self._hash = (
                content_hash(one.bucket.digest for one in self._kept) if self.whole else None
            )
            self._compare = compare and self._hash is not None and adapter == self.adapter
            self._shared = shared and not compare and os.path.isdir(_SHARED_MEMORY)
            # At most half of what is free: other programs need some too.
            self._room = shutil.disk_usage(_SHARED_MEMORY).free // 2 if self._shared else 0
            self.version = version
            self.adapter = adapter
            self.writing = True
            self.whole = False
            self._count = self.changed = self.total = 0
            self._turn.notify_all()

    def add(self, bucket: Tensors) -> str:
        """Copies the version's next bucket; returns its digest."""
        parts = parts_of(bucket)
        old = self._kept[self._count] if self._count < len(self._kept) else None
        if old is not None and old.header != bytes(parts[0]):
            old = None
        kept = (self._in_file(parts, old) if self._shared else None) or self._in_memory(parts, old)
        with self._turn:
            self._kept[self._count : self._count + 1] = [kept]
            self._count += 1
            self._turn.notify_all()
        return kept.bucket.digest

    def end(self, whole: bool) -> None:
        """All buckets are here, or those that are missing will not come."""
        with self._turn:
            del self._kept[self._count :]
            self.writing = False
            self.whole = whole
            self._turn.notify_all()

    def bucket(self, version: int, index: int, copy: bool) -> SnapshotBucket | None:
        """Returns a bucket as soon as it is there; None after the last one. With `copy` it stays as it is when the next
        version is written. Raises Superseded where the version is no longer here."""
        with self._turn:
            # Whoever writes is heard within the deadlines of its collectives: it comes to an end.
            while self.version == version and self.writing and index >= self._count:
                self._turn.wait(_LOOK_S)
            if self.version != version or not (self.writing or self.whole):
                raise Superseded
            if index >= self._count:
                return None
            kept = self._kept[index]
            found = kept.bucket
            if not copy:
                return found
            if not isinstance(found.data, SharedFile):
                return SnapshotBucket([memoryview(b"".join(found.data))], found.size, found.digest)
            copied = None if found.data.can_be_linked else self._in_file(found.parts(), None)
            if copied is not None:
                # With the hash of what was gathered: the server checks whether these are the same bytes.
                kept.bucket = replace(found, data=copied.bucket.data)
            kept.lent = True
            return kept.bucket

    def _in_file(self, parts: Sequence[memoryview], old: _Kept | None) -> _Kept | None:
        """None where shared memory has no room for it, or this process for another open file."""
        size = sum(map(len, parts))
        # Pages that are there already are written twice as fast: the memory of new ones is cleared first.
        file = old.bucket.data if old is not None and not old.lent else None
        try:
            if not isinstance(file, SharedFile) or not (file.is_unused and file.can_be_linked):
                if (
                    size > self._room
                    or self._count > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
                ):
                    return None
                file = SharedFile()
                self._room -= size
            digest = file.write(parts)
        except OSError:
            return None
        return _Kept(SnapshotBucket(file, size, digest), bytes(parts[0]), None)

    def _in_memory(self, parts: Sequence[memoryview], old: _Kept | None) -> _Kept:
        header = bytes(parts[0])
        if old is None or old.memory is None:
            data = np.concatenate(words_of(parts))
            return _Kept(SnapshotBucket.of([data.data.cast("B")]), header, data)
        data = old.memory
        at = len(header) // 2
        places = [np.empty(0, np.int64)]
        for new in words_of(parts[1:]):
            before = data[at : at + len(new)]
            if self._compare:
                changed = changed_words(new, before)
                self.changed = self.changed + len(changed)
                self.total = self.total + len(new)
                places.append(changed + at)
            np.copyto(before, new)
            at += len(new)
        bucket = SnapshotBucket.of([data.data.cast("B")])
        if self._compare:
            change = encode_change(data, np.concatenate(places))
            if len(change) < bucket.size:
                bucket = replace(bucket, base=self._hash, change=change)
        return _Kept(bucket, header, data)


@dataclass(frozen=True)
class SnapshotReader:
    """The version's buckets in order, see `WeightSnapshot.bucket`; can be iterated again. Raises Superseded where the
    version is no longer here, or `wanted`; without `copy` a bucket in hand then changes."""

    snapshot: WeightSnapshot
    version: int
    copy: bool
    wanted: Callable[[], bool] = lambda: True

    def __iter__(self) -> Iterator[SnapshotBucket]:
        for index in itertools.count():
            bucket = self.snapshot.bucket(self.version, index, self.copy)
            if bucket is None:
                return
            if not self.wanted():
                raise Superseded
            yield bucket
