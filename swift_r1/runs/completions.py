"""The completions of a run, or of its evaluations, as a table that can be asked while the file grows.

The lines are held by an in-memory DuckDB as they are, so that what is shown is what the file says; a few columns are
taken out of them, the others are read from the lines when they are asked for. What is above the memory limit goes to a
temporary folder of its own.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from swift_r1.errors import UsageError
from swift_r1.runs.failures import FAILURES, RIGHT, has_answer
from swift_r1.runs.lines import GrowingFile, line_problems
from swift_r1.runs.query import (
    CORRECT,
    FAILURE,
    JUDGED_TOO,
    LENGTH,
    STORED,
    CompletionQuery,
    as_number,
    clean,
    condition,
    order,
    pointer,
    source,
)

if TYPE_CHECKING:
    import numpy

MEMORY_LIMIT = "256MB"  # of DuckDB's, for one table
_REMEMBERED = 8  # queries whose matches are kept
_MOST_STEPS = 200  # of a heat map, bins

_FIELDS = [*STORED, "completion"]
_TYPED = ", ".join(f'TRY_CAST(d[{at}] AS {kind}) AS "{name}"' for at, (name, kind) in enumerate(STORED.items(), 1))
_INSERT = f"""
    INSERT INTO completions SELECT id, {_TYPED}, length(d[{len(_FIELDS)}]), line FROM (
        SELECT id, line, json_extract_string(line, {[pointer(name) for name in _FIELDS]}) AS d FROM lines
    )
"""


@dataclass(frozen=True)
class Heatmap:
    """How many completions have a value: `counts[i][j]` from step `steps[i]` (up to the next) and from `edges[j]` to
    `edges[j + 1]`."""

    steps: list[int]
    edges: list[float]
    counts: list[list[int]]


class CompletionTable:
    """`path` is a `completions.jsonl` or `eval_completions.jsonl`, which need not be there yet. Several threads may use
    it. Close it, or use it as a context manager. Raises UsageError without the package duckdb."""

    def __init__(self, path: Path) -> None:
        try:
            import duckdb
        except ImportError as error:
            raise UsageError("reading completions takes DuckDB: pip install 'swift-r1[view]'") from error
        self.path = path
        self._file = GrowingFile(path)
        self._refreshing = threading.RLock()
        self._folder = tempfile.TemporaryDirectory(prefix="swift-r1-")
        self._db = duckdb.connect(
            ":memory:",
            config={
                "memory_limit": MEMORY_LIMIT,
                "temp_directory": self._folder.name,
                "threads": min(4, os.cpu_count() or 1),
                "autoinstall_known_extensions": False,
                "autoload_known_extensions": False,
                "preserve_insertion_order": False,
            },
        )
        typed = ", ".join(f'"{name}" {kind}' for name, kind in (STORED | {LENGTH: "BIGINT"}).items())
        self._db.execute(f"CREATE TABLE completions (id BIGINT, {typed}, line VARCHAR)")
        self._db.execute(f'CREATE TABLE judged (id BIGINT, "{CORRECT}" DOUBLE, "{FAILURE}" VARCHAR)')
        self._db.create_function("has_answer", has_answer, ["VARCHAR"] * 3, "BOOLEAN")  # type: ignore[list-item]
        self._begin()

    def _begin(self) -> None:
        self._lines = 0  # read so far; a row's id is the number of its line
        self._damaged = self._replaced = 0  # lines: no completions; with bytes that are not UTF-8
        self._mistyped: dict[str, int] = {}
        self._columns: dict[str, None] = {}  # in the order in which they first came
        self._columns_to = self._judged_to = 0  # the last line that was looked at
        self._matches: OrderedDict[CompletionQuery, numpy.ndarray] = OrderedDict()

    def close(self) -> None:
        self._db.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Reading the file

    def refresh(self, seconds: float = math.inf) -> int:
        """Reads what has been added, for about that long at most; returns how many lines. More may be left where it is
        not 0."""
        until, before = time.monotonic() + seconds, self._lines
        with self._refreshing:
            while True:
                restarts = self._file.restarts
                data = self._file.read()
                if self._file.restarts != restarts:
                    self._db.execute("TRUNCATE completions; TRUNCATE judged")
                    self._begin()
                    before = 0
                if not data:
                    return self._lines - before
                self._take(data)
                if time.monotonic() > until:
                    return self._lines - before

    def _take(self, data: bytes) -> None:
        """Adds whole lines."""
        import duckdb
        import numpy
        import pyarrow as pa

        try:
            data.decode()
        except UnicodeDecodeError:
            lines = data.split(b"\n")
            fixed = [line.decode("utf-8", "replace").encode() for line in lines]
            self._replaced += sum(one != other for one, other in zip(lines, fixed, strict=True))
            data = b"\n".join(fixed)
        ends, end = [0], 0
        while (end := data.find(b"\n", end) + 1) > 0:
            ends.append(end)
        count, first = len(ends) - 1, self._lines + 1
        offsets = pa.py_buffer(numpy.array(ends, numpy.int64))
        text = pa.LargeStringArray.from_buffers(count, offsets, pa.py_buffer(data))
        ids = pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(numpy.arange(first, first + count))])
        self._db.register("lines", pa.table({"id": ids, "line": text}))
        try:
            self._db.execute(_INSERT)
        except duckdb.InvalidInputException:  # a line is no JSON
            self._db.execute("CREATE TEMP TABLE whole AS SELECT * FROM lines WHERE json_valid(line)")
            self._db.execute(_INSERT.replace("FROM lines", "FROM whole"))
            self._db.execute("DROP TABLE whole")
        self._lines += count
        self._damaged += count - self._checked(first)
        self._matches.clear()

    def _checked(self, first: int) -> int:
        """Takes out what is no completion, from the id `first`, and counts what a column of the table could not take;
        returns how many are left."""
        names = [name for name, kind in STORED.items() if kind != "VARCHAR"]
        counts = ", ".join(  # what is null is parsed again
            f"count(*) FILTER (CASE WHEN \"{name}\" IS NULL THEN json_type(line, '/{name}') <> 'NULL' END)"
            for name in names
        )
        self._rows("DELETE FROM completions WHERE id >= ? AND step IS NULL", [first])
        [(left, *found)] = self._rows(f"SELECT count(*), {counts} FROM completions WHERE id >= ?", [first])
        for name, count in zip(names, found, strict=True):
            if count:
                self._mistyped[name] = self._mistyped.get(name, 0) + count
        return int(left)

    @property
    def problems(self) -> list[str]:
        """What is wrong with the file, a line each."""
        name, found = self.path.name, line_problems(self._file, self._damaged)
        if self._replaced:
            found.append(f"{name}: bytes that are not UTF-8 are replaced, in {self._replaced} lines")
        found += [f"{name}: {column} is not a number in {count} rows" for column, count in self._mistyped.items()]
        return found

    # Asking

    def _rows(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._db.cursor() as cursor:
            return cursor.execute(statement, list(values)).fetchall()

    @property
    def columns(self) -> list[str]:
        """Of the file, in the order in which they first came; then those that are made here (`runs/query.py`)."""
        with self._refreshing:
            keys = "SELECT id, unnest(json_keys(line)) AS key FROM completions WHERE id > ?"
            found = self._rows(f"SELECT min(id), key FROM ({keys}) GROUP BY key", [self._columns_to])
            for first in sorted({first for first, key in found if key not in self._columns}):
                [(line,)] = self._rows("SELECT line FROM completions WHERE id = ?", [first])
                self._columns |= dict.fromkeys(json.loads(line))
            self._columns_to = self._lines
            return [*self._columns, LENGTH, FAILURE]

    def _judge(self) -> None:
        """Classes the completions that have come since the last time (`runs/failures.py`)."""
        with self._refreshing:
            if self._judged_to < self._lines:
                statement, values = self._judgement(self.columns, "id > ?")
                self._rows(f"INSERT INTO judged {statement}", [*values, self._judged_to])
                self._judged_to = self._lines

    @staticmethod
    def _judgement(columns: Iterable[str], which: str) -> tuple[str, list[Any]]:
        """A statement for `id`, CORRECT and FAILURE of the completions of a condition, which have these columns; and
        its parameters, to which those of the condition are added."""
        rewards = [name for name in columns if name.startswith("rewards/")]
        formats = [name for name in rewards if "format" in name.lower()]
        names = " ".join("WHEN json_exists(line, ?) THEN ?" for _ in rewards)
        first = f"CASE {names} END" if rewards else "NULL"
        bad = " OR ".join("TRY_CAST(json_extract_string(line, ?) AS DOUBLE) <= 0" for _ in formats) or "FALSE"
        statement = f"""
            SELECT id, correct AS "{CORRECT}", CASE
                WHEN reward IS NULL THEN 'invalid reward'
                WHEN correct >= {RIGHT} THEN 'right'
                WHEN finish_reason = 'length' THEN 'truncated'
                WHEN NOT has_answer(
                    coalesce(first, ''), coalesce(json_extract_string(line, '/completion'), ''),
                    coalesce(json_extract_string(line, '/prompt'), '')
                ) THEN 'no answer'
                WHEN {bad} THEN 'wrong format'
                ELSE 'wrong value' END AS "{FAILURE}"
            FROM (SELECT *, TRY_CAST(json_extract_string(
                line, '/rewards~1' || replace(replace(first, '~', '~0'), '/', '~1')) AS DOUBLE) AS correct
                FROM (SELECT *, {first} AS first FROM completions WHERE {which}))
        """
        called = [item for name in rewards for item in (pointer(name), name.removeprefix("rewards/"))]
        return statement, [*map(pointer, formats), *called]

    def _ids(self, query: CompletionQuery) -> numpy.ndarray:
        """The matching rows in their order, int64 `[matches]`."""
        with self._refreshing:
            query = _hashable(query)
            if query not in self._matches:
                tables, where, by = source(query), condition(query), order(query)
                if tables == JUDGED_TOO:
                    self._judge()
                with self._db.cursor() as cursor:
                    cursor.execute(
                        f"SELECT id FROM {tables} WHERE {where.text} ORDER BY {by.text}", [*where.values, *by.values]
                    )
                    self._matches[query] = cursor.fetchnumpy()["id"]
                if len(self._matches) > _REMEMBERED:
                    self._matches.popitem(last=False)
            self._matches.move_to_end(query)
            return self._matches[query]

    def count(self, query: CompletionQuery) -> int:
        return len(self._ids(query))

    def page(
        self, query: CompletionQuery, offset: int = 0, limit: int = 50, longest: int | None = None
    ) -> list[dict[str, Any]]:
        """Rows as the file has them, and the columns that are made here. Texts of more than `longest` characters are
        cut, and end in an ellipsis. Raises ValueError as `runs/query.py`."""
        with self._refreshing:
            wanted = self._ids(query)[max(0, offset) : max(0, offset) + max(0, limit)].tolist()
            found = {
                place: json.loads(line) | {LENGTH: length}
                for place, length, line in self._rows(
                    f'SELECT id, "{LENGTH}", line FROM completions WHERE id IN (SELECT unnest(?))', [wanted]
                )
            }
            columns = dict.fromkeys(name for row in found.values() for name in row)
            statement, values = self._judgement(columns, "id IN (SELECT unnest(?))")
            for place, _, failure in self._rows(statement, [*values, wanted]):
                found[place][FAILURE] = failure
        rows = [found[place] for place in wanted]
        return rows if longest is None else [cut(row, longest) for row in rows]

    def group(self, step: int, group: int) -> list[dict[str, Any]]:
        """A group's completions in their order; where the file lacks `number` they are numbered."""
        query = CompletionQuery(steps=(step, step), group=group, order_by="number")
        return [{"number": place} | row for place, row in enumerate(self.page(query, limit=10_000))]

    def of_prompt(self, prompt_id: str, limit: int = 1_000) -> list[dict[str, Any]]:
        """The completions of a prompt, the first step first."""
        return self.page(CompletionQuery(prompt_id=prompt_id, order_by="step"), limit=limit)

    def prompts(self, search: str = "", limit: int = 100) -> list[dict[str, Any]]:
        """Prompts whose id or text has `search`, those seen at most steps first: `prompt_id`, `prompt`, `completions`,
        `steps` (how many), `first`, `last` (steps), `reward` (the mean)."""
        names = ("prompt_id", "prompt", "completions", "steps", "first", "last", "reward")
        found = self._rows(
            """
            SELECT p.prompt_id, json_extract_string(line, '/prompt') AS prompt, n, steps, first, last, mean FROM (
                SELECT prompt_id, min(id) AS id, count(*) AS n, count(DISTINCT step) AS steps,
                    min(step) AS first, max(step) AS last, avg(reward) AS mean
                FROM completions WHERE prompt_id IS NOT NULL GROUP BY prompt_id
            ) p JOIN completions USING (id)
            WHERE contains(lower(p.prompt_id), lower(?)) OR contains(lower(prompt), lower(?))
            ORDER BY steps DESC, p.id LIMIT ?
            """,
            [clean(search), clean(search), limit],
        )
        return [dict(zip(names, row, strict=True)) for row in found]

    def steps(self) -> list[int]:
        return [step for (step,) in self._rows("SELECT DISTINCT step FROM completions ORDER BY step")]

    def heatmap(self, column: str, bins: int = 30) -> Heatmap:
        """Of a column of numbers over the steps; several steps share a bin where there are very many."""
        import numpy

        self._judge()
        value = as_number(column)
        with self._db.cursor() as cursor:
            cursor.execute(f"SELECT step, {value.text} AS value FROM {JUDGED_TOO}", value.values)
            found = cursor.fetchnumpy()
        values = numpy.ma.filled(found["value"].astype(float), numpy.nan)
        known = numpy.isfinite(values)
        if not known.any():
            return Heatmap([], [], [])
        steps, row = numpy.unique(found["step"], return_inverse=True)
        each = math.ceil(len(steps) / _MOST_STEPS)
        edges = numpy.histogram_bin_edges(values[known], bins)
        size = (math.ceil(len(steps) / each), bins)
        place = numpy.clip(numpy.searchsorted(edges, values[known], "right") - 1, 0, bins - 1)
        counts = numpy.bincount((row[known] // each) * bins + place, minlength=math.prod(size)).reshape(size)
        return Heatmap(steps[::each].tolist(), edges.tolist(), counts.tolist())

    def group_shares(self) -> list[dict[str, Any]]:
        """By `step`: `groups`, and the shares of them that are all `right`, all `wrong` and `mixed`. Right is where the
        first reward is at least 1."""
        self._judge()
        found = self._rows(
            f"""
            SELECT step, count(*), avg(CAST(every AS DOUBLE)), avg(CAST(NOT any_ AS DOUBLE)) FROM (
                SELECT step, bool_and("{FAILURE}" = 'right') AS every, bool_or("{FAILURE}" = 'right') AS any_
                FROM {JUDGED_TOO} GROUP BY step, "group", request_id
            ) GROUP BY step ORDER BY step
            """
        )
        return [
            {"step": step, "groups": groups, "right": right, "wrong": wrong, "mixed": max(0.0, 1 - right - wrong)}
            for step, groups, right, wrong in found
        ]

    def failure_classes(self) -> list[dict[str, Any]]:
        """By `step`: how many completions are of each class of `FAILURES`."""
        self._judge()
        found = self._rows(f'SELECT step, "{FAILURE}", count(*) FROM {JUDGED_TOO} GROUP BY ALL ORDER BY step')
        by_step: dict[int, dict[str, Any]] = {}
        for step, failure, count in found:
            by_step.setdefault(step, {"step": step} | dict.fromkeys(FAILURES, 0))[failure] = count
        return list(by_step.values())


def cut(value: Any, longest: int) -> Any:
    """A JSON value with its texts cut to so many characters."""
    if isinstance(value, str):
        return value if len(value) <= longest else value[:longest] + "…"
    if isinstance(value, list):
        return [cut(item, longest) for item in value]
    return {key: cut(item, longest) for key, item in value.items()} if isinstance(value, dict) else value


def _hashable(query: CompletionQuery) -> CompletionQuery:
    from dataclasses import replace

    return replace(query, where=tuple(map(tuple, query.where)))
