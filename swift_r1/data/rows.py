"""Preprocessing raw rows into training rows, and the account of those that broke."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from swift_r1.data.files import RawRow
from swift_r1.data.preprocessors import preprocess_row, rename_columns
from swift_r1.data.sources import Source, describe
from swift_r1.errors import UsageError

Row = dict[str, Any]

# What rewards get beside the dataset's columns; a column of such a name would be overwritten in silence.
RESERVED = frozenset(
    ("completions", "dataset", "finish_reason", "is_truncated", "prompt_id", "request_id", "response_token_ids")
) | {"rollout_infos", "trainer_state"}
_ROLES = frozenset(("system", "user", "assistant", "tool", "tool_call", "tool_response"))
_SHOWN = 3


class RowFault(ValueError):
    """A row that cannot be trained on, and why."""


@dataclass
class Drops:
    """Rows that were left out: how many, and the first three with where they are and what is wrong."""

    seen: int = 0
    broken: int = 0
    filtered: int = 0
    examples: list[str] = field(default_factory=list)

    def add_broken(self, where: str, cause: str) -> None:
        """Counts a broken row and keeps the first few to show."""
        self.broken += 1
        if len(self.examples) < _SHOWN:
            self.examples.append(f"{where}: {cause}")

    def merge(self, other: Drops) -> None:
        """Adds what came later."""
        self.seen += other.seen
        self.broken += other.broken
        self.filtered += other.filtered
        self.examples += other.examples[: _SHOWN - len(self.examples)]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; the arguments of another like it."""
        return asdict(self)


def preprocessed(
    source: Source,
    raws: Iterable[RawRow],
    columns: Mapping[str, str],
    drops: Drops,
    tag: str = "",
    strict: bool = False,
) -> Iterator[Row]:
    """Training rows of `source`: `messages` without the reference answer, all other columns, `dataset`, `prompt_id`.

    Broken rows and rows whose preprocessor returns None are counted in `drops`. `prompt_id` is
    `<label><tag>:<row index>`.

    Raises:
        UsageError: a column has a name of ours, or `columns` renames one onto another; with `strict`, a broken row.
    """
    for raw, number, row in results(source, raws, columns, drops, strict):
        suffix = f".{number}" if number else ""
        yield {**row, "dataset": source.name, "prompt_id": f"{source.label}{tag}:{raw.index}{suffix}"}


def results(
    source: Source, raws: Iterable[RawRow], columns: Mapping[str, str], drops: Drops, strict: bool = False
) -> Iterator[tuple[RawRow, int, Row]]:
    """What `preprocessed` gives without `dataset` and `prompt_id`: the raw row, which of its rows it is, and that."""
    checked: set[tuple[str, ...]] = set()
    for raw in raws:
        drops.seen += 1
        fault = raw.fault
        rows: list[Row] = []
        if fault is None:
            renamed = _renamed(raw, columns)
            try:
                rows = _as_list(preprocess_row(source.preprocess_of(raw), renamed))
                for row in rows:
                    row["messages"] = prompt_messages(row)
            except UsageError:
                raise
            except RowFault as error:
                fault = str(error)
            except Exception as error:  # noqa: BLE001  a user's preprocessor may raise anything
                fault = describe(error)
        if fault is not None:
            if strict:
                raise UsageError(f"--strict true: dataset {source.name}: {raw.where}: {fault}")
            drops.add_broken(raw.where, fault)
            continue
        drops.filtered += not rows
        for number, row in enumerate(rows):
            keys = tuple(row)
            if keys not in checked:
                _refuse_reserved(source, keys)
                checked.add(keys)
            yield raw, number, row


def _renamed(raw: RawRow, columns: Mapping[str, str]) -> Row:
    if not columns:
        return raw.row
    row = rename_columns(raw.row, columns)
    lowered = {old.lower(): new for old, new in columns.items()}
    kept = all(row.get(lowered[name.lower()]) is value for name, value in raw.row.items() if name.lower() in lowered)
    if len(row) < len(raw.row) or not kept:
        raise UsageError(f"--columns {json.dumps(dict(columns))}: {raw.where} has a column of the new name already")
    return row


def _as_list(result: Any) -> list[Row]:
    if result is None:
        return []
    results = result if isinstance(result, list) else [result]
    for one in results:
        if not isinstance(one, dict):
            raise RowFault(f"the preprocessor returned a {type(one).__name__}, not a row (dict)")
    return [dict(one) for one in results]


def _refuse_reserved(source: Source, keys: Sequence[str]) -> None:
    clashing = sorted(RESERVED.intersection(keys))
    if clashing:
        raise UsageError(
            f"dataset {source.name} has a column {clashing[0]}, a name that rewards get from us; "
            f'rename it: --columns \'{{"{clashing[0]}": "..."}}\''
        )


def prompt_messages(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """The messages of a preprocessed row that make its prompt: the trailing reference answer is cut off.

    Raises:
        RowFault: no messages, an unknown role, content that is no text, or no user's turn at the end.
    """
    messages = row.get("messages")

    def columns() -> str:
        return ", ".join(str(key) for key in row if key != "messages") or "none"

    if not isinstance(messages, list | tuple):
        raise RowFault(f"no messages after preprocessing (other columns: {columns()})")
    end = len(messages)
    while end and isinstance(messages[end - 1], Mapping) and messages[end - 1].get("role") == "assistant":
        end -= 1  # unchecked: a reference answer may be a number
    prompt = [_message(message) for message in messages[:end]]
    if not prompt or prompt[-1]["role"] == "system":
        raise RowFault(f"no prompt: no column is a question or a user message (other columns: {columns()})")
    return prompt


def _message(message: Any) -> dict[str, str]:
    if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
        raise RowFault("a message is not an object with role and content")
    role, content = message["role"], message["content"]
    if role not in _ROLES:
        raise RowFault(f"unknown role {role!r} in messages")
    if not isinstance(content, str):
        raise RowFault(f"the content of the {role} message is a {type(content).__name__}, not text")
    if "\0" in content:
        raise RowFault(f"the content of the {role} message has a NUL character in it")
    return {"role": role, "content": content}


def prompt_key(row: Mapping[str, Any]) -> str:
    """What makes two rows the same prompt."""
    return json.dumps([[message["role"], message["content"]] for message in row["messages"]])
