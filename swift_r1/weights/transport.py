"""The ways for a bucket: over HTTP anywhere, or through a file in shared memory where both ends are on one host.

Either way the bytes are those of a safetensors file, and the server checks their hash, their names and their shapes.
From GPU to GPU there is `nccl`, in a module of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from swift_r1.weights.hashing import Hash

T = TypeVar("T")

AUTO, SHM, HTTP, NCCL = "auto", "shm", "http", "nccl"
MIN_BYTES_A_SECOND = 64 << 20
"""Weights that move slower than this count as stuck: half of what 1 Gbit/s carries."""
_PIECE = 1 << 20


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
    """Where bucket `index` is written; the server names it, so that no path ever comes over the wire."""
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


def write_file(path: Path, parts: Sequence[memoryview]) -> str:
    """Writes the parts, cutting off what was there before, and returns their hash (hex).

    Raises:
        OSError: there is no room; then there is no file.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        digest = Hash()
        reserve(descriptor, sum(len(part) for part in parts))
        for part in _pieces(parts):
            digest.update(part)
            written = os.write(descriptor, part)
            while written < len(part):
                written += os.write(descriptor, part[written:])
        os.ftruncate(descriptor, sum(len(part) for part in parts))
        return digest.hexdigest()
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
