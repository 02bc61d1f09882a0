"""The completions of a run, or of its evaluations, as a table that can be asked while the file grows."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift_r1.lab.runs.failures import FAILURES, RIGHT, has_answer
from swift_r1.lab.runs.query import (
    CORRECT,
    FAILURE,
    JUDGED_TOO,
    CompletionQuery,
    Sql,
    all_of,
    index_condition,
    is_indexed,
    line_condition,
    order,
    order_keys,
    pointer,
    tables_of,
)
from swift_r1.lab.runs.stored import StoredLines
from swift_r1.record.lines import json_rows

if TYPE_CHECKING:
    import numpy

_REMEMBERED = 8  # queries whose matches are kept


class CompletionTable(StoredLines):
    """The rows of a `completions.jsonl` or `eval_completions.jsonl`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._db.create_function("has_answer", has_answer, ["VARCHAR"] * 3, "BOOLEAN")

    def _begin(self) -> None:
        super()._begin()
        self._rows(
            f'CREATE OR REPLACE TABLE judged (id INTEGER, "{CORRECT}" DOUBLE, "{FAILURE}" VARCHAR)'
        )
        self._matches: OrderedDict[CompletionQuery, numpy.ndarray] = OrderedDict()

    def _grown(self) -> None:
        self._matches.clear()

    @property
    def columns(self) -> list[str]:
        """Returns the columns of the file, in the order in which they first came; then those that are made here
        (`lab/runs/query.py`)."""
        return [*self._columns, FAILURE]

    def _judge(self) -> None:
        """Classes the completions that have come since the last time (`lab/runs/failures.py`)."""
        with self._lock:
            [(last,)] = self._rows("SELECT coalesce(max(id), 0) FROM judged")
            judged, values = self._judgement()
            statement = f'INSERT INTO judged SELECT id, "{CORRECT}", "{FAILURE}" FROM ({judged})'
            for _ in self._over_lines(Sql("id > ?", [last]), statement, values):
                pass

    def _judgement(self) -> Sql:
        """Returns a statement for `id`, `line`, CORRECT and FAILURE of the lines at hand. It parses each line
        twice: more often would take too much memory where lines are long."""
        rewards = [name for name in self._columns if name.startswith("rewards/")]
        fields = [*rewards, "reward", "finish_reason", "completion", "prompt"]
        place = {name: f"d[{number}]" for number, name in enumerate(fields, 1)}
        bad = [
            f"TRY_CAST({place[name]} AS DOUBLE) <= 0"
            for name in rewards
            if "format" in name.lower()
        ]
        statement = f"""
            SELECT id, line, correct AS "{CORRECT}", CASE
                WHEN TRY_CAST({place["reward"]} AS DOUBLE) IS NULL THEN 'invalid reward'
                WHEN correct >= {RIGHT} THEN 'right'
                WHEN {place["finish_reason"]} = 'length' THEN 'truncated'
                WHEN NOT has_answer(
                    coalesce(substr(first, {len("rewards/") + 1}), ''), coalesce({place["completion"]}, ''),
                    coalesce({place["prompt"]}, '')
                ) THEN 'no answer'
                WHEN {" OR ".join(bad) or "FALSE"} THEN 'wrong format'
                ELSE 'wrong value' END AS "{FAILURE}"
            FROM (SELECT *, TRY_CAST(d[list_position(?, first)] AS DOUBLE) AS correct FROM (
                SELECT *, json_extract_string(line, ?) AS d,
                    list_filter(json_keys(line), lambda key: starts_with(key, 'rewards/'))[1] AS first
                FROM lines
            ))
        """
        return Sql(statement, [rewards, [pointer(name) for name in fields]])

    def _ids(self, query: CompletionQuery) -> numpy.ndarray:
        """Returns the matching rows in their order, int32 `[matches]`."""
        query = replace(query, where=tuple(map(tuple, query.where)))
        with self._lock:
            if query not in self._matches:
                self._matches[query] = self._found(query)
                if len(self._matches) > _REMEMBERED:
                    self._matches.popitem(last=False)
            self._matches.move_to_end(query)
            return self._matches[query]

    def _found(self, query: CompletionQuery) -> numpy.ndarray:
        where = index_condition(query)
        in_lines = line_condition(query)
        keys = order_keys(query)
        tables = tables_of(query)
        if tables == JUDGED_TOO:
            self._judge()
        by_lines = query.order_by is not None and not is_indexed(query.order_by)
        by = order(query, ["as_number", "as_text"] if by_lines else [key.text for key in keys])
        if in_lines is None and not by_lines:
            return self._arrays(
                f"SELECT id FROM {tables} WHERE {where.text} ORDER BY {by}", where.values
            )["id"]
        if not by_lines:
            keys = [Sql("NULL", []), Sql("NULL", [])]
        number, text, condition = *keys, in_lines or all_of([])
        taken = f"SELECT id, {number.text}, {text.text} FROM lines WHERE {condition.text}"
        values = [*number.values, *text.values, *condition.values]
        with self._db.cursor() as cursor:
            cursor.execute(
                "CREATE TEMP TABLE found (id INTEGER, as_number DOUBLE, as_text VARCHAR)"
            )
            for _ in self._over_lines(where, f"INSERT INTO found {taken}", values, tables, cursor):
                pass
            return cursor.execute(
                f"SELECT id FROM found JOIN {tables} USING (id) ORDER BY {by}"
            ).fetchnumpy()["id"]

    def count(self, query: CompletionQuery) -> int:
        return len(self._ids(query))

    def page(
        self,
        query: CompletionQuery,
        offset: int = 0,
        limit: int = 50,
    ) -> list[dict[str, Any]]:
        """Returns rows as the file has them, and the columns that are made here. Raises ValueError as
        `lab/runs/query.py`."""
        with self._lock:
            return self._rows_of(
                self._ids(query)[max(0, offset) : max(0, offset) + max(0, limit)].tolist()
            )

    def _rows_of(self, ids: list[int]) -> list[dict[str, Any]]:
        """Returns the rows in this order, without lines that are no longer there, and those that are JSON for DuckDB
        alone, such as one with a comma before its end."""
        rows: dict[int, dict[str, Any]] = {}
        judged, values = self._judgement()
        statement = f'SELECT id, line, "{FAILURE}" FROM ({judged})'
        for cursor in self._over_lines(Sql("id IN (SELECT unnest(?))", [ids]), statement, values):
            for place, line, failure in cursor.fetchall():
                for row in json_rows(line.encode())[0]:
                    rows[place] = row | {FAILURE: failure}
        return [rows[place] for place in ids if place in rows]

    def group(self, step: int, group: int) -> list[dict[str, Any]]:
        """Returns a group's completions in their order; where the file lacks `number` they are numbered."""
        query = CompletionQuery(steps=(step, step), group=group, order_by="number")
        rows = self.page(query, 0, 10_000)
        return [{"number": place} | row for place, row in enumerate(rows)]

    def steps(self) -> list[int]:
        return [
            step for (step,) in self._rows("SELECT DISTINCT step FROM completions ORDER BY step")
        ]

    def failure_classes(self) -> list[dict[str, Any]]:
        """Counts by `step` the completions of each class of `FAILURES`."""
        self._judge()
        counts = self._rows(
            f'SELECT step, "{FAILURE}", count(*) FROM {JUDGED_TOO} GROUP BY ALL ORDER BY step'
        )
        by_step: dict[int, dict[str, Any]] = {}
        for step, failure, count in counts:
            by_step.setdefault(step, {"step": step} | dict.fromkeys(FAILURES, 0))[failure] = count
        return list(by_step.values())
