"""A query of completions, as SQL. Values are always parameters; a column of the file is a parameter too."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from swift_r1.errors import UsageError

FAILURE = "completion/failure"
CORRECT = "completion/correct"
"""Columns that are not in the file: the class of the completion (`lab/runs/failures.py`); the value of its first reward
function, which tells whether it is right."""

STORED = {
    "step": "BIGINT",
    "group": "BIGINT",
    "number": "BIGINT",
    "tokens": "BIGINT",
    "weight_version": "BIGINT",
    "reward": "DOUBLE",
    "advantage": "DOUBLE",
    "prompt_id": "VARCHAR",
    "request_id": "VARCHAR",
    "finish_reason": "VARCHAR",
}
"""Columns of the file that the table `completions` has; the others are read from the lines when they are asked for."""
JUDGED = {CORRECT: "DOUBLE", FAILURE: "VARCHAR"}
_INDEXED = STORED | JUDGED
OPERATORS = ("=", "!=", "<", "<=", ">", ">=", "contains")

_CONDITION = re.compile(
    r"\s*(?P<column>.+?)\s*(?P<operator><=|>=|!=|=|<|>|\bcontains\b)\s*(?P<value>.*?)\s*", re.S
)
_SAME = {"=": "IS NOT DISTINCT FROM", "!=": "IS DISTINCT FROM"}


Condition = tuple[str, str, Any]
"""A column, one of `OPERATORS`, and a value."""


@dataclass(frozen=True)
class CompletionQuery:
    """A choice of completions, and their order; without `order_by` as they stand in the file."""

    steps: tuple[int, int] | None = None  # first and last
    prompt_id: str | None = None
    group: int | None = None
    text: str | None = None  # in prompt or completion, whatever the case
    # a number compares as a number, text as text, None is null. Text that
    # reads as a number compares as one with `<` and the like, and with a column of numbers
    where: Sequence[Condition] = ()
    order_by: str | None = None
    descending: bool = False  # null is last either way


class Sql(NamedTuple):
    """A piece of a statement, and the parameters of its question marks."""

    text: str
    values: list[Any]


def all_of(parts: Sequence[Sql]) -> Sql:
    return Sql(
        " AND ".join(["TRUE", *(part.text for part in parts)]),
        [one for part in parts for one in part.values],
    )


def pointer(column: str) -> str:
    """Returns the JSON pointer of a column."""
    return "/" + clean(column).replace("~", "~0").replace("/", "~1")


def clean(text: str) -> str:
    """Returns the text as UTF-8 can say it: lone surrogates become question marks."""
    return text.encode("utf-8", "replace").decode()


def is_indexed(column: str) -> bool:
    """Returns whether the column is in the tables `completions` or `judged`; else it is in the lines alone."""
    return column in _INDEXED


def is_number(column: str) -> bool:
    return _INDEXED.get(column, "VARCHAR") != "VARCHAR"


def as_text(column: str) -> Sql:
    if is_indexed(column):
        return Sql(f'CAST("{column}" AS VARCHAR)', [])
    return Sql("json_extract_string(line, ?)", [pointer(column)])


def as_number(column: str) -> Sql:
    if is_number(column):
        return Sql(f'"{column}"', [])
    text, values = as_text(column)
    return Sql(f"TRY_CAST({text} AS DOUBLE)", values)


def tables_of(query: CompletionQuery) -> str:
    """Returns the tables with the indexed columns of a query."""
    named = {query.order_by, *(column for column, _, _ in query.where)}
    return JUDGED_TOO if named & set(JUDGED) else "completions"


JUDGED_TOO = "completions JOIN judged USING (id)"


def index_condition(query: CompletionQuery) -> Sql:
    """Returns the condition that the index can tell. Raises ValueError for an unknown operator, or one that null does
    not have."""
    parts = [_comparison(*one) for one in query.where if is_indexed(one[0])]
    if query.steps is not None:
        parts.append(Sql("step BETWEEN ? AND ?", [*map(_bounded, query.steps)]))
    if query.group is not None:
        parts.append(Sql('"group" = ?', [_bounded(query.group)]))
    if query.prompt_id is not None:
        parts.append(Sql("prompt_id = ?", [clean(query.prompt_id)]))
    return all_of(parts)


def _bounded(number: int) -> int:
    """Cuts a number to the 64 bits that such columns have: an address may say anything."""
    return max(-(1 << 63), min((1 << 63) - 1, number))


def line_condition(query: CompletionQuery) -> Sql | None:
    """Returns the condition that the lines must be read for; None if there is none. Raises ValueError for an unknown
    operator, or one that null does not have."""
    where = all_of([_comparison(*one) for one in query.where if not is_indexed(one[0])])
    if not query.text:
        return where if where.values else None
    # In one of the two, which a zero byte keeps apart; the columns first: they cost less.
    both = "array_to_string(json_extract_string(line, ['/prompt', '/completion']), chr(0))"
    text = f"CASE WHEN {where.text} THEN contains(lower({both}), lower(?)) END"
    return Sql(text, [*where.values, clean(query.text)])


def _comparison(column: str, operator: str, value: Any) -> Sql:
    if operator not in OPERATORS:
        raise ValueError(f"unknown operator {operator!r}: one of {' '.join(OPERATORS)}")
    if operator == "contains":
        text, values = as_text(column)
        return Sql(f"contains(lower({text}), lower(?))", [*values, clean(str(value))])
    if value is None and operator not in _SAME:
        raise ValueError(f"null is not {operator} anything")
    number = (
        _number(value)
        if is_number(column) or operator not in _SAME or not isinstance(value, str)
        else None
    )
    text, values = as_text(column) if number is None else as_number(column)
    if number is None and value is not None:
        value = str(value).lower() if isinstance(value, bool) else clean(str(value))
    return Sql(
        f"{text} {_SAME.get(operator, operator)} ?", [*values, value if number is None else number]
    )


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def order_keys(query: CompletionQuery) -> list[Sql]:
    """Returns what is sorted by before the place in the file. In a column of the lines numbers come before texts."""
    if query.order_by is None:
        return []
    number = as_number(query.order_by)
    return [number] if is_number(query.order_by) else [number, as_text(query.order_by)]


def order(query: CompletionQuery, keys: Sequence[str]) -> str:
    """Returns what follows ORDER BY, of these names or terms."""
    direction = "DESC NULLS LAST" if query.descending else "NULLS LAST"
    return ", ".join(
        [
            *(f"{key} {direction}" for key in keys),
            "id DESC" if query.descending and not keys else "id",
        ]
    )


def read_conditions(text: str) -> list[Condition]:
    """Reads conditions as people write them, `reward>=0.5; finish_reason=length; nums contains 25`, for
    `CompletionQuery.where`: `null` is None, text in double quotes is text whatever it reads
    like. Raises UsageError for what is no condition."""
    found: list[Condition] = []
    for part in condition_parts(text):
        match = _CONDITION.fullmatch(part)
        if match is None or (match["value"] == "null" and match["operator"] not in ("=", "!=")):
            raise UsageError(
                f"{part.strip()!r} is not a condition: write column operator value, such as reward>=0.5; operators: "
                f"{' '.join(OPERATORS)}"
            )
        if not match["value"]:
            raise UsageError(f"{part.strip()!r}: a value is missing after {match['operator']}")
        value: Any = match["value"]
        quoted = len(value) > 1 and value[0] == value[-1] == '"'
        found.append((match["column"], match["operator"], value[1:-1] if quoted else _value(value)))
    return found


def condition_parts(text: str) -> Sequence[str]:
    """Returns what stands between semicolons, except between those in double quotes."""
    return [part for part in re.findall(r'(?:"[^"]*"|[^;])+', text) if part.strip()]


def _value(text: str) -> Any:
    if text == "null":
        return None
    try:
        return float(text)
    except ValueError:
        return text
