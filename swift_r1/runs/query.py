"""What completions are asked for, as SQL. Values are always parameters; a column of the file is a parameter too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

LENGTH = "completion/characters"
FAILURE = "completion/failure"
CORRECT = "completion/correct"
"""Columns that are not in the file: characters of the completion; its class (`runs/failures.py`); the value of its
first reward function, which tells whether it is right."""

STORED = {
    **{"step": "BIGINT", "group": "BIGINT", "number": "BIGINT", "weight_version": "BIGINT"},
    **{"reward": "DOUBLE", "advantage": "DOUBLE"},
    **{"prompt_id": "VARCHAR", "request_id": "VARCHAR", "finish_reason": "VARCHAR"},
}
"""Columns of the file that the table has as columns; the others are read from the line when they are asked for."""
JUDGED = {CORRECT: "DOUBLE", FAILURE: "VARCHAR"}
OPERATORS = ("=", "!=", "<", "<=", ">", ">=", "contains")

_SAME = {"=": "IS NOT DISTINCT FROM", "!=": "IS DISTINCT FROM"}


@dataclass(frozen=True)
class CompletionQuery:
    """Which completions, in which order; without `order_by` as they stand in the file."""

    steps: tuple[int, int] | None = None  # first and last
    prompt_id: str | None = None
    group: int | None = None
    finish_reason: str | None = None
    text: str | None = None  # in prompt or completion, whatever the case
    # (column, operator of `OPERATORS`, value): a number compares as a number, text as text, None is null. Text that
    # reads as a number compares as one with `<` and the like, and with a column of numbers
    where: Sequence[tuple[str, str, Any]] = ()
    order_by: str | None = None
    descending: bool = False  # null is last either way


class Sql(NamedTuple):
    """A piece of a statement, and the parameters of its question marks."""

    text: str
    values: list[Any]


def pointer(column: str) -> str:
    """The JSON pointer of a column."""
    return "/" + clean(column).replace("~", "~0").replace("/", "~1")


def clean(text: str) -> str:
    """Text that UTF-8 can say: lone surrogates become question marks."""
    return text.encode("utf-8", "replace").decode()


def as_text(column: str) -> Sql:
    if column == LENGTH or column in STORED or column in JUDGED:
        return Sql(f"CAST({_quoted(column)} AS VARCHAR)", [])
    return Sql("json_extract_string(line, ?)", [pointer(column)])


def as_number(column: str) -> Sql:
    if is_number(column):
        return Sql(_quoted(column), [])
    text, values = as_text(column)
    return Sql(f"TRY_CAST({text} AS DOUBLE)", values)


def is_number(column: str) -> bool:
    return column == LENGTH or (STORED | JUDGED).get(column, "VARCHAR") != "VARCHAR"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def source(query: CompletionQuery) -> str:
    """The tables that have the query's columns."""
    named = {query.order_by, *(column for column, _, _ in query.where)}
    return JUDGED_TOO if named & set(JUDGED) else "completions"


JUDGED_TOO = "completions JOIN judged USING (id)"


def condition(query: CompletionQuery) -> Sql:
    """What follows WHERE. Raises ValueError for an unknown operator, or one that null does not have."""
    parts: list[str] = ["TRUE"]
    values: list[Any] = []

    def add(text: str, *more: Any) -> None:
        parts.append(text)
        values.extend(more)

    if query.steps is not None:
        add("step BETWEEN ? AND ?", *query.steps)
    if query.prompt_id is not None:
        add("prompt_id = ?", clean(query.prompt_id))
    if query.group is not None:
        add('"group" = ?', query.group)
    if query.finish_reason is not None:
        add("finish_reason = ?", clean(query.finish_reason))
    if query.text:
        text = clean(query.text)
        if text.isascii():  # first in the whole line, as JSON writes it: only lines that have it are parsed
            add("contains(lower(line), lower(?))", json.dumps(text)[1:-1])
        found = "contains(lower(json_extract_string(line, ?)), lower(?))"
        add(f"({found} OR {found})", "/completion", text, "/prompt", text)
    for one in query.where:
        part = _comparison(*one)
        add(part.text, *part.values)
    return Sql(" AND ".join(parts), values)


def _comparison(column: str, operator: str, value: Any) -> Sql:
    if operator not in OPERATORS:
        raise ValueError(f"unknown operator {operator!r}: one of {' '.join(OPERATORS)}")
    if operator == "contains":
        text, values = as_text(column)
        return Sql(f"contains(lower({text}), lower(?))", [*values, clean(str(value))])
    if value is None and operator not in _SAME:
        raise ValueError(f"null is not {operator} anything")
    number = _number(value) if is_number(column) or operator not in _SAME or not isinstance(value, str) else None
    text, values = as_text(column) if number is None else as_number(column)
    if number is None and value is not None:
        value = str(value).lower() if isinstance(value, bool) else clean(str(value))
    return Sql(f"{text} {_SAME.get(operator, operator)} ?", [*values, value if number is None else number])


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def order(query: CompletionQuery) -> Sql:
    """What follows ORDER BY. Numbers of a column of the file come before its texts."""
    if query.order_by is None:
        return Sql("id DESC" if query.descending else "id", [])
    direction = "DESC NULLS LAST" if query.descending else "NULLS LAST"
    keys = [as_number(query.order_by)]
    if not is_number(query.order_by):
        keys.append(as_text(query.order_by))
    text = [f"{key.text} {direction}" for key in keys]
    return Sql(", ".join([*text, "id"]), [value for key in keys for value in key.values])
