"""Keeps buckets until the version is whole: files in shared memory, hashed as they arrive and mapped by the
engine."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from swift_r1.sync.buckets import (
    BadChange,
    Hash,
    TensorEntry,
    apply_change,
    bucket_digest,
    read_header,
)
from swift_r1.sync.transport import incoming, reserve
from swift_r1.wire.protocol import HTTPError

logger = logging.getLogger("swift_r1.sync")

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "swift-r1-weights-"
_SOCKETS = "swift-r1-sockets-"
_CHUNK = 4 << 20
_SEGMENT_STARTS_S = 60.0  # from when vLLM's workers make a segment to when all have mapped it


@dataclass(frozen=True, slots=True)
class StagedBucket:
    """A bucket on disk: its place in the order, its hash (hex) and what it holds."""

    index: int
    path: Path
    digest: str
    tensors: Mapping[str, TensorEntry]
    base: str | None = None  # content hash of the version that `change` is to
    change: bytes | None = None  # as it came, where it is to go on to other servers


class Staging:
    """A private folder for one server's buckets, which have at most `max_bytes` (the whole model's); another one on
    disk for those that shared memory has no room for."""

    def __init__(self, max_bytes: int) -> None:
        free = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else 0
        parent = _SHARED_MEMORY if free > max_bytes and os.access(_SHARED_MEMORY, os.W_OK) else None
        self._locks: list[int] = []
        self.folder = self._made(parent)
        self._on_disk: Path | None = None
        self.max_bytes = max_bytes
        self._serial = 0
        # a trainer on this host can write there itself
        self.shared = str(self.folder) if parent is not None else None
        self.base: str | None = None  # content hash of the version whose buckets are all still here
        logger.info("weights are staged in %s", self.folder)

    async def write(
        self,
        index: int,
        chunks: AsyncIterator[bytes],
        promised_digest: str | None,
        size_promised: int = 0,
    ) -> StagedBucket:
        """Streams one bucket to a file. Raises HTTPError: 413 if it is larger than the whole model, 422 if the bytes
        are not those promised, 507 where there is no room for it, on disk neither."""
        path = self._new_path()
        # A spare file's pages are there already, which halves the time: the memory of new ones is cleared first.
        spare = incoming(self.folder, index)
        if _is_own(spare):
            spare.rename(path)
        path = await asyncio.to_thread(self._with_room, path, min(size_promised, self.max_bytes))
        digest = Hash()
        size = 0
        filled = 0
        pending: list[bytes] = []
        with _removed_on_failure(path), open(_opened(path), "r+b") as file:

            def flush(blocks: list[bytes]) -> None:
                whole = b"".join(blocks)
                digest.update(whole)
                file.write(whole)

            async for chunk in chunks:
                size += len(chunk)
                self._check_size(index, size)
                pending.append(chunk)
                if size - filled >= _CHUNK:
                    await asyncio.to_thread(flush, pending)
                    pending = []
                    filled = size
            if pending:
                await asyncio.to_thread(flush, pending)
            file.truncate()
            file.flush()
            return _checked(index, path, digest.hexdigest(), promised_digest)

    async def change(
        self,
        index: int,
        chunks: AsyncIterator[bytes],
        promised_digest: str,
        keep_of: str | None = None,
    ) -> StagedBucket:
        """Makes a bucket of the base's one and what has changed in it (see `buckets`), where the update began on that
        base; with its content hash as `keep_of` what came is kept. Raises HTTPError as `write`, and 409 where the base
        has no such bucket."""
        source = incoming(self.folder, index)
        body = bytearray()
        async for chunk in chunks:
            body += chunk
            self._check_size(index, len(body))
        path = self._new_path()
        if not _is_own(source):
            raise HTTPError(
                409, f"bucket {index} of that version is not here any more: send it whole"
            )
        source.rename(path)
        with _removed_on_failure(path):
            self._check_size(index, path.stat().st_size)
            try:
                arrived = await asyncio.to_thread(_changed, path, bytes(body))
            except BadChange as error:
                raise HTTPError(
                    422, f"the change to bucket {index} cannot be used: {error}"
                ) from error
            staged = _checked(index, path, arrived, promised_digest)
            return staged if keep_of is None else replace(staged, base=keep_of, change=bytes(body))

    def hold(self, buckets: int, hash_of_all: str) -> None:
        """The version that was loaded is the base of later changes, where `forget` has kept all its files."""
        kept = all(_is_own(incoming(self.folder, index)) for index in range(buckets))
        self.base = hash_of_all if buckets and kept else None

    async def take(self, index: int, promised_digest: str) -> StagedBucket:
        """Takes in a bucket that the trainer has written to `incoming(folder, index)`. Raises HTTPError as `write`, and
        409 where there is no such file."""
        source = incoming(self.folder, index)
        path = self._new_path()
        if self.shared is None or not _is_plain(source):
            if source.is_symlink():
                source.unlink()
            raise HTTPError(
                409, f"bucket {index} is not in this server's shared memory: send it over HTTP"
            )
        source.rename(path)  # from here on no later bucket can be written into it
        with _removed_on_failure(path):
            self._check_size(index, path.stat().st_size)
            return _checked(
                index, path, await asyncio.to_thread(_file_digest, path), promised_digest
            )

    def forget(self, buckets: list[StagedBucket]) -> None:
        """Their files become spare ones for the next version's buckets, where there is memory enough."""
        keep = shutil.disk_usage(self.folder).free > 2 * self.max_bytes
        for bucket in buckets:
            spare = incoming(self.folder, bucket.index)
            # A folder of that name is nobody's bucket, and no file can take its place.
            if (
                keep
                and bucket.path.parent == self.folder
                and _is_plain(bucket.path)
                and not spare.is_dir()
            ):
                bucket.path.rename(spare)
            else:
                bucket.path.unlink(missing_ok=True)

    def _new_path(self) -> Path:
        """Returns a path for a bucket of a version that is no longer the base."""
        self.base = None
        self._serial += 1
        return self.folder / f"bucket-{self._serial:06d}.safetensors"

    def _check_size(self, index: int, size: int) -> None:
        if size > self.max_bytes:
            raise HTTPError(
                413, f"bucket {index} is larger than the whole model ({self.max_bytes} bytes)"
            )

    def close(self) -> None:
        for folder in filter(None, (self.folder, self._on_disk)):
            shutil.rmtree(folder, ignore_errors=True)
        for lock in self._locks:
            os.close(lock)

    def _made(self, parent: Path | None) -> Path:
        folder, lock = _own_folder(_PREFIX, parent)
        self._locks.append(lock)
        return folder

    def _with_room(self, path: Path, size: int) -> Path:
        """A file with room for `size` bytes: `path`, or one on disk."""
        if self.shared is not None:
            try:
                _reserve(path, size)
                return path
            except OSError as error:
                path.unlink(missing_ok=True)
                logger.warning(
                    "%s has no room for %d bytes (%s): they go to disk",
                    path.parent,
                    size,
                    error.strerror,
                )
            if self._on_disk is None:
                self._on_disk = self._made(None)
            path = self._on_disk / path.name
        with _removed_on_failure(path):
            _reserve(path, size)
        return path


def _checked(index: int, path: Path, arrived: str, promised: str | None) -> StagedBucket:
    if promised is not None and arrived != promised:
        raise HTTPError(
            422, f"bucket {index} has other bytes than were promised (their hash differs)"
        )
    return StagedBucket(index, path, arrived, read_header(path))


@contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    """Raises HTTPError 507 for an OSError."""
    try:
        yield
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise HTTPError(
                507, f"weights cannot be staged in {path.parent}: {error.strerror or error}"
            ) from error
        raise


def _is_plain(path: Path) -> bool:
    """A file, and no link: whoever may write to the folder must not have us write elsewhere."""
    return path.is_file() and not path.is_symlink()


def _is_own(path: Path) -> bool:
    """A file that no other server on this host was given too, so that it may be written to."""
    return _is_plain(path) and path.stat().st_nlink == 1


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _reserve(path: Path, size: int) -> None:
    with open(_opened(path), "r+b") as file:
        reserve(file.fileno(), size)


def _changed(path: Path, change: bytes) -> str:
    """Applies the change to the file; its hash then."""
    words = np.memmap(path, np.uint16, "r+", shape=(path.stat().st_size // 2,))
    apply_change(change, words)
    return bucket_digest(words.data.cast("B"))


def _file_digest(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, Hash).hexdigest()


@contextmanager
def socket_folder() -> Iterator[Path]:
    """A folder for the sockets that an engine leaves behind; removed at the end, or at the next start."""
    folder, lock = _own_folder(
        _SOCKETS, _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
    )
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _own_folder(prefix: str, parent: Path | None) -> tuple[Path, int]:
    """A new folder, and a descriptor that locks it until the process ends, however it ends."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                return folder, lock
            os.close(lock)
        # Another server that starts now took it for a leftover before it was locked.


def remove_leftovers() -> None:
    """Deletes what killed servers have left in shared memory: their folders (a living server keeps its own locked, in
    whatever container it runs), the marks of processes with Intel's OpenMP, and the segments of vLLM's workers."""
    for mark in _SHARED_MEMORY.glob(f"__KMP_REGISTERED_LIB_*_{os.getuid()}"):
        pid = mark.name.split("_")[-2]  # this process's own, which nothing asks for again, goes too
        if pid == str(os.getpid()) or _has_ended(pid):
            mark.unlink(missing_ok=True)
    for segment in _unmapped_segments():
        logger.info("removing %s, left by an engine that is gone", segment)
        segment.unlink(missing_ok=True)
    for parent in {_SHARED_MEMORY, Path(tempfile.gettempdir())}:
        for folder in (*parent.glob(f"{_PREFIX}*"), *parent.glob(f"{_SOCKETS}*")):
            try:
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError as error:
                logger.info("%s is left alone: %s", folder, error.strerror)
                continue
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                logger.info("removing %s, left by a server that is gone", folder)
                shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def _has_ended(pid: str) -> bool:
    """True too where nobody has collected its exit code yet, as vLLM does not of an engine that it kills."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _unmapped_segments() -> list[Path]:
    """Memory of the workers of a vLLM engine on a CPU that no process has mapped. Processes of other containers are not
    seen; what they have mapped stays with them though its name is gone."""
    old = []
    for segment in _SHARED_MEMORY.glob("vllm_dist_*-cpushm_*"):
        with suppress(FileNotFoundError):
            about = segment.stat()
            if about.st_uid == os.getuid() and time.time() - about.st_mtime > _SEGMENT_STARTS_S:
                old.append(segment)
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps") if old else ():
        with suppress(OSError):  # it has ended, or is another user's
            mapped |= {
                line.split(maxsplit=5)[-1]
                for line in maps.read_text().splitlines()
                if "-cpushm_" in line
            }
    return [segment for segment in old if str(segment) not in mapped]
