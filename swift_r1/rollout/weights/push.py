"""The sender's half of a weight update: tensors to buckets, buckets to bytes. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Bucket = Sequence[tuple[str, "torch.Tensor"]]

DEFAULT_BUCKET_BYTES = 64 << 20


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


def to_bytes(bucket: Bucket) -> bytes:
    """The bucket as a safetensors file in memory, its values unchanged.

    Raises:
        ValueError: if a name comes twice.
    """
    from safetensors.torch import save

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in bucket}
    if len(tensors) != len(bucket):
        raise ValueError("a weight's name comes twice in one bucket")
    return save(tensors)
