"""A report as Markdown, as GitHub, GitLab and the hubs show it; also the sections of a model card."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from swift_r1.lab.report.blocks import Block, CodeBlock, Figures, Note, Report, Section, Table, printable
from swift_r1.lab.report.figures import alone

_MEANINGS = re.compile(r"([\\`*_\[\]<>|&~$]|^#|^[+-](?=\s)|^\d+(?=[.)](?:\s|$))|(?<=http)s?(?=:)|(?<=www)\.)", re.I)


def markdown(report: Report, pictures: str) -> tuple[str, dict[str, str]]:
    """Returns the page, and the SVG of its pictures by the name of the file in the folder `pictures` beside it."""
    blocks = [block for one in report.sections for block in one.blocks]
    figures = [figure for block in blocks if isinstance(block, Figures) for figure in block.figures]
    folder = quote(os.fsencode(pictures))
    places = {id(figure): f"{folder}/{number:02}.svg" for number, figure in enumerate(figures, 1)}
    problems = [f"> {plain(text)}" for text in report.problems]
    sections = (section(one, places) for one in report.sections)
    text = "\n\n".join(["<!-- swift report -->", f"# {plain(report.title)}", *problems, *sections]) + "\n"
    return text, {f"{number:02}.svg": alone(figure) for number, figure in enumerate(figures, 1)}


def section(one: Section, places: Mapping[int, str] | None = None) -> str:
    """`places` are the files of its pictures by their `id`."""
    return "\n\n".join([f"## {plain(one.title)}", *(_block(block, places or {}) for block in one.blocks)])


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
        return _fenced(block.text, "sh")
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Figures):
        return "\n\n".join(f"![{plain(one.title)}]({places[id(one)]})" for one in block.figures)
    prompt = "" if block.prompt is None else f"Prompt:\n\n{_fenced(block.prompt)}\n\n"
    passages = (f"{plain(one.title)}:\n\n{_fenced(one.text)}" for one in block.passages)
    return f"### {plain(block.title)}\n\n{prompt}" + "\n\n".join(passages)


def _table(table: Table) -> str:
    rule = ["---" if number < table.texts else "---:" for number in range(len(table.head))]
    rows: Sequence[Sequence[str]] = [[plain(cell) for cell in row] for row in (table.head, *table.rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (rows[0], rule, *rows[1:]))


def _fenced(text: str, language: str = "text") -> str:
    """Returns the text between fences longer than any in it: nothing in it is Markdown or HTML."""
    text = printable(text)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"
