"""Completions as HTML: rows of a table, a card each beside the others of the group."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from swift_r1.lab.report.colours import CLASSES
from swift_r1.lab.runs.failures import answer_place
from swift_r1.lab.runs.query import FAILURE, clean
from swift_r1.lab.view.markup import excerpt, markup, matches
from swift_r1.lab.view.message_html import (
    AS_WRITTEN,
    CARD,
    VALUE,
    Look,
    passage,
    pictures,
    question,
    shown,
    turns,
)
from swift_r1.record.recorded import FIELDS

Row = Mapping[str, Any]

_CELL = 160  # characters
_ENDS = {
    "finish_reason": "ended by",
    "turns": "turns",
    "sequences": "sequences",
    "weight_version": "weights",
    "newest_weight_version": "newest weights",
    "failure": "failure",
    "limit": "limit reached:",
    "returned": "returned",
}
_SHORT = {FAILURE: "class"}
_GOLD = frozenset(("solution", "answer", "target", "gold", "ground_truth", "label"))


def reward_columns(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith("rewards/")]


def data_columns(row: Row) -> dict[str, Any]:
    """Returns the row's columns that came from the data, which rewards were given."""
    return {
        name: value
        for name, value in row.items()
        if name not in FIELDS and not name.startswith(("rewards/", "completion/"))
    }


def short(name: str) -> str:
    """Returns the name of a column as headings have it."""
    return _SHORT.get(name, name.removeprefix("rewards/"))


def rows_table(
    rows: Sequence[Row],
    columns: Sequence[str],
    sort: str | None,
    descending: bool,
    links: Mapping[str, Callable[[Row], str]],
    words: str = "",
) -> str:
    """Returns a table: a click on a heading sorts (`data-sort`), one on a row goes where the first
    column of `links` leads to, and one on another such column where that does. `words` are marked in prompts and
    completions."""
    numbers = {
        name for name in columns if any(isinstance(row.get(name), int | float) for row in rows)
    }
    heads = "".join(_head(name, sort, descending, name in numbers) for name in columns)
    body = "".join(
        f"<tr>{''.join(_cell(row, name, links, words, name in numbers) for name in columns)}</tr>"
        for row in rows
    )
    return f'<table class="rows"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'


def _head(name: str, sort: str | None, descending: bool, number: bool) -> str:
    arrow = ""
    state = "none"
    if name == sort:
        arrow = " ▼" if descending else " ▲"
        state = "descending" if descending else "ascending"
    label = html.escape(clean(name))
    return (
        f'<th aria-sort="{state}" class="{"number" if number else ""}"><button type="button" data-sort="{label}" '
        f'title="sort by {label}">{markup(short(name))}{arrow}</button></th>'
    )


def _cell(
    row: Row, name: str, links: Mapping[str, Callable[[Row], str]], words: str, number: bool
) -> str:
    text = shown(row.get(name))
    long = name in ("completion", "prompt")
    if name == "prompt" and not matches(text, words):
        asked = question(text)
        cut = ("…" if len(asked) > _CELL else "") + markup(
            asked[-_CELL:]
        )  # it ends with what is asked
    else:
        cut = excerpt(text, words if long else "", _CELL)
    if name == FAILURE:
        cut = kind_tag(text)
    if name in links:
        first = " data-item" if name == next(iter(links)) else ""
        cut = f'<a{first} href="{html.escape(links[name](row))}">{cut or "(empty)"}</a>'
    if name == "prompt":
        cut = pictures(row) + cut
    kind = "long" if long else "short number" if number else "short"
    return f'<td class="{kind}" data-name="{html.escape(clean(short(name)))}">{cut}</td>'


def kind_tag(kind: str) -> str:
    """Returns a class of `FAILURES` with its colour."""
    return f'<span class="kind k{CLASSES.get(kind, 0)}">{markup(kind)}</span>'


def card(
    row: Row,
    reasons: Sequence[Row],
    links: Mapping[str, str],
    look: Look = AS_WRITTEN,
    tree: str = "",
) -> str:
    """Returns one completion of a group: its rewards, why each that is invalid is so, its advantage, how it ended, its
    text or its turns. `links` are texts and addresses; a `tree` of an episode stands in the place of its turns."""
    why = "".join(
        f"<p class=why>{markup(shown(one.get('reward')))} is invalid ({markup(shown(one.get('kind')))}): "
        f"{markup(shown(one.get('cause')), VALUE)}</p>"
        for one in reasons
    )
    if tree:
        return _card(row, links, _details(row), why + tree)
    messages = row.get("messages")
    others = _others(row)
    text = turns(messages, look) if isinstance(messages, list) else completion(row, look)
    for number, other in enumerate(others, 1):
        summary = f"conversation {number} of {len(others) + 1}: ended before this one"
        text += f"<details><summary>{summary}</summary>{turns(other, look)}</details>"
    return _card(row, links, _details(row), why + text)


def _card(row: Row, links: Mapping[str, str], details: str, body: str) -> str:
    """Returns a card with the colour of the completion's class; `body` is HTML."""
    number = row.get("number")
    place = f' id="n{number}"' if isinstance(number, int) else ""
    lead = "".join(
        f'<a href="{html.escape(href)}">{html.escape(text)}</a>' for text, href in links.items()
    )
    return (
        f'<article class="card kind-edge k{CLASSES.get(str(row.get(FAILURE)), 0)}" data-item tabindex="-1"{place}>'
        f'<h2>{_result(row)}</h2><p class="said">{markup(details, VALUE)}</p><div class="links">{lead}</div>{body}'
        "</article>"
    )


def _result(row: Row) -> str:
    """Returns the line of a completion: its reward, advantage, class and length."""
    parts = [f"reward {markup(shown(row.get('reward')))}"]
    advantage = row.get("advantage")
    if isinstance(advantage, int | float):
        parts.append(f"adv {advantage:+.3g}")
    if FAILURE in row:
        parts.append(kind_tag(shown(row[FAILURE])))
    if "tokens" in row:
        parts.append(f"{markup(shown(row['tokens']))} tok")
    return " · ".join(parts)


def _details(row: Row) -> str:
    parts = [f"{short(name)} {shown(row[name])}" for name in reward_columns(row)]
    parts += [
        f"{title} {shown(row[name])}" for name, title in _ENDS.items() if row.get(name) is not None
    ]
    parts.append(f"completion {shown(row.get('number'))}")
    if row.get("dropped"):
        parts.append("not trained: its group had no signal")
    return " · ".join(parts)


def completion(row: Row, look: Look = AS_WRITTEN) -> str:
    """Returns the completion's text with the answer that is graded marked."""
    text = shown(row.get("completion"))
    first = next(iter(reward_columns(row)), "").removeprefix("rewards/")
    return passage(text, look, answer_place(first, text))


def about_prompt(values: Mapping[str, Any]) -> str:
    """Returns names and values in a line, the right answer among them marked."""
    parts = []
    for name, value in values.items():
        said = markup(shown(value), VALUE)
        gold = f'<b class="answer" title="what is right">{said}</b>'
        parts.append(f"{markup(name.replace('_', ' '))} {gold if name in _GOLD else said}")
    return f'<p class="said">{" · ".join(parts)}</p>'


def is_long(row: Row) -> bool:
    """Returns whether a card cuts its text."""
    messages = row.get("messages")
    texts = messages if isinstance(messages, list) else [row.get("completion")]
    return any(len(shown(text)) > CARD for text in [*texts, *chain.from_iterable(_others(row))])


def _others(row: Row) -> list[list[Any]]:
    """Returns the other conversations of an agent's episode."""
    found = row.get("other_messages")
    return [one for one in found if isinstance(one, list)] if isinstance(found, list) else []


def reasons_of(row: Row, invalid: Sequence[Row]) -> list[Row]:
    """Returns the rows of invalid_rewards.jsonl that are about this completion."""
    name = f"{row.get('request_id')}/{row.get('number')}"
    return [one for one in invalid if one.get("request_id") == name]
