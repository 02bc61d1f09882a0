"""The sender's half of a weight update: tensors to buckets, buckets to the bytes of a safetensors file. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from swift_r1.weights.header import header_of

if TYPE_CHECKING:
    import torch

Bucket = Sequence[tuple[str, "torch.Tensor"]]

DEFAULT_BUCKET_BYTES = 64 << 20
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def in_buckets(
    weights: Iterable[tuple[str, torch.Tensor]], max_bytes: int = DEFAULT_BUCKET_BYTES
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Groups a lazy stream of named tensors; a bucket exceeds `max_bytes` only if one tensor alone does."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def parts_of(bucket: Bucket) -> list[memoryview]:
    """The bucket as the parts of a safetensors file in order: its header, then each tensor's own memory, not a copy.

    `safetensors.torch.save` copies every tensor twice, which takes as long as sending it. CPU tensors that are
    contiguous are read where they are; they must not change before the parts are used.

    Raises:
        ValueError: if a name comes twice, or a dtype is not one that weights are sent in.
    """
    import torch

    entries: list[tuple[str, str, Sequence[int]]] = []
    parts: list[memoryview] = []
    for name, tensor in bucket:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise ValueError(f"{name} is {dtype}; weights are sent as {', '.join(_DTYPES)}")
        entries.append((name, _DTYPES[dtype], tensor.shape))
        parts.append(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return [memoryview(header_of(entries)), *parts]


def to_bytes(bucket: Bucket) -> bytes:
    """The bucket as one safetensors file in memory."""
    return b"".join(parts_of(bucket))
