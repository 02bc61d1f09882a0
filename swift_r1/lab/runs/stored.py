"""An index of a file of completions, made and kept up to date while the file grows.

A few columns of each line are kept by an in-memory DuckDB, and where the line stands. What else is asked of a line is
read from the file again, some megabytes at a time: neither the number nor the length of completions is bounded by
memory.
"""

from __future__ import annotations

import math
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from swift_r1.errors import UsageError
from swift_r1.lab.runs.query import STORED, Sql, pointer
from swift_r1.record.lines import GrowingFile, line_problems
from swift_r1.runtime.files import regular

if TYPE_CHECKING:
    import duckdb
    import numpy
    import pyarrow

MEMORY_LIMIT = "128MB"  # of DuckDB's, for one table
_THREADS = 2  # of DuckDB's: each has memory of its own
_AT_ONCE = 1024  # lines that one thread works on
_PIECE = 4 << 20  # bytes that are read at once
_BLOCK = 1 << 17  # lines whose places are looked up at once

_TYPED = ", ".join(
    f'TRY_CAST(d[{at}] AS {kind}) AS "{name}"' for at, (name, kind) in enumerate(STORED.items(), 1)
)
_INSERT = f"""
    INSERT INTO completions SELECT * FROM (
        SELECT id, start, stop, {_TYPED} FROM (
            SELECT id, start, stop, json_extract_string(line, {[pointer(name) for name in STORED]}) AS d FROM lines
        )
    ) WHERE step IS NOT NULL
"""


class StoredLines:
    """`path` need not be there yet. Several threads may use it. Close it, or use it as a context manager. Raises
    UsageError without the package duckdb.

    The table `completions` has a row for each line that is a completion: `id` (the number of the line), `start`, `stop`
    (where its bytes are), the columns of `STORED`.
    """

    def __init__(self, path: Path) -> None:
        try:
            import duckdb
        except ImportError as error:
            raise UsageError(
                "reading completions takes DuckDB: pip install 'swift-r1[view]'"
            ) from error
        self.path = path
        self._file = GrowingFile(path)
        self._lock = threading.RLock()
        self._folder = tempfile.TemporaryDirectory(prefix="swift-r1-")
        self._db = duckdb.connect(
            ":memory:",
            config={
                "memory_limit": MEMORY_LIMIT,
                "temp_directory": self._folder.name,
                "threads": _THREADS,
                "autoinstall_known_extensions": False,
                "autoload_known_extensions": False,
                "preserve_insertion_order": False,
            },
        )
        columns = {
            "id": "INTEGER",
            "start": "BIGINT",
            "stop": "BIGINT",
        } | STORED
        typed = ", ".join(f'"{name}" {kind}' for name, kind in columns.items())
        self._db.execute(f"CREATE TABLE completions ({typed})")
        self._begin()

    def _begin(self) -> None:
        """Forgets what was read."""
        self._rows("TRUNCATE completions")
        self._lines = 0  # read so far
        self._damaged = self._replaced = 0  # lines: no completions; with bytes that are not UTF-8
        self._mistyped: dict[str, int] = {}
        self._columns: dict[str, None] = {}  # of the file, in the order in which they first came

    def _grown(self) -> None:
        """There are new rows."""

    def close(self) -> None:
        self._db.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def refresh(self, seconds: float = math.inf) -> int:
        """Reads what has been added, for about that long at most; returns how many lines. More may be left where it is
        not 0."""
        until = time.monotonic() + seconds
        new = 0
        with self._lock:
            while True:
                restarts = self._file.restarts
                data = self._file.read(_PIECE)
                if self._file.restarts != restarts:
                    self._begin()
                    new = 0
                if not data:
                    return new
                before = self._lines
                self._take(data)
                new += self._lines - before
                self._grown()
                if time.monotonic() > until:
                    return new

    def _take(self, data: bytes) -> None:
        """Adds whole lines, those up to where the file has been read."""
        import duckdb
        import numpy

        ends = [0]
        end = 0
        while (end := data.find(b"\n", end) + 1) > 0:
            ends.append(end)
        bounds = numpy.array(ends, numpy.int64)
        first = self._lines + 1
        ids = numpy.arange(first, first + len(bounds) - 1)
        lines, replaced = _lines(data, ids, bounds)
        place = self._file.offset - len(data)
        for name, own in (("start", bounds[:-1] + place), ("stop", bounds[1:] + place)):
            lines = lines.append_column(name, integers(own))
        with self._db.cursor() as cursor:
            cursor.register("lines", lines)
            try:
                cursor.execute(_INSERT)
            except duckdb.InvalidInputException:  # a line is not JSON
                valid = cursor.execute(
                    "SELECT id FROM lines WHERE json_valid(line) ORDER BY id"
                ).fetchnumpy()["id"]
                cursor.register("lines", lines.take(valid - first))
                cursor.execute(_INSERT)
            self._note_columns(cursor)
        self._lines += len(ids)
        self._replaced += replaced
        self._damaged += len(ids) - self._checked(first)

    def _note_columns(self, cursor: duckdb.DuckDBPyConnection) -> None:
        keys = "SELECT id, unnest(json_keys(line)) AS key FROM lines"
        found = {key for (key,) in cursor.execute(f"SELECT DISTINCT key FROM ({keys})").fetchall()}
        while new := found - self._columns.keys():
            having = f"SELECT min(id) FROM ({keys}) WHERE key IN (SELECT unnest(?))"
            [(own,)] = cursor.execute(
                f"SELECT json_keys(line) FROM lines WHERE id = ({having})", [list(new)]
            ).fetchall()
            self._columns |= dict.fromkeys(own)

    def _checked(self, first: int) -> int:
        """Counts what a column of the table could not take, from the id `first`; returns how many completions there
        are."""
        for name in (name for name, kind in STORED.items() if kind != "VARCHAR"):
            empty = Sql(f'id >= ? AND "{name}" IS NULL', [first])
            wrong = f"SELECT count(*) FROM lines WHERE json_type(line, '/{name}') <> 'NULL'"
            count = sum(cursor.fetchall()[0][0] for cursor in self._over_lines(empty, wrong))
            if count:
                self._mistyped[name] = self._mistyped.get(name, 0) + count
        return int(self._rows("SELECT count(*) FROM completions WHERE id >= ?", [first])[0][0])

    @property
    def state(self) -> tuple[int, int]:
        """Returns a value that changes when there is something new; who shares the table knows by it what others have
        read."""
        return self._lines, self._file.restarts

    @property
    def problems(self) -> list[str]:
        """Returns what is wrong with the file, a line each."""
        with self._lock:
            name = self.path.name
            found = line_problems(self._file, self._damaged)
            if self._replaced:
                found.append(
                    f"{name}: bytes that are not UTF-8 are replaced, in {self._replaced} lines"
                )
            found += [
                f"{name}: {column} is not a number in {count} rows"
                for column, count in self._mistyped.items()
            ]
            return found

    def _rows(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._db.cursor() as cursor:
            return cursor.execute(statement, list(values)).fetchall()

    def _arrays(self, statement: str, values: Sequence[Any] = ()) -> dict[str, numpy.ndarray]:
        with self._db.cursor() as cursor:
            return cursor.execute(statement, list(values)).fetchnumpy()

    def _over_lines(
        self,
        which: Sql,
        statement: str,
        values: Sequence[Any] = (),
        tables: str = "completions",
        cursor: duckdb.DuckDBPyConnection | None = None,
    ) -> Iterator[duckdb.DuckDBPyConnection]:
        """Runs a statement again and again, each time with other lines in the table `lines` (`id`, `line`),
        together those of the rows of `tables` that fulfil `which`. Yields the results, in the order of the file."""
        with self._db.cursor() if cursor is None else nullcontext(cursor) as own:
            for lines in self._read(which, tables):
                own.register("lines", lines)
                yield own.execute(statement, list(values))

    def _read(self, which: Sql, tables: str = "completions") -> Iterator[pyarrow.Table]:
        """Lines of the file by id. Those that are no longer there are left out."""
        try:
            file = regular(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # `refresh` will say so
            return
        try:
            if not self._file.is_same(file):  # `refresh` will begin again
                return
            statement = f"""
                SELECT id, start, stop FROM {tables} WHERE id > ? AND id <= ? AND ({which.text}) ORDER BY id
            """
            for first in range(0, self._lines, _BLOCK):
                rows = self._arrays(statement, [first, first + _BLOCK, *which.values])
                yield from _lines_at(file, rows["id"], rows["start"], rows["stop"])
        finally:
            os.close(file)


def _lines_at(
    file: int, ids: numpy.ndarray, starts: numpy.ndarray, stops: numpy.ndarray
) -> Iterator[pyarrow.Table]:
    """Reads the `N` lines of an open file that stand from `starts` to `stops`, each int64 `[N]`; ends where the file
    was cut."""
    import numpy

    ends = numpy.cumsum(stops - starts)  # where each line would end, one after the other
    at = 0
    while at < len(ids):
        first = int(ends[at] - (stops[at] - starts[at]))
        to = max(at + 1, int(numpy.searchsorted(ends, first + _PIECE, "right")))
        jumps = numpy.flatnonzero(starts[at + 1 : to] != stops[at : to - 1]) + at + 1
        runs = pairwise([at, *jumps.tolist(), to])
        parts = [
            os.pread(file, stops[end - 1] - starts[begin], starts[begin]) for begin, end in runs
        ]
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        bounds = numpy.concatenate([[0], ends[at:to] - first])
        if len(data) < bounds[-1]:
            return
        yield _lines(data, ids[at:to], bounds)[0]
        at = to


def _lines(data: bytes, ids: numpy.ndarray, bounds: numpy.ndarray) -> tuple[pyarrow.Table, int]:
    """Returns the `N` lines of `data` as `id`, `line`, and how many of them had bytes that are not UTF-8, which are
    replaced. Copies nothing where it can. `ids` is whole numbers `[N]`, `bounds` int64 `[N + 1]`."""
    import pyarrow as pa

    replaced = 0
    try:
        data.decode()
        lines = pa.LargeStringArray.from_buffers(len(ids), pa.py_buffer(bounds), pa.py_buffer(data))
    except UnicodeDecodeError:
        parts = [data[start:stop] for start, stop in pairwise(bounds.tolist())]
        texts = [part.decode("utf-8", "replace") for part in parts]
        replaced = sum(text.encode() != part for text, part in zip(texts, parts, strict=True))
        lines = pa.array(texts, pa.large_string())
    table = pa.table({"id": integers(ids), "line": lines})
    return pa.Table.from_batches(table.to_batches(max_chunksize=_AT_ONCE)), replaced


def integers(values: numpy.ndarray) -> pyarrow.Array:
    """Returns an array of int64, without the import of pandas that `pyarrow.array` begins with."""
    import numpy
    import pyarrow as pa

    wide = values.astype(numpy.int64, copy=False)
    return pa.Array.from_buffers(pa.int64(), len(wide), [None, pa.py_buffer(wide)])
