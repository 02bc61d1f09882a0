"""Reading the table of contents of a safetensors file without loading a tensor (or torch)."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from swift_r1.wire.http_errors import HTTPError

FLOAT_BYTES: Mapping[str, int] = {"F32": 4, "BF16": 2, "F16": 2}
_BYTES = FLOAT_BYTES | {"F64": 8, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
_MAX_HEADER = 32 << 20


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a bucket: its dtype (`F32`, `BF16`, `F16`) and shape."""

    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Names, dtypes and shapes in a safetensors file; the bytes must be exactly those the header promises.

    Raises:
        HTTPError: 422 if it is no whole safetensors file of floating-point tensors.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, _MAX_HEADER):
            raise HTTPError(422, f"the bucket is no whole safetensors file: {size} bytes are too few for its header")
        try:
            table = json.loads(file.read(length))
        except ValueError as error:
            raise HTTPError(422, "the bucket is no safetensors file: its header is not JSON") from error
    if not isinstance(table, dict):
        raise HTTPError(422, "the bucket is no safetensors file: its header is no JSON object")
    table.pop("__metadata__", None)
    entries, spans = {}, []
    for name, item in table.items():
        try:
            entry = TensorEntry(str(item["dtype"]), tuple(int(side) for side in item["shape"]))
            begin, end = (int(offset) for offset in item["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise HTTPError(422, f"the bucket's header describes {name!r} wrongly") from error
        if entry.dtype not in FLOAT_BYTES:
            raise HTTPError(422, f"{name} has dtype {entry.dtype}; weights are sent as {', '.join(FLOAT_BYTES)}")
        if min(entry.shape, default=0) < 0 or end - begin != prod(entry.shape) * FLOAT_BYTES[entry.dtype]:
            raise HTTPError(422, f"{name} has {end - begin} bytes, its shape {list(entry.shape)} needs another number")
        entries[name] = entry
        spans.append((begin, end))
    position = 0
    for begin, end in sorted(spans):
        if begin != position:
            raise HTTPError(422, "the bucket's tensors overlap or leave gaps")
        position = end
    if position != size - 8 - length:
        raise HTTPError(422, f"the bucket has {size - 8 - length} bytes of tensors, its header promises {position}")
    if not entries:
        raise HTTPError(422, "the bucket holds no tensor")
    return entries


def header_of(tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None = None) -> bytes:
    """The beginning of a safetensors file whose tensors (name, dtype as `F32`, shape) follow one after the other.

    Raises:
        ValueError: a name comes twice.
    """
    table: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    position = 0
    for name, dtype, shape in tensors:
        if name in table:
            raise ValueError(f"{name} comes twice in one file")
        end = position + prod(shape) * _BYTES[dtype]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header
