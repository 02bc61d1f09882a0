"""A bucket as what has changed in it: with small learning rates most 16-bit weights round to what they were.

The file is taken as 16-bit words. A change is a run of gaps, each from one named word to the next, and those words' new
values; where a gap is too long for its number, a word that did not change is named on the way.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint16]

_HEAD = struct.Struct("<4sIQ")
_MAGIC = b"sr1d"
_GAP_BYTES = (1, 2)
_WORD = np.dtype("<u2")


class BadChange(Exception):
    """The bytes are no change, or not one to this file."""


def changed_words(new: Words, old: Words) -> NDArray[np.int64]:
    """Places of the words that differ, ascending."""
    return np.flatnonzero(new != old)


def encode(words: Words, changed: NDArray[np.int64]) -> bytes:
    """The change to `words` in which those at `changed` (ascending) are new."""
    gaps = np.diff(changed, prepend=-1)
    # The width that takes fewer bytes: narrow gaps need more words to be named.
    size = min(_GAP_BYTES, key=lambda width: int(len(gaps) + ((gaps - 1) // _longest(width)).sum()) * (width + 2))
    longest = _longest(size)
    more = (gaps - 1) // longest
    ends = np.cumsum(more + 1) - 1
    spread = np.full(int(ends[-1]) + 1 if len(ends) else 0, longest, dtype=np.int64)
    spread[ends] = gaps - more * longest
    values = words[np.cumsum(spread) - 1]
    return b"".join(
        (
            _HEAD.pack(_MAGIC, size, len(spread)),
            spread.astype(f"<u{size}").tobytes(),
            values.astype(_WORD, copy=False).tobytes(),
        )
    )


def apply(body: bytes, words: Words) -> int:
    """Writes the change into `words`; returns how many it names. Raises BadChange for one that is cut, malformed, or
    names words beyond the end; then `words` are as they were."""
    if len(body) < _HEAD.size:
        raise BadChange("it is cut")
    magic, size, count = _HEAD.unpack_from(body)
    assert isinstance(count, int)
    if magic != _MAGIC or size not in _GAP_BYTES:
        raise BadChange("it does not begin as a change does")
    if len(body) != _HEAD.size + count * (size + _WORD.itemsize):
        raise BadChange(f"{len(body)} bytes are not those of {count} words")
    gaps = np.frombuffer(body, f"<u{size}", count, _HEAD.size)
    values = np.frombuffer(body, _WORD, count, _HEAD.size + count * size)
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
