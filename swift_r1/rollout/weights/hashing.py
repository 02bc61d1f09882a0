"""The content hash of a weight version: what was sent is what arrived, whole and in order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

from swift_r1.rollout.protocol import StreamedTensor


def bucket_digest(body: bytes | memoryview) -> str:
    """SHA-256 (hex) of one bucket's bytes."""
    return hashlib.sha256(body).hexdigest()


def parts_digest(parts: Iterable[memoryview]) -> str:
    """SHA-256 (hex) of a bucket in parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def entries_digest(tensors: Sequence[StreamedTensor]) -> str:
    """SHA-256 (hex) of what a bucket holds by name, dtype and shape: all that is known of one sent by NCCL."""
    return bucket_digest(json.dumps([[one.name, one.dtype, *one.shape] for one in tensors]).encode())


def content_hash(digests: Iterable[str]) -> str:
    """SHA-256 (hex) over the buckets' SHA-256 digests (hex in, 32 raw bytes each) in order."""
    total = hashlib.sha256()
    for digest in digests:
        total.update(bytes.fromhex(digest))
    return total.hexdigest()
