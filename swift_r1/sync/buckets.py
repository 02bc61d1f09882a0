"""A bucket of weights: named tensors as the bytes of a safetensors file, their hash, and what has changed in them.

With small learning rates most 16-bit weights round to what they were. A changed bucket is taken as 16-bit words: its
change is a run of gaps, each from one named word to the next, and those words' new values; where a gap is too long for
its number, a word that did not change is named on the way.

XXH3 with 128 bits finds what changed on the way, fifteen times as fast as SHA-256. It is no defence against an
attacker: who may write is decided by the API key and the lease."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from swift_r1.errors import one_line
from swift_r1.models.expected import Shapes
from swift_r1.wire.protocol import HTTPError, StreamedTensor

if TYPE_CHECKING:
    from torch import Tensor

Tensors = Sequence[tuple[str, "Tensor"]]
Words = NDArray[np.uint16]
Hash = xxhash.xxh3_128

FLOAT_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_BYTES = FLOAT_BYTES | {"F64": 8, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

_CHANGE_HEAD = struct.Struct("<4sIQ")
_CHANGE_MAGIC = b"sr1d"
_GAP_BYTES = (1, 2)
_WORD = np.dtype("<u2")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a bucket: its dtype (`F32`, `BF16`, `F16`) and shape."""

    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Names, dtypes and shapes in a safetensors file. Raises HTTPError (422) if it is not a whole one of floating-point
    tensors."""
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            entries = {
                name: TensorEntry(one.get_dtype(), tuple(one.get_shape()))
                for name, one in slices.items()
            }
    except SafetensorError as error:
        raise HTTPError(
            422, f"the bucket is not a complete safetensors file: {one_line(error)}"
        ) from error
    for name, entry in entries.items():
        if entry.dtype not in FLOAT_BYTES:
            raise HTTPError(
                422, f"{name} has dtype {entry.dtype}; weights are sent as {', '.join(FLOAT_BYTES)}"
            )
    if not entries:
        raise HTTPError(422, "the bucket holds no tensor")
    return entries


def header_of(
    tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The beginning of a safetensors file whose tensors (name, dtype as `F32`, shape) follow one after the other.
    Raises ValueError where a name comes twice."""
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


def parts_of(bucket: Tensors) -> list[memoryview]:
    """The bucket as the parts of a safetensors file in order: its header, then each tensor's own memory, not a copy.

    `safetensors.torch.save` copies every tensor twice, which takes as long as sending it.

    Raises:
        ValueError: a name comes twice, or a dtype is not one that weights are sent in.
    """
    import torch

    entries: list[tuple[str, str, Sequence[int]]] = []
    parts: list[memoryview] = []
    for name, tensor in bucket:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise ValueError(f"{name} is {dtype}; weights are sent as {', '.join(_DTYPES)}")
        entries.append((name, _DTYPES[dtype], tensor.shape))
        parts.append(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return [memoryview(header_of(entries)), *parts]


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
    return bucket_digest(
        json.dumps([[one.name, one.dtype, *one.shape] for one in tensors]).encode()
    )


def content_hash(digests: Iterable[str]) -> str:
    """XXH3 (hex) over the buckets' digests (hex in, 16 raw bytes each) in order."""
    return bucket_digest(b"".join(bytes.fromhex(digest) for digest in digests))


def most_bytes(expected: Shapes) -> int:
    """Returns the bytes of all weights, in whichever dtype they come."""
    return sum(map(prod, expected.values())) * max(FLOAT_BYTES.values())


def check_bucket(tensors: Mapping[str, TensorEntry], expected: Shapes, already: set[str]) -> None:
    """Raises HTTPError (422) for a tensor that is not the model's, has another shape, or comes again."""
    for name, entry in tensors.items():
        if name not in expected:
            tied = name == "lm_head.weight"
            hint = (
                "it is tied to the embedding, which is sent alone"
                if tied
                else "the served model has no such weight"
            )
            raise HTTPError(422, f"unexpected weight {name}: {hint}")
        if entry.shape != expected[name]:
            raise HTTPError(
                422, f"{name} has shape {list(entry.shape)}, the model's is {list(expected[name])}"
            )
        if name in already:
            raise HTTPError(422, f"{name} was sent twice in one version")


class BadChange(Exception):
    """The bytes are no change, or not one to this file."""


def changed_words(new: Words, old: Words) -> NDArray[np.int64]:
    """Places of the words that differ, ascending."""
    return np.flatnonzero(new != old)


def encode_change(words: Words, changed: NDArray[np.int64]) -> bytes:
    """The change to `words` in which those at `changed` (ascending) are new."""
    gaps = np.diff(changed, prepend=-1)
    # The width that takes fewer bytes: narrow gaps need more words to be named.
    size = min(
        _GAP_BYTES,
        key=lambda width: int(len(gaps) + ((gaps - 1) // _longest(width)).sum()) * (width + 2),
    )
    longest = _longest(size)
    more = (gaps - 1) // longest
    ends = np.cumsum(more + 1) - 1
    spread = np.full(int(ends[-1]) + 1 if len(ends) else 0, longest, dtype=np.int64)
    spread[ends] = gaps - more * longest
    values = words[np.cumsum(spread) - 1]
    return b"".join(
        (
            _CHANGE_HEAD.pack(_CHANGE_MAGIC, size, len(spread)),
            spread.astype(f"<u{size}").tobytes(),
            values.astype(_WORD, copy=False).tobytes(),
        )
    )


def apply_change(body: bytes, words: Words) -> int:
    """Writes the change into `words`; returns how many it names. Raises BadChange for one that is cut, malformed, or
    names words beyond the end; then `words` are as they were."""
    if len(body) < _CHANGE_HEAD.size:
        raise BadChange("it is cut")
    magic, size, count = _CHANGE_HEAD.unpack_from(body)
    assert isinstance(count, int)
    if magic != _CHANGE_MAGIC or size not in _GAP_BYTES:
        raise BadChange("it does not begin as a change does")
    if len(body) != _CHANGE_HEAD.size + count * (size + _WORD.itemsize):
        raise BadChange(f"{len(body)} bytes are not those of {count} words")
    gaps = np.frombuffer(body, f"<u{size}", count, _CHANGE_HEAD.size)
    values = np.frombuffer(body, _WORD, count, _CHANGE_HEAD.size + count * size)
    places = np.cumsum(gaps, dtype=np.int64) - 1
    if count and (not gaps.all() or places[-1] >= len(words)):
        raise BadChange("it names words twice, or beyond the end")
    words[places] = values
    return count


def _longest(width: int) -> int:
    """The longest gap that a number of `width` bytes holds."""
    return (1 << 8 * width) - 1


def words_of(parts: Sequence[memoryview]) -> list[Words]:
    """The parts as words, where they are; each has an even number of bytes."""
    return [np.frombuffer(part, _WORD) for part in parts if len(part)]
