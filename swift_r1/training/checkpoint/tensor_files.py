"""Safetensors files of a checkpoint, hashed while they are written: nothing is read again, nothing is held twice."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from swift_r1.weights.buckets import header_of

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PIECE = 1 << 20

Entry = Mapping[str, str | int]
"""Of a file in the manifest: `sha256` (hex) and `bytes`."""


class Content(NamedTuple):
    """One tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: Sequence[int]


def write_stream(path: Path, contents: Sequence[Content], tensors: Iterable[tuple[str, Tensor]]) -> Entry:
    """Writes a file of `contents` and syncs it; `tensors` are taken one at a time, in the order of `contents`.

    Raises:
        OSError: the disk refuses.
        ValueError: another tensor came than was promised.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:

        def write(data: memoryview) -> None:
            nonlocal size
            for start in range(0, len(data), _PIECE):
                piece = data[start : start + _PIECE]
                digest.update(piece)
                while piece:
                    written = file.write(piece)
                    piece = piece[written:]
            size += len(data)

        header = header_of([(one.name, _DTYPES[one.dtype], one.shape) for one in contents], {"format": "pt"})
        write(memoryview(header))
        coming = iter(contents)
        for name, tensor in tensors:
            if (name, tensor.dtype, tuple(tensor.shape)) != ((due := next(coming)).name, due.dtype, tuple(due.shape)):
                raise ValueError(f"{path}: {name} {tensor.dtype} {list(tensor.shape)} came in the place of {due}")
            write(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
        os.fsync(file.fileno())
    return {"sha256": digest.hexdigest(), "bytes": size}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Entry:
    """Writes a file of these tensors, the widest dtypes first, so that each is aligned. Raises as `write_stream`."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    return write_stream(path, [Content(name, one.dtype, one.shape) for name, one in ordered], ordered)
