"""The parts of a report, whatever it is written as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from swift_r1.lab.runs.pictures import Picture
from swift_r1.runtime.visible import visible

LONGEST = 3000  # characters of a prompt or a completion that are shown


@dataclass(frozen=True)
class Note:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class CodeBlock:
    """Shell commands; under a `title` they are folded."""

    text: str
    title: str = ""


@dataclass(frozen=True)
class Table:
    """`head` may be of empty texts; the columns after the first `texts` hold numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1


@dataclass(frozen=True)
class Figure:
    """A picture: whole SVG, which says by itself what it shows."""

    title: str
    svg: str


@dataclass(frozen=True)
class Figures:
    """Side by side, where there is room."""

    figures: Sequence[Figure]


@dataclass(frozen=True)
class Passage:
    """A text that a model read or wrote, as it is, under a line that says what it is."""

    title: str
    text: str


@dataclass(frozen=True)
class Passages:
    """Passages of one prompt, in their order; side by side, where there is room."""

    title: str
    passages: Sequence[Passage]
    prompt: str | None = None
    pictures: Sequence[Picture] = ()  # of the prompt


Block = Note | CodeBlock | Table | Figures | Passages


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)


@dataclass(frozen=True)
class Report:
    title: str
    sections: Sequence[Section]
    summary: Sequence[str] = ()  # what came of each run, a line
    problems: Sequence[str] = ()  # what could not be read, a line each


def printable(text: str) -> str:
    """Returns the text as `visible` shows it, its middle left out where it is longer than `LONGEST` characters."""
    if len(text) > LONGEST:
        half = LONGEST // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"
    return visible(text.replace("\r\n", "\n"))
