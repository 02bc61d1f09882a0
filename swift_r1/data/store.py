"""Prepared rows on disk: written once, read one by one through memory maps, so that a million rows take little memory.

A store is a folder: `rows.jsonl` (the preprocessed rows, without `dataset` and `prompt_id`, which depend on the run),
`index.bin` (fixed-size facts of each row) and `header.json`. It appears under its name only when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swift_r1.data.rows import Drops

FORMAT = 1
MAKING = ".making-"  # begins the names of folders that are no store yet, or no longer
_ROWS, _INDEX, _HEADER = "rows.jsonl", "index.bin", "header.json"
_logger = logging.getLogger("swift_r1.data")
_FIELDS = (("ends", "Q"), ("keys", "Q"), ("raws", "Q"), ("sizes", "I"), ("turns", "H"), ("parts", "H"), ("kinds", "H"))
"""Columns of the index and their types, one value a row."""


@dataclass(slots=True)
class Block:
    """Some prepared rows, in order.

    Attributes:
        lines: their JSON, one a line.
        ends: where each line ends in `lines`.
        keys: 64 bits of a hash of the prompt's messages.
        raws: numbers of the rows that they came from.
        sizes: bytes of the messages' contents.
        turns: numbers of messages.
        parts: which of the rows it is that one raw row gave.
        kinds: which of `columns` a row has.
        columns: sets of columns.
        drops: what was left out.
    """

    lines: bytearray = field(default_factory=bytearray)
    ends: array[int] = field(default_factory=lambda: array("Q"))
    keys: array[int] = field(default_factory=lambda: array("Q"))
    raws: array[int] = field(default_factory=lambda: array("Q"))
    sizes: array[int] = field(default_factory=lambda: array("I"))
    turns: array[int] = field(default_factory=lambda: array("H"))
    parts: array[int] = field(default_factory=lambda: array("H"))
    kinds: array[int] = field(default_factory=lambda: array("H"))
    columns: list[tuple[str, ...]] = field(default_factory=list)
    drops: Drops = field(default_factory=Drops)


class Store:
    """An open store.

    Attributes:
        columns: the sets of columns that rows have.
        drops: what was left out when it was made.
        digest: a hash of all rows in order.
    """

    def __init__(self, folder: Path) -> None:
        """Opens it.

        Raises:
            OSError, ValueError: it is not whole, or of another version.
        """
        header = json.loads((folder / _HEADER).read_text(encoding="utf-8"))
        if header.get("format") != FORMAT:
            raise ValueError(f"{folder} is of another version")
        self.folder, self._count = folder, int(header["rows"])
        self.columns = [tuple(names) for names in header["columns"]]
        self.drops = Drops(**header["drops"])
        self.digest: str = header["digest"]
        content = (folder / _INDEX).read_bytes()
        place = 0
        for name, kind in _FIELDS:
            values = array(kind)
            size = self._count * values.itemsize
            values.frombytes(content[place : place + size])
            setattr(self, f"_{name}", values)
            place += size
        with (folder / _ROWS).open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if place != len(content) or self._ends[-1] != len(self._map):  # type: ignore[attr-defined]
            raise ValueError(f"{folder} is not whole")

    _ends: array[int]
    _raws: array[int]
    _parts: array[int]
    _kinds: array[int]
    _keys: array[int]
    _sizes: array[int]
    _turns: array[int]

    def __len__(self) -> int:
        return self._count

    def remove(self) -> None:
        """Takes it off the disk; what has it open reads on."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def row(self, place: int) -> dict[str, Any]:
        """The row at a place, without `dataset` and `prompt_id`."""
        start = self._ends[place - 1] if place else 0
        return json.loads(self._map[start : self._ends[place]])

    def name(self, place: int) -> str:
        """What tells it from the dataset's others: the number of its raw row, and which of several it is."""
        part = self._parts[place]
        return f"{self._raws[place]}.{part}" if part else str(self._raws[place])

    def key(self, place: int) -> int:
        """64 bits of a hash of its messages: rows with equal ones are the same prompt."""
        return self._keys[place]

    def size(self, place: int) -> tuple[int, int]:
        """Bytes of its messages' contents, and how many messages there are."""
        return self._sizes[place], self._turns[place]

    def kind(self, place: int) -> int:
        """Its number in `columns`."""
        return self._kinds[place]


def whole_store(folder: Path) -> Store | None:
    """The store of that name; None where there is none, or it is broken or of another version, which is logged."""
    try:
        return Store(folder)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _logger.warning("prepared rows in %s cannot be used, and are made anew: %s", folder, error)
        return None


class StoreWriter:
    """Writes a store; `finish` makes it appear. A context manager: what is not finished is removed."""

    def __init__(self, parent: Path) -> None:
        """Raises OSError where nothing can be written."""
        parent.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=MAKING, dir=parent))
        self._file = (self._folder / _ROWS).open("wb")
        self._index = {name: array(kind) for name, kind in _FIELDS}
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
        numbers = [self._columns.setdefault(names, len(self._columns)) for names in block.columns]
        for name, values in self._index.items():
            if name == "ends":
                values.extend(before + end for end in block.ends)
            elif name == "kinds":
                values.extend(numbers[kind] for kind in block.kinds)
            else:
                values.extend(getattr(block, name))
        self.drops.merge(block.drops)

    def finish(self, folder: Path, *, replace: bool = False) -> Store:
        """Gives the store its name. Where one of that name is there and whole, that is taken, or replaced."""
        self._file.close()
        with (self._folder / _INDEX).open("wb") as file:
            for values in self._index.values():
                values.tofile(file)
        header = {
            "format": FORMAT,
            "rows": self.count,
            "columns": [list(names) for names in self._columns],
            "digest": self._hash.hexdigest(),
            "drops": self.drops.to_dict(),
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
            aside = Path(tempfile.mkdtemp(prefix=MAKING, dir=folder.parent))  # what has it open reads on
            os.rename(folder, aside / folder.name)
            os.rename(self._folder, folder)
            shutil.rmtree(aside, ignore_errors=True)
        return Store(folder)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one store in an order of choice.

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

    def row(self, number: int) -> dict[str, Any]:
        turn, place = divmod(self.places[number], len(self.store))
        again = f"+{turn}" if turn else ""
        return {
            **self.store.row(place),
            "dataset": self.dataset,
            "prompt_id": f"{self.label}:{self.store.name(place)}{again}",
        }

    def chosen(self, numbers: Iterable[int]) -> Part:
        """Those of its rows."""
        return Part(self.store, self.dataset, self.label, array("Q", [self.places[number] for number in numbers]))
