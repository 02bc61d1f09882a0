"""Prepared rows on disk: written once, read one by one through memory maps, so that a million rows take little memory.

A store is a folder: `rows.jsonl` (the preprocessed rows, without `dataset` and `prompt_id`, which depend on the run),
`index.bin` (fixed-size facts of each row) and `header.json`. It appears under its name only when it is complete. The
cache keeps stores under a hash of the data, the preprocessor and the settings that made them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
import shutil
import tempfile
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import overload

from swift_r1.data.preprocessors import Row
from swift_r1.data.rows import Drops

RUN_ONLY = "run-"  # begins the names of stores that no later run may take
_MAKING = ".making-"  # begins the names of folders that are no store yet, or no longer
_FORMAT = 1
_ROWS, _INDEX, _HEADER = "rows.jsonl", "index.bin", "header.json"
_KEPT_S = 30 * 86_400  # since a store was last used
_LEFT_OVER_S = 2 * 86_400  # of what only one run was to use
_logger = logging.getLogger("swift_r1.data")

_FIELDS = {"ends": "Q", "keys": "Q", "raws": "Q", "sizes": "I", "turns": "H", "parts": "H", "kinds": "H"}
"""The index: types of its columns, which hold one value per row.

    ends: where the row's line ends.
    keys: 64 bits of a hash of the messages: rows with equal ones are the same prompt.
    raws: number of the raw row that it was made from.
    sizes: bytes of the messages' contents.
    turns: number of messages.
    parts: which of the rows it is that were made from the raw row.
    kinds: which of the sets of columns it has.
"""


def _empty_index() -> dict[str, array[int]]:
    return {name: array(kind) for name, kind in _FIELDS.items()}


@dataclass(slots=True)
class Block:
    """Some prepared rows, in order.

    Attributes:
        lines: their JSON, one per line.
        index: facts of each row; `ends` counts from the start of `lines`.
        columns: sets of columns, which the index counts.
        drops: what was left out.
    """

    lines: bytearray = field(default_factory=bytearray)
    index: dict[str, array[int]] = field(default_factory=_empty_index)
    columns: dict[tuple[str, ...], int] = field(default_factory=dict)
    drops: Drops = field(default_factory=Drops)

    def add(self, row: Row, line: bytes, key: int, raw: int, part: int, size: int) -> None:
        """Appends a row and its JSON; the other arguments are values of the index."""
        self.lines += line + b"\n"
        kind = self.columns.setdefault(tuple(row), len(self.columns))
        values = (len(self.lines), key, raw, size, len(row["messages"]), part, kind)
        for column, value in zip(self.index.values(), values, strict=True):
            column.append(value)


class Store:
    """An open store.

    Attributes:
        index: facts of each row, by name.
        columns: the sets of columns that rows have.
        drops: what was left out when it was made.
        digest: a hash of all rows in order.
    """

    def __init__(self, folder: Path) -> None:
        """Opens it.

        Raises:
            OSError, ValueError: it is not complete, or of another version.
        """
        header = json.loads((folder / _HEADER).read_text(encoding="utf-8"))
        if header.get("format") != _FORMAT:
            raise ValueError(f"{folder} is of another version")
        self.folder, self._count = folder, int(header["rows"])
        self.columns = [tuple(names) for names in header["columns"]]
        self.drops = Drops(**header["drops"])
        self.digest: str = header["digest"]
        self.index = _empty_index()
        content, place = (folder / _INDEX).read_bytes(), 0
        for values in self.index.values():
            size = self._count * values.itemsize
            values.frombytes(content[place : place + size])
            place += size
        with (folder / _ROWS).open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if place != len(content) or self.index["ends"][-1] != len(self._map):
            raise ValueError(f"{folder} is not complete")

    def __len__(self) -> int:
        return self._count

    def row(self, place: int) -> Row:
        """The row at a place, without `dataset` and `prompt_id`."""
        ends = self.index["ends"]
        row: Row = json.loads(self._map[ends[place - 1] if place else 0 : ends[place]])
        return row

    def name(self, place: int) -> str:
        """What tells it from the dataset's others: the number of its raw row, and which of several it is."""
        part = self.index["parts"][place]
        return f"{self.index['raws'][place]}.{part}" if part else str(self.index["raws"][place])


def whole_store(folder: Path) -> Store | None:
    """The store of that name; None where there is none, or it is broken or of another version, which is logged."""
    try:
        return Store(folder)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _logger.warning("prepared rows in %s cannot be used, and are prepared again: %s", folder, error)
        return None


class StoreWriter:
    """Writes a store; `finish` makes it appear. A context manager: what is not finished is removed."""

    def __init__(self, parent: Path) -> None:
        """Raises OSError where nothing can be written."""
        parent.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=_MAKING, dir=parent))
        self._file = (self._folder / _ROWS).open("wb")
        self._index = _empty_index()
        self._columns: dict[tuple[str, ...], int] = {}
        self._hash = hashlib.blake2b(digest_size=16)
        self.drops = Drops()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._file.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def count(self) -> int:
        """Rows written."""
        return len(self._index["ends"])

    def add(self, block: Block) -> None:
        """Appends rows."""
        before = self._index["ends"][-1] if self.count else 0
        self._file.write(block.lines)
        self._hash.update(block.lines)
        kinds = [self._columns.setdefault(names, len(self._columns)) for names in block.columns]
        for name, values in block.index.items():
            if name == "ends":
                self._index[name].extend(before + end for end in values)
            elif name == "kinds":
                self._index[name].extend(kinds[kind] for kind in values)
            else:
                self._index[name].extend(values)
        self.drops.merge(block.drops)

    def finish(self, folder: Path, *, replace: bool = False) -> Store:
        """Gives the store its name. A complete one of that name is returned instead, or replaced."""
        self._file.close()
        with (self._folder / _INDEX).open("wb") as file:
            for values in self._index.values():
                values.tofile(file)
        header = {
            "format": _FORMAT,
            "rows": self.count,
            "columns": [list(names) for names in self._columns],
            "digest": self._hash.hexdigest(),
            "drops": asdict(self.drops),
        }
        (self._folder / _HEADER).write_text(json.dumps(header), encoding="utf-8")
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(self._folder, folder)
        except OSError:
            if not folder.is_dir():
                raise
            if not replace and (there := whole_store(folder)):
                return there
            aside = Path(tempfile.mkdtemp(prefix=_MAKING, dir=folder.parent))  # who has it open can still read it
            os.rename(folder, aside / folder.name)
            os.rename(self._folder, folder)
            shutil.rmtree(aside, ignore_errors=True)
        return Store(folder)


def cache_folder() -> Path:
    """Where stores are kept: in SWIFT_R1_CACHE, else in the user's cache folder; in the system's folder for temporary
    files where that cannot be written to."""
    named = os.environ.get("SWIFT_R1_CACHE")
    own = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "swift-r1"
    folder = Path(named or own) / "data"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        pass
    else:
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    return Path(tempfile.gettempdir()) / f"swift-r1-data-{os.getuid()}"


def remove_old(cache: Path) -> None:
    """Removes stores that were not used for long. What another process removes meanwhile is no fault."""
    now = time.time()
    for entry in cache.iterdir():
        kept = _LEFT_OVER_S if entry.name.startswith((_MAKING, RUN_ONLY)) else _KEPT_S
        with contextlib.suppress(OSError):
            if now - entry.stat().st_mtime > kept:
                shutil.rmtree(entry, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Part:
    """Chosen rows of one store, in order.

    Attributes:
        store: where they are.
        dataset: what rewards get as `dataset`.
        label: what prompt ids begin with.
        places: `turn * len(store) + place`: the row at `place`, for the `turn`th time.
    """

    store: Store
    dataset: str
    label: str
    places: Sequence[int]

    def row(self, number: int) -> Row:
        turn, place = divmod(self.places[number], len(self.store))
        prompt_id = f"{self.label}:{self.store.name(place)}{f'+{turn}' if turn else ''}"
        return {**self.store.row(place), "dataset": self.dataset, "prompt_id": prompt_id}

    def facts(self, name: str) -> Iterator[int]:
        """A column of the store's index, for each of these rows."""
        values, count = self.store.index[name], len(self.store)
        return (values[place % count] for place in self.places)


class Rows(Sequence[Row]):
    """The rows of a run: parts of one or several stores, one after the other. A row is read when it is asked for."""

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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __add__(self, other: Rows) -> Rows:
        return Rows((*self.parts, *other.parts))

    def chosen(self, indices: Iterable[int]) -> Rows:
        """The rows at these places, in rising order."""
        by_part: dict[int, array[int]] = {}
        for index in indices:
            part, number = self._place(index)
            by_part.setdefault(part, array("Q")).append(self.parts[part].places[number])
        return Rows(replace(self.parts[part], places=places) for part, places in sorted(by_part.items()))

    def keys(self) -> Iterator[int]:
        """For each row, 64 bits of a hash of its messages: those of equal prompts are equal."""
        return chain.from_iterable(part.facts("keys") for part in self.parts)

    def sizes(self) -> Iterator[tuple[int, int]]:
        """For each row, the bytes of its messages' contents, and how many messages there are."""
        return chain.from_iterable(zip(part.facts("sizes"), part.facts("turns"), strict=True) for part in self.parts)

    def columns(self) -> frozenset[str]:
        """The columns that every row has."""
        kinds = {frozenset(part.store.columns[kind]) for part in self.parts for kind in set(part.facts("kinds"))}
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
