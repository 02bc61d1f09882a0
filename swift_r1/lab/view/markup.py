"""Text of completions as HTML: nothing in it can act, and what cannot be seen is shown."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence

from swift_r1.runtime.visible import UNSEEN, visible

_SPACES = str.maketrans({" ": "·", "\t": "⇥", "\n": "⏎\n"})
KEPT = 400_000  # characters of a text that are shown


def markup(text: str, longest: int = KEPT) -> str:
    """Returns the text as HTML for an element with `white-space: pre-wrap`; one of more than `longest` characters is
    cut, and says so."""
    if len(text) > longest:
        return f"{markup(text[:longest], longest)}<b class=unseen>… {len(text) - longest:,} more characters</b>"
    escaped = html.escape(text.replace("\r\n", "\n"))
    return UNSEEN.sub(lambda found: f"<b class=unseen>{visible(found[0])}</b>", escaped)


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Returns the rows as HTML, a column for each key."""
    return table_of_html([{name: markup(text) for name, text in row.items()} for row in rows])


def table_of_html(rows: Sequence[Mapping[str, str]]) -> str:
    """Returns rows whose texts are HTML as HTML, a column for each key."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["".join(f"<th>{markup(name)}</th>" for name in names)]
    lines += ["".join(f"<td>{row.get(name, '')}</td>" for name in names) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table class=view-table>{body}</table>"


def token_markup(text: str) -> str:
    """Returns a token's text as HTML: spaces, tabs and line feeds can be seen too, and a line breaks after a line feed
    only."""
    return markup(text.translate(_SPACES))


def matches(text: str, words: str) -> list[tuple[int, int]]:
    """Returns where `words` stand in the text, whatever the case."""
    found = re.finditer(re.escape(words), text, re.IGNORECASE) if words else ()
    return [match.span() for match in found]


def excerpt(text: str, words: str, longest: int) -> str:
    """Returns about `longest` characters of the text as HTML, the first match of `words` among them, all matches in
    `<mark>`."""
    first = next(iter(matches(text, words)), (0, 0))[0]
    start = max(0, first - longest // 2) if first > longest else 0
    part = text[start : start + longest]
    after = "…" if len(text) > start + longest else ""
    return ("…" if start else "") + highlighted(part, words) + after


def highlighted(text: str, words: str, answer: tuple[int, int] | None = None) -> str:
    """Returns the text as HTML, with `<mark>` around each match of `words`, and `<b class=answer>` around the place of
    the answer."""
    if answer is not None:
        before, own, after = (
            highlighted(part, words)
            for part in (text[: answer[0]], text[slice(*answer)], text[answer[1] :])
        )
        return f'{before}<b class="answer" title="the answer">{own}</b>{after}'
    parts = []
    last = 0
    for start, end in matches(text, words):
        parts.append(f"{markup(text[last:start])}<mark>{markup(text[start:end])}</mark>")
        last = end
    return "".join([*parts, markup(text[last:])])
