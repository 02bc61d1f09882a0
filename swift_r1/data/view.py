"""The rows of a run as one sequence, whatever stores they lie in; a row is read when it is asked for."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import overload

from swift_r1.data.rows import Row
from swift_r1.data.store import Part


class Rows(Sequence[Row]):
    """Rows of one or several stores, one part after the other."""

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self.parts = tuple(part for part in parts if len(part.places))
        self._ends = list(accumulate(len(part.places) for part in self.parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> Row | Rows:
        if isinstance(index, slice):
            return self.chosen(range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        part, number = self._place(index % len(self))
        return self.parts[part].row(number)

    def __iter__(self) -> Iterator[Row]:
        return (part.row(number) for part in self.parts for number in range(len(part.places)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Rows) -> Rows:
        return Rows((*self.parts, *other.parts))

    def chosen(self, indices: Iterable[int]) -> Rows:
        """The rows at these places, in rising order."""
        by_part: dict[int, list[int]] = {}
        for index in indices:
            part, number = self._place(index)
            by_part.setdefault(part, []).append(number)
        return Rows(self.parts[part].chosen(numbers) for part, numbers in sorted(by_part.items()))

    def keys(self) -> Iterator[int]:
        """Of each row, 64 bits of a hash of its messages: those of equal prompts are equal."""
        return (
            part.store.key(place % count) for part in self.parts if (count := len(part.store)) for place in part.places
        )

    def sizes(self) -> Iterator[tuple[int, int]]:
        """Of each row, the bytes of its messages' contents, and how many messages there are."""
        return (
            part.store.size(place % count) for part in self.parts if (count := len(part.store)) for place in part.places
        )

    def columns(self) -> frozenset[str]:
        """The columns that every row has."""
        kinds = {
            frozenset(part.store.columns[kind])
            for part in self.parts
            for kind in {part.store.kind(place % len(part.store)) for place in part.places}
        }
        return frozenset.intersection(*kinds) | {"dataset", "prompt_id"} if kinds else frozenset()

    def digest(self) -> str:
        """A hash of all rows in their order: 128 bits as hexadecimal digits."""
        digest = hashlib.blake2b(digest_size=16)
        for part in self.parts:
            digest.update(f"{part.store.digest} {part.dataset} {part.label} {len(part.places)}\n".encode())
            for place in part.places:
                digest.update(place.to_bytes(8, "little"))
        return digest.hexdigest()

    def _place(self, index: int) -> tuple[int, int]:
        part = bisect_right(self._ends, index)
        return part, index - (self._ends[part - 1] if part else 0)
