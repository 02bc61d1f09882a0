"""Completions as HTML: rows of a table, a card each beside the others of the group, turns of a conversation."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from swift_r1.lab.runs.query import FAILURE, LENGTH, clean
from swift_r1.lab.view.markup import KEPT, markup
from swift_r1.record.recorded import FIELDS

Row = Mapping[str, Any]

_CELL = 160  # characters
_VALUE = 2_000
_CARD = 12_000
_ENDS = (
    "failure",
    "turns",
    "sequences",
    "tokens",
    "finish_reason",
    "weight_version",
    "newest_weight_version",
)


def shown(value: Any) -> str:
    """Returns the value in a few characters: numbers to four digits, None as –."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else "invalid"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def reward_columns(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith("rewards/")]


def length_column(names: Iterable[str]) -> str:
    """Returns the column of tokens, or in runs of older versions characters."""
    return "tokens" if "tokens" in names else LENGTH


def data_columns(row: Row) -> dict[str, Any]:
    """Returns the row's columns that came from the data, which rewards were given."""
    return {
        name: value
        for name, value in row.items()
        if name not in FIELDS and not name.startswith(("rewards/", "completion/"))
    }


def rows_table(
    rows: Sequence[Row],
    columns: Sequence[str],
    sort: str | None,
    descending: bool,
    link: Callable[[Row], str],
) -> str:
    """Returns a table of completions: a click on a heading sorts (`data-sort`), the completion's text leads to
    `link(row)`."""
    heads = "".join(_head(name, sort, descending) for name in columns)
    body = "".join(f"<tr>{''.join(_cells(row, columns, link(row)))}</tr>" for row in rows)
    return f'<table class="rows"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'


def _head(name: str, sort: str | None, descending: bool) -> str:
    arrow = ""
    state = "none"
    if name == sort:
        arrow = " ▼" if descending else " ▲"
        state = "descending" if descending else "ascending"
    label = html.escape(clean(name))
    return f'<th aria-sort="{state}"><button type="button" data-sort="{label}">{markup(name)}{arrow}</button></th>'


def _cells(row: Row, columns: Sequence[str], href: str) -> Iterator[str]:
    for name in columns:
        value = row.get(name)
        text = shown(value)
        cut = markup(text[:_CELL]) + ("…" if len(text) > _CELL else "")
        number = " number" if isinstance(value, int | float) else ""
        if name == "completion":
            cut = f'<a data-item href="{html.escape(href)}">{cut or "(empty)"}</a>'
        kind = "long" if name in ("completion", "prompt") else "short"
        yield f'<td class="{kind}{number}" data-name="{html.escape(clean(name))}">{cut}</td>'


def facts(values: Mapping[str, Any]) -> str:
    """Returns the names and values, one below the other."""
    lines = (
        f"<dt>{markup(name)}</dt><dd>{markup(shown(value), _VALUE)}</dd>"
        for name, value in values.items()
    )
    return f'<dl class="facts">{"".join(lines)}</dl>'


def card(
    row: Row,
    reasons: Sequence[Row],
    links: Mapping[str, str],
    whole: bool = False,
) -> str:
    """Returns one completion of a group: its rewards, why each that is invalid is so, its advantage, how it ended, its
    text or its turns. `links` are texts and addresses; without `whole` a long text is cut."""
    values = {
        name: row[name]
        for name in ("reward", *reward_columns(row), "advantage", FAILURE)
        if name in row
    }
    ends = {name: row[name] for name in _ENDS if name in row}
    why = "".join(
        f"<p class=why>{markup(shown(one.get('reward')))} is invalid ({markup(shown(one.get('kind')))}): "
        f"{markup(shown(one.get('cause')), _VALUE)}</p>"
        for one in reasons
    )
    lead = "".join(
        f'<a href="{html.escape(href)}">{html.escape(text)}</a>' for text, href in links.items()
    )
    number = row.get("number")
    place = f' id="n{number}"' if isinstance(number, int) else ""
    title = f"completion {markup(shown(number))}"
    if row.get("dropped"):
        title += ", not trained: its group had no signal"
    messages = row.get("messages")
    others = _others(row)
    text = turns(messages, whole) if isinstance(messages, list) else completion(row, whole)
    for number, other in enumerate(others, 1):
        summary = f"conversation {number} of {len(others) + 1}: ended before this one"
        text += f"<details><summary>{summary}</summary>{turns(other, whole)}</details>"
    return (
        f'<article class="card" data-item tabindex="-1"{place}><h3>{title}</h3>{facts(values | ends)}{why}'
        f'<nav class="links">{lead}</nav>{text}</article>'
    )


def completion(row: Row, whole: bool = False) -> str:
    return (
        f'<pre class="text">{markup(shown(row.get("completion")), KEPT if whole else _CARD)}</pre>'
    )


def is_long(row: Row) -> bool:
    """Returns whether a card cuts its text."""
    messages = row.get("messages")
    texts = messages if isinstance(messages, list) else [row.get("completion")]
    return any(len(shown(text)) > _CARD for text in [*texts, *chain.from_iterable(_others(row))])


def _others(row: Row) -> list[list[Any]]:
    """Returns the other conversations of an agent's episode."""
    found = row.get("other_messages")
    return [one for one in found if isinstance(one, list)] if isinstance(found, list) else []


def turns(messages: Sequence[Any], whole: bool = False) -> str:
    """Returns the messages of a conversation, each with its role; the tools that it calls, and their answers."""
    parts = []
    for message in messages:
        message = message if isinstance(message, dict) else {"content": message}
        role = shown(message.get("role"))
        kind = role if role in ("system", "user", "assistant", "tool") else "user"
        content = markup(shown(message.get("content")), KEPT if whole else _CARD)
        more = {
            name: value
            for name, value in message.items()
            if name not in ("role", "content") and value
        }
        parts.append(
            f'<div class="turn {kind}"><b>{markup(role)}</b><pre class="text">{content}</pre>'
            f"{facts(more) if more else ''}</div>"
        )
    return "".join(parts)


def reasons_of(row: Row, invalid: Sequence[Row]) -> list[Row]:
    """Returns the rows of invalid_rewards.jsonl that are about this completion; older runs say which by its text
    alone."""
    if row.get("number") is None:
        return [one for one in invalid if one.get("completion") == row.get("completion")]
    return [
        one
        for one in invalid
        if one.get("request_id") == f"{row.get('request_id')}/{row['number']}"
    ]
