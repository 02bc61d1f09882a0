"""A report as Markdown, as GitHub, GitLab and the hubs show it; also the sections of a model card."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from html import escape
from urllib.parse import quote

from swift_r1.lab.report.blocks import (
    Block,
    CodeBlock,
    Figures,
    Note,
    Report,
    Section,
    Table,
    printable,
)
from swift_r1.lab.report.figures import alone

_IN_A_ROW = 2  # pictures
_MEANINGS = re.compile(
    r"([\\`*\[\]<>|&~$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"  # `_` between letters means nothing
    r"|^#|^[+-](?=\s)|^\d+(?=[.)](?:\s|$))|(?<=http)s?(?=:)|(?<=www)\.)",
    re.IGNORECASE,
)


def markdown(report: Report, pictures: str) -> tuple[str, dict[str, str]]:
    """Returns the page, and the SVG of its pictures by the name of the file in the folder `pictures` beside it."""
    blocks = [block for one in report.sections for block in one.blocks]
    figures = [figure for block in blocks if isinstance(block, Figures) for figure in block.figures]
    files = {f"{number:02}.svg": figure for number, figure in enumerate(figures, 1)}
    folder = quote(os.fsencode(pictures))
    places = {id(figure): f"{folder}/{name}" for name, figure in files.items()}
    parts = ["<!-- swift report -->", f"# {plain(report.title)}"]
    parts += [f"> {plain(text)}" for text in report.problems]
    parts += [f"**{plain(line)}**" for line in report.summary]
    parts += [section(one, places) for one in report.sections]
    return "\n\n".join(parts) + "\n", {name: alone(figure) for name, figure in files.items()}


def section(one: Section, places: Mapping[int, str] | None = None) -> str:
    """`places` are the files of its pictures by their `id`."""
    blocks = [_block(block, places or {}) for block in one.blocks]
    return "\n\n".join([f"## {plain(one.title)}", *blocks])


def plain(text: str) -> str:
    """Returns the text in one line that means nothing to Markdown or HTML."""
    return _MEANINGS.sub(_escaped, " ".join(printable(text).split()))


def _escaped(found: re.Match[str]) -> str:
    """Writes a backslash before what Markdown reads; an empty comment in an address, which it would make a link of."""
    text = found[0]
    if text.lower() in ("", "s", "."):
        return f"{text}<!-- -->"
    return f"{text}\\" if text.isdigit() else f"\\{text}"


def _block(block: Block, places: Mapping[int, str]) -> str:
    if isinstance(block, Note):
        return plain(block.text)
    if isinstance(block, CodeBlock):
        return _command(block)
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Figures):
        return _pictures(block, places)
    parts = [f"### {plain(block.title)}"]
    if block.prompt is not None:
        parts += ["Prompt:", _fenced(block.prompt)]
    if block.pictures:
        parts.append(f"Images: {plain('; '.join(one.title for one in block.pictures))}")
    for passage in block.passages:
        parts += [f"{plain(passage.title)}:", _fenced(passage.text)]
    return "\n\n".join(parts)


def _command(block: CodeBlock) -> str:
    text = _fenced(block.text, "sh")
    if not block.title:
        return text
    title = escape(" ".join(printable(block.title).split()))
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def _pictures(block: Figures, places: Mapping[int, str]) -> str:
    """Returns a table of them, each under its title."""
    rows = []
    for first in range(0, len(block.figures), _IN_A_ROW):
        row = block.figures[first : first + _IN_A_ROW]
        titles = [plain(one.title) for one in row]
        pictures = [
            f"![{title}]({places[id(one)]})" for title, one in zip(titles, row, strict=True)
        ]
        rows += [titles, pictures]
    head, *others = ([*row, ""][:_IN_A_ROW] for row in rows)
    rule = ["---"] * _IN_A_ROW
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *others))


def _table(table: Table) -> str:
    head, *rows = ([plain(cell) for cell in row] for row in (table.head, *table.rows))
    numbers = len(head) - table.texts
    rule = ["---"] * table.texts + ["---:"] * numbers
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def _fenced(text: str, language: str = "text") -> str:
    """Returns the text between fences longer than any in it: nothing in it is Markdown or HTML."""
    text = printable(text)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"
