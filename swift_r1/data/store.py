"""The rows of a run: a data set of `datasets`, mapped from the disk, of which each row is read when it is asked for."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift_r1.data.cache import IMAGES, cache_folder, mark_used
from swift_r1.data.images import COLUMN
from swift_r1.data.preprocessors import Row

if TYPE_CHECKING:
    import datasets
    import numpy as np
    import pyarrow as pa

_BATCH = 10_000  # rows that are hashed at once


def features() -> datasets.Features:
    """Returns the columns of prepared rows:

    row: the JSON of a preprocessed row, without the paths of its images, which depend on the machine.
    key: 64 bits of a hash of the messages: rows with equal ones are the same prompt.
    size, turns: bytes of the messages' contents, and how many messages there are.
    columns: the row's columns, as JSON.
    images: the paths of its images.
    """
    from datasets import Features, List, Value

    texts = {name: Value("string") for name in ("row", "columns")}
    numbers = {name: Value("int64") for name in ("key", "size", "turns")}
    return Features({**texts, **numbers, "images": List(Value("string"))})


def row_of(kept: Mapping[str, Any]) -> Row:
    """Returns a row of its columns `row` and `images`."""
    row: Row = json.loads(kept["row"])
    if kept["images"]:
        row[COLUMN] = [
            {**image, "path": path} for image, path in zip(row[COLUMN], kept["images"], strict=True)
        ]
    return row


class Rows(Sequence[Row]):
    """Rows in their order; one that comes again has the number of its repetition in its `prompt_id`.

    Attributes:
        data: their columns (`features`).
        turns: how often each has come before, `[rows]`.
    """

    def __init__(self, data: datasets.Dataset, turns: np.ndarray | None = None) -> None:
        import numpy as np

        self.data = data
        self.turns = np.zeros(len(data), np.int32) if turns is None else turns

    @classmethod
    def joined(cls, parts: Iterable[Rows] = ()) -> Rows:
        """Returns the rows of all parts, one part after the other."""
        import numpy as np
        from datasets import Dataset, concatenate_datasets

        found = [part for part in parts if len(part)]
        if not found:
            return cls(Dataset.from_dict({name: [] for name in features()}, features=features()))
        return cls(
            concatenate_datasets([part.data for part in found]),
            np.concatenate([part.turns for part in found]),
        )

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.chosen(range(*index.indices(len(self))))
        row = row_of(self.data[index])  # raises IndexError
        turn = int(self.turns[index])
        return {**row, "prompt_id": f"{row['prompt_id']}+{turn}"} if turn else row

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def chosen(self, places: Iterable[int]) -> Rows:
        """Returns the rows at these places, in that order; a place may come several times."""
        import numpy as np

        wanted = places if isinstance(places, np.ndarray) else np.fromiter(places, np.int64)
        turns = self.turns[wanted]
        if not np.all(wanted[1:] > wanted[:-1]):
            order = np.argsort(wanted, kind="stable")
            equal = wanted[order]
            firsts = np.searchsorted(equal, equal)  # of each place, among the equal ones
            times = np.arange(len(wanted)) - firsts
            turns[order] += (times * (int(self.turns.max(initial=0)) + 1)).astype(turns.dtype)
        # nothing is kept under the fingerprint, which would be a hash of all places
        return Rows(self.data.select(wanted, new_fingerprint="chosen"), turns)

    def column(self, name: str) -> np.ndarray:
        """Returns a column of numbers (`features`), `[rows]`."""
        numbers: np.ndarray = self._column(name).to_numpy()
        return numbers

    def _column(self, name: str) -> pa.ChunkedArray:
        return self.data.select_columns([name]).with_format("arrow")[:][name]

    def sets_of_columns(self) -> set[frozenset[str]]:
        """Returns the different sets of columns that rows have."""
        return {
            frozenset(json.loads(names)) for names in self._column("columns").unique().to_pylist()
        }

    def first_without(self, column: str) -> int | None:
        """Returns the place of the first row without a column; None where all have it."""
        from pyarrow import array, compute

        names = self._column("columns")
        lacking = [one for one in names.unique().to_pylist() if column not in json.loads(one)]
        lacks = compute.is_in(names, value_set=array(lacking, names.type))
        place = compute.index(lacks, True).as_py()
        return None if place < 0 else int(place)

    def most_images(self) -> int:
        """Returns how many images the row with the most of them has."""
        from pyarrow import compute

        return compute.max(compute.list_value_length(self._column("images"))).as_py() or 0

    def lost_image(self, made: float) -> str | None:
        """Returns the path of an image that is gone or has changed since that time, in seconds since 1970; None where
        all are as they were. Those in the cache count as used from now on."""
        from pyarrow import compute

        own = str(cache_folder() / IMAGES)
        for path in compute.unique(compute.list_flatten(self._column("images"))).to_pylist():
            kept = path.startswith(own)  # under a hash of what is in it
            try:
                there = mark_used(Path(path)) if kept else os.stat(path).st_mtime <= made
            except OSError:
                there = False
            if not there:
                return str(path)
        return None

    def digest(self) -> str:
        """Returns a hash of all rows in their order: 128 bits as hexadecimal digits."""
        digest = hashlib.blake2b(self.turns.astype("<u4").tobytes(), digest_size=16)
        for table in self.data.select_columns(["row"]).with_format("arrow").iter(_BATCH):
            digest.update("\n".join(table["row"].to_pylist()).encode())
            digest.update(b"\n")
        return digest.hexdigest()
