"""Conditions on columns as people write them, in a field of the page and in its address:
`reward>=0.5; finish_reason=length; nums contains 25`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from swift_r1.errors import UsageError
from swift_r1.lab.runs.query import OPERATORS

_CONDITION = re.compile(r"\s*(?P<column>.+?)\s*(?P<operator><=|>=|!=|=|<|>|\bcontains\b)\s*(?P<value>.*?)\s*", re.S)


def read_conditions(text: str) -> list[tuple[str, str, Any]]:
    """Reads conditions for `CompletionQuery.where`: `null` is None, text in double quotes is text whatever it reads
    like. Raises UsageError for what is no condition."""
    found: list[tuple[str, str, Any]] = []
    for part in _parts(text):
        match = _CONDITION.fullmatch(part)
        if match is None or (match["value"] == "null" and match["operator"] not in ("=", "!=")):
            raise UsageError(f"{part.strip()!r} is no condition: write a column, one of {' '.join(OPERATORS)}, a value")
        value: Any = match["value"]
        quoted = len(value) > 1 and value[0] == value[-1] == '"'
        found.append((match["column"], match["operator"], value[1:-1] if quoted else _value(value)))
    return found


def _parts(text: str) -> Sequence[str]:
    """Returns what stands between semicolons, except between those in double quotes."""
    return [part for part in re.findall(r'(?:"[^"]*"|[^;])+', text) if part.strip()]


def _value(text: str) -> Any:
    if text == "null":
        return None
    try:
        return float(text)
    except ValueError:
        return text
