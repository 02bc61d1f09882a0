"""Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

MADE = "<!-- Made by `python scripts/reference`: change the code that it is made of, not this page. -->"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are Markdown; a bar in one is not the end of it."""
    lines = [
        [" ".join(cell.split()).replace("|", r"\|") for cell in line] for line in (head, *rows)
    ]
    lines.insert(1, ["---"] * len(head))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def anchor(heading: str) -> str:
    """The address of a heading within its page, as GitHub makes it."""
    return "#" + re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def link(heading: str, page: str = "") -> str:
    return f"[{heading}]({page}{anchor(heading)})"


def sentence(text: str) -> str:
    """Begins with a capital letter, and ends."""
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text[-1:] in ".:" else ".") if text else ""
