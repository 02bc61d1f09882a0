"""What a report consists of, whatever it is written as."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

LONGEST = 3000  # characters of a prompt or a completion that are shown
# C0 without tab and line feed; DEL; C1; soft hyphen; zero-width space and bidi controls; line and paragraph separator;
# invisible operators; BOM; half surrogates (which UTF-8 cannot hold); noncharacters and tags.
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\ufffe\uffff\U000e0000-\U000e007f]"
)


@dataclass(frozen=True)
class Note:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Code:
    """Shell commands."""

    text: str


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
    """What a model read or wrote, as it is, under a line that says what it is."""

    title: str
    text: str


@dataclass(frozen=True)
class Passages:
    """Of one prompt, in their order; side by side, where there is room."""

    title: str
    passages: Sequence[Passage]
    prompt: str | None = None


Block = Note | Code | Table | Figures | Passages


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)


@dataclass(frozen=True)
class Report:
    title: str
    sections: Sequence[Section]
    problems: Sequence[str] = ()  # what could not be read, a line each


def printable(text: str, longest: int = LONGEST) -> str:
    """`text` as `visible` shows it, its middle left out where it is longer than `longest` characters."""
    if len(text) > longest:
        half = longest // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"
    return visible(text.replace("\r\n", "\n"))


def visible(text: str) -> str:
    """The text with a sign for each character that cannot be seen: `␀`, `␛`, `U+202E`; not escaped."""
    return UNSEEN.sub(_sign, text)


def _sign(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"U+{code:04X}"
