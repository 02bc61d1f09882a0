"""The content hash of a weight version: what was sent is what arrived, whole and in order.

XXH3 with 128 bits: it finds what changed on the way at the speed of memory, fifteen times that of SHA-256. It proves
nothing against one who means harm; who may write at all is decided by the API key and the lease.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import xxhash

from swift_r1.wire.protocol import StreamedTensor

Hash = xxhash.xxh3_128


def bucket_digest(body: bytes | memoryview) -> str:
    """XXH3 (32 hex digits) of one bucket's bytes."""
    return Hash(body).hexdigest()


def parts_digest(parts: Iterable[memoryview]) -> str:
    """XXH3 (hex) of a bucket in parts."""
    digest = Hash()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def entries_digest(tensors: Sequence[StreamedTensor]) -> str:
    """XXH3 (hex) of what a bucket holds by name, dtype and shape: all that is known of one sent by NCCL."""
    return bucket_digest(json.dumps([[one.name, one.dtype, *one.shape] for one in tensors]).encode())


def content_hash(digests: Iterable[str]) -> str:
    """XXH3 (hex) over the buckets' digests (hex in, 16 raw bytes each) in order."""
    return bucket_digest(b"".join(bytes.fromhex(digest) for digest in digests))
