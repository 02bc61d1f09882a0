r"""Finding answers in a completion (`<answer>`, `\boxed{}`) and tidying their LaTeX: spacing, units.

Linear in the length of any text; nothing is evaluated.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from swift_r1.data.builtin import closing

OPEN = "<answer>"
CLOSE = "</answer>"
# A command, a line break with the room after it, or a backslash and one character.
_COMMAND = re.compile(
    r"(?P<gone>\\(?:left|right)\s*\.|\\!\s*)|\\[A-Za-z]+|(?P<line>\\\\(?:\s*\[-?[0-9.]+\s*[a-z]{2}\])?)|\\.",
    re.DOTALL,
)
_NOTHING = r"""
    \( \) \[ \] \$ \% \left \right \big \Big \bigg \Bigg \bigl \bigr \Bigl \Bigr \biggl \biggr \Biggl \Biggr
    \displaystyle \textstyle \limits \mathbf \boldsymbol \bm \mathit \mathsf \bf
"""
_SPELLINGS = dict.fromkeys(_NOTHING.split(), "") | {
    "\\lbrace": "\\{",
    "\\rbrace": "\\}",
    "\\degree": "^\\circ",
}
_SPELLINGS |= dict.fromkeys(("\\,", "\\;", "\\:", "\\>", "\\ ", "\\\n", "\\quad", "\\qquad"), " ")
for _spelling, _others in {
    "\\frac": r"\dfrac \tfrac \cfrac",
    "\\binom": r"\dbinom \tbinom",
    "\\text": r"\mbox \hbox \textrm \textbf \textit \textup \textsf \texttt \textnormal \mathrm \rm",
    "\\times": r"\cdot \ast",
    "\\le": r"\leq \leqslant",
    "\\ge": r"\geq \geqslant",
    "\\ne": r"\neq",
    "\\emptyset": r"\varnothing",
    "<": r"\lt",
    ">": r"\gt",
}.items():
    _SPELLINGS |= dict.fromkeys(_others.split(), _spelling)
_UNICODE = {
    "-": "\u2212",
    "": "\u20ac\u00a3",  # the euro and the pound, as the dollar
    " ": "\u00a0\u2009\u202f",
    "^\\circ": "\u00b0",
    "^2": "\u00b2",
    "^3": "\u00b3",
    "\\times ": "\u00d7\u00b7",
    "\\pi ": "\u03c0",
    "\\pm ": "\u00b1",
    "\\infty ": "\u221e",
    "\\cup ": "\u222a",
    "\\in ": "\u2208",
    "\\approx ": "\u2248",
    "\\le ": "\u2264",
    "\\ge ": "\u2265",
}
_CHARACTERS = str.maketrans(
    {character: text for text, found in _UNICODE.items() for character in found}
)
_PLAIN_COMMAND = re.compile(r"(?<!\\)\\[A-Za-z]")
_DOUBLED_COMMAND = re.compile(r"\\\\[A-Za-z]")
_GROUPED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?![0-9])")
_SINGLE = re.compile(r"([\^_])\{(\w|\\circ)\}(?![0-9])")
_PLUS_INFINITY = re.compile(r"((?:^|[(\[{,=])\s*)\+\s*(?=\\infty)")
_NUMBER_IN_TEXT = re.compile(r"\\text\s*\{\s*([-+]?[0-9][^{}\\]*)\}")
# What follows a value and is no part of it: \text{ cm}^2, \mathrm{~kg}. Euler's e and the like are values.
_UNIT = re.compile(
    r"\\text\s*\{\s*~?\s*([A-Za-z][A-Za-z./ ]*)\}\s*(\^\s*\{?\s*-?[0-9]\s*\}?)?\s*\.?$"
)
_NO_UNIT = frozenset(
    (
        "e",
        "i",
        "d",
        "pi",
        "or",
        "and",
        "dozen",
        "hundred",
        "thousand",
        "million",
        "billion",
        "trillion",
    )
)
_WORDS = (
    "mm|cm|km|inch|inches|ft|foot|feet|yards?|miles?|met(?:er|re)s?|hours?|minutes?|seconds?|days?|weeks?|months?|years?"
    "|dollars?|cents?|grams?|kg|pounds?|lit(?:er|re)s?|degrees?|percent|units?|mph|people|students"
)
_PLAIN_UNIT = re.compile(
    rf"(?<=[0-9}}])\s*((?:square |cubic )?(?:{_WORDS}))(\^\s*\{{?[0-9]\}}?)?\.?$"
)


@dataclass(frozen=True, slots=True)
class Grade:
    """`score` is the reward; `formatted` says whether an answer was where it should be, right or wrong."""

    score: float
    formatted: bool


def answers(text: str) -> Iterator[str]:
    """Yields the contents of the answer blocks from left to right, each up to the nearest closing tag; any lines."""
    position = 0
    while (start := text.find(OPEN, position)) >= 0:
        start += len(OPEN)
        end = text.find(CLOSE, start)
        if end < 0:
            return
        yield text[start:end]
        position = end + len(CLOSE)


def first_answer(text: str) -> str | None:
    return next(answers(text), None)


def last_answer(text: str) -> str | None:
    return next(iter(deque(answers(text), maxlen=1)), None)


def tidied(text: str) -> str:
    r"""Returns one spelling for what is typeset alike: dollars, spacing, sizes, `\dfrac`, percent signs, a final full
    stop.

    A space that is left between two digits separates two numbers, except in groups of three (12\,345).
    """
    if not text.isascii():
        text = text.translate(_CHARACTERS)
    if "\\" in text:
        # escaped once too often
        if _DOUBLED_COMMAND.search(text) and not _PLAIN_COMMAND.search(text):
            text = text.replace("\\\\", "\\")
        text = _COMMAND.sub(_spelling_of, text)

    text = text.replace("{,}", ",").replace("$", "").replace("%", "").replace("~", " ")
    text = " ".join(text.replace("<=", "\\le ").replace(">=", "\\ge ").split())
    if " " in text:
        text = _GROUPED.sub(lambda number: number[0].replace(" ", ""), text)
    if "{" in text:
        text = _SINGLE.sub(r"\1\2", text)
        if text[0] == "{" and closing(text, 0) == len(text) - 1:
            text = text[1:-1].strip()

    if "\\infty" in text:
        text = _PLUS_INFINITY.sub(r"\1", text)
    text = text.removesuffix(".").strip()
    if text.endswith((".}", ". }")):  # \text{east.}
        text = text[: text.rindex(".")] + "}"
    number = _NUMBER_IN_TEXT.fullmatch(text)
    return text if number is None else number[1].strip()


def _spelling_of(match: re.Match[str]) -> str:
    if match["gone"]:
        return ""
    return "\\\\" if match["line"] else _SPELLINGS.get(match[0], match[0])


def without_unit(text: str) -> tuple[str, str]:
    """Returns a tidied text without its unit, and the unit in lower case and singular; "" where there is none."""
    for pattern in (_UNIT, _PLAIN_UNIT):
        match = pattern.search(text)
        if match and match.start() > 0 and match[1].strip().lower() not in _NO_UNIT:
            power = re.sub(r"[^0-9-]", "", match[2] or "")
            value = text[: match.start()].strip()
            if value[-1:] not in ("", ",", "="):
                return value, match[1].strip().lower().rstrip("s") + power
    return text, ""
