"""Prepared rows on disk: written once, read one by one through a memory map, so that a million rows take little memory.

A store is one Arrow stream: record batches of rows, then an empty one whose metadata say what was left out. It gets its
name only when it is complete. The cache keeps stores under a hash of the data, the preprocessor, the settings and the
code that made them.

`datasets.Dataset` maps such files too, but the launcher would import that library (0.5 s and 85 MB) before a model is
loaded, and its writer takes no 64-bit hash (docs/contributing.md).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from swift_r1.data.cache import IMAGES, MAKING, cache_folder, mark_used, remove_old
from swift_r1.data.images import COLUMN
from swift_r1.data.preprocessors import Row
from swift_r1.data.rows import Drops

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

_logger = logging.getLogger("swift_r1.data")


def _schema() -> pa.Schema:
    """Returns the columns of a store:

    row: the JSON of a preprocessed row and a newline, without `dataset` and `prompt_id`, which depend on the run, and
        without the paths of its images, which depend on the machine.
    name: number of the raw row that it was made from, and which of several rows it is.
    key: 64 bits of a hash of the messages: rows with equal ones are the same prompt.
    id: 64 bits of a hash of the column `id`; 0 without one.
    size, turns: bytes of the messages' contents, and how many messages there are.
    columns: the row's columns, as JSON.
    images: the paths of its images.
    """
    import pyarrow as pa

    kinds = {"row": pa.binary(), "name": pa.string(), "key": pa.uint64(), "id": pa.uint64()}
    return pa.schema(
        {
            **kinds,
            "size": pa.uint32(),
            "turns": pa.uint32(),
            "columns": pa.dictionary(pa.int32(), pa.string()),
            "images": pa.list_(pa.string()),
        }
    )


class RowBlock(NamedTuple):
    """Some prepared rows, in order, and what was left out."""

    rows: pa.RecordBatch
    drops: Drops


def block_of(rows: Sequence[Mapping[str, Any]], drops: Drops) -> RowBlock:
    """Returns rows as in `_schema`."""
    import pyarrow as pa

    return RowBlock(pa.RecordBatch.from_pylist(rows, _schema()), drops)


class RowStore:
    """An open store.

    Attributes:
        table: its rows (`_schema`).
        drops: what was left out when it was made.
        digest: a hash of all rows in order.
        made: when it was written, in seconds since 1970.
    """

    def __init__(self, path: Path) -> None:
        """Opens it; raises OSError, ValueError, LookupError or TypeError where it is not complete."""
        import pyarrow as pa

        batches = list(
            pa.ipc.open_stream(pa.memory_map(str(path))).iter_batches_with_custom_metadata()
        )
        header = json.loads(batches[-1].custom_metadata["header"])
        self.path = path
        self.drops = Drops(**header["drops"])
        self.digest = str(header["digest"])
        self.made = float(header["made"])
        self.table = pa.Table.from_batches([one.batch for one in batches]).unify_dictionaries()

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def row(self, place: int) -> tuple[str, Row]:
        """Returns the row at a place, without `dataset` and `prompt_id`, and its name."""
        row = json.loads(self.table["row"][place].as_py())
        paths = self.table["images"][place].as_py()
        if paths:
            row[COLUMN] = [
                {**image, "path": path} for image, path in zip(row[COLUMN], paths, strict=True)
            ]
        return self.table["name"][place].as_py(), row

    def lost_image(self) -> str | None:
        """Returns the path of an image that is gone or has changed since the store was made; None where all are as they
        were. Those in the cache count as used from now on."""
        from pyarrow import compute

        own = str(cache_folder() / IMAGES)
        for path in compute.unique(compute.list_flatten(self.table["images"])).to_pylist():
            kept = path.startswith(own)  # under a hash of what is in it
            try:
                there = mark_used(Path(path)) if kept else os.stat(path).st_mtime <= self.made
            except OSError:
                there = False
            if not there:
                return str(path)
        return None


def whole_store(path: Path) -> RowStore | None:
    """Returns the store of that name; None where there is none, or it is broken, which is logged."""
    try:
        return RowStore(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        _logger.warning(
            "prepared rows in %s cannot be used, and are prepared again: %s", path, error
        )
        return None


def write_store(
    path: Path, blocks: Iterable[RowBlock], check: Callable[[int, Drops], None]
) -> RowStore:
    """Writes a store in the place of one of that name. What is not finished is removed.

    `check` is called with the number of rows and what was left out before the store gets its name. Raises OSError where
    nothing can be written.
    """
    import pyarrow as pa

    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=MAKING, dir=path.parent)
    os.close(descriptor)
    digest = hashlib.blake2b(digest_size=16)
    count = 0
    drops = Drops()
    made = time.time()
    try:
        remove_old(path.parent)
        with pa.ipc.new_stream(name, _schema()) as stream:
            for rows, dropped in blocks:
                stream.write_batch(rows)
                digest.update(b"".join(rows["row"].to_pylist()))
                count += rows.num_rows
                drops.merge(dropped)
            check(count, drops)
            header = {"drops": asdict(drops), "digest": digest.hexdigest(), "made": made}
            stream.write_batch(
                block_of([], drops).rows, custom_metadata={"header": json.dumps(header)}
            )
        os.replace(name, path)  # who has the old one open can still read it
        return RowStore(path)
    finally:
        Path(name).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Part:
    """Chosen rows of one store, in order.

    Attributes:
        store: where they are.
        dataset: what rewards get as `dataset`.
        label: what prompt ids begin with.
        places: `turn * len(store) + place`: the row at `place`, for the `turn`th time.
    """

    store: RowStore
    dataset: str
    label: str
    places: np.ndarray

    def row(self, number: int) -> Row:
        turn, place = divmod(int(self.places[number]), len(self.store))
        name, row = self.store.row(place)
        return {
            **row,
            "dataset": self.dataset,
            "prompt_id": f"{self.label}:{name}{f'+{turn}' if turn else ''}",
        }

    def again(self, turn: int) -> Part:
        """Returns the same rows for the `turn`th time more."""
        used = int(self.places.max(initial=0)) // len(self.store) + 1
        return replace(self, places=self.places + turn * used * len(self.store))

    def column(self, name: str) -> pa.ChunkedArray:
        """Returns a column of the store, for each of these rows."""
        return self.store.table[name].take(self.places % len(self.store))


class Rows(Sequence[Row]):
    """The rows of a run: parts of one or several stores, one after the other. A row is read when it is asked for."""

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self.parts = tuple(part for part in parts if len(part.places))
        self._ends = list(accumulate(len(part.places) for part in self.parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.chosen(range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        place = index % len(self)
        number = bisect_right(self._ends, place)
        return self.parts[number].row(place - self._ends[number])  # counted from its end

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __add__(self, other: Rows) -> Rows:
        return Rows((*self.parts, *other.parts))

    def chosen(self, indices: Iterable[int]) -> Rows:
        """Returns the rows at these places, in rising order."""
        import numpy as np

        wanted = indices if isinstance(indices, np.ndarray) else np.fromiter(indices, np.int64)
        pieces = np.split(wanted, np.searchsorted(wanted, self._ends))
        return Rows(
            replace(part, places=part.places[piece - end])  # counted from the part's end
            for part, piece, end in zip(self.parts, pieces, self._ends, strict=False)
        )

    def once(self) -> Rows:
        """Returns the same rows, those that are repeated once."""
        import numpy as np

        firsts = (
            (part, np.unique(part.places % len(part.store), return_index=True)[1])
            for part in self.parts
        )
        return Rows(replace(part, places=part.places[np.sort(first)]) for part, first in firsts)

    def column(self, name: str) -> np.ndarray:
        """Returns a column of numbers of the stores (`_schema`), `[rows]`."""
        import numpy as np

        columns = [part.column(name).to_numpy() for part in self.parts]
        return np.concatenate(columns) if columns else np.empty(0, np.int64)

    def columns(self) -> frozenset[str]:
        """Returns the columns that every row has."""
        kinds = {
            kind for part in self.parts for kind in part.column("columns").unique().to_pylist()
        }
        shared = [frozenset(json.loads(kind)) for kind in kinds]
        return frozenset.intersection(*shared) | {"dataset", "prompt_id"} if shared else frozenset()

    def columns_of_each(self) -> Iterator[frozenset[str]]:
        """Yields the columns of each row, without `dataset` and `prompt_id`."""
        sets: dict[str, frozenset[str]] = {}
        for part in self.parts:
            for kind in part.column("columns").to_pylist():
                if kind not in sets:
                    sets[kind] = frozenset(json.loads(kind))
                yield sets[kind]

    def most_images(self) -> int:
        """Returns how many images the row with the most of them has."""
        from pyarrow import compute

        counts = [compute.list_value_length(part.column("images")) for part in self.parts]
        return max((compute.max(one).as_py() or 0 for one in counts), default=0)

    def digest(self) -> str:
        """Returns a hash of all rows in their order: 128 bits as hexadecimal digits."""
        digest = hashlib.blake2b(digest_size=16)
        for part in self.parts:
            digest.update(
                f"{part.store.digest} {part.dataset} {part.label} {len(part.places)}\n".encode()
            )
            digest.update(part.places.astype("<u8").tobytes())
        return digest.hexdigest()
