r"""Finding answers in a completion (`<answer>`, `\boxed{}`) and tidying their LaTeX: spacing, units.

Linear in the length of any text; nothing is evaluated.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from swift_r1.data.builtin import closing, last_boxed

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
    "-": "\u2212\ufe63",
    "": "\u20ac\u00a3",  # the euro and the pound, as the dollar
    " ": "\u00a0\u2009\u202f\u3000",
    ".": "\u3002",
    ",": "\u3001",
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
    {chr(wide): chr(wide - 0xFEE0) for wide in range(0xFF01, 0xFF5F)}
    | {
        character: f" {unicodedata.normalize('NFKD', character).replace(chr(0x2044), '/')}"
        for character in "\u00bc\u00bd\u00be\u2153\u2154\u2155\u2156\u2157\u2158\u2159\u215a\u215b\u215c\u215d\u215e"
    }
    | {character: text for text, found in _UNICODE.items() for character in found}
)
# an en dash is a minus sign, except between two numbers
_DASH = re.compile(r"(?<![\w)\]}])(?<![0-9)\]}] )[\u2012\u2013](?= ?[0-9.\\$(])")
_BOLD = re.compile(r"\A\s*\*\*((?:(?!\*\*).)+)\*\*\.?\s*\Z", re.DOTALL)
_ODDS = re.compile(r"\A\s*([0-9]+) (?:in|out of) ([0-9]+)\.?\s*\Z")
_MIXED = re.compile(
    r"(?<![\w.,/^}])(?<![0-9/^}] )([0-9]+)(?:\s|\\[ ,])+([0-9]+)/([0-9]+)(?![\w/]|\.[0-9])"
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
MULTIPLIERS = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "k": 10**3,
    "million": 10**6,
    "M": 10**6,
    "billion": 10**9,
    "bn": 10**9,
    "trillion": 10**12,
    "\u767e": 100,
    "\u5343": 10**3,
    "\u4e07": 10**4,
    "\u842c": 10**4,
    "\u4ebf": 10**8,
    "\u5104": 10**8,
}
_NO_UNIT = frozenset(
    ("e", "i", "d", "pi", "or", "and", "k", "squared", "cubed", "factorial", "half")
)
# What turns a value into a bound, a guess, or anything but that value.
QUALIFIER = re.compile(
    r"\b(?:not?|non|none|never|neither|nor|cannot|without|except|excluding|instead|wrong|incorrect|false|unless|than"
    r"|least|most|up to|(?:max|min)(?:imum)? of|between|within|over|under|above|below|beyond|exceed(?:s|ing)?|about"
    r"|around|approx(?:imately)?|roughly|nearly|almost|circa|close to|maybe|perhaps|possibly|probably|likely|might"
    r"|may|could|unsure|unknown|(?:or|and) (?:more|less|fewer|greater|larger|smaller|higher|lower|up|so))\b"
    r"|\?|\(\s*(?:or|and)\b|n['\u2019]t\b|(?<=[0-9])(?:st|nd|rd|th)\b|\u4e0d|\u5e76\u975e|\u81f3\u5c11|\u81f3\u591a|\u5927\u7ea6|\u7ea6\u4e3a|\u5de6\u53f3|\u6216|\u5927\u4e8e|\u5c0f\u4e8e|\u5927\u65bc|\u5c0f\u65bc|\u8d85\u8fc7"
    r"|\u591a\u4e8e|\u5c11\u4e8e|\u4ee5\u4e0a|\u4ee5\u4e0b|\u53ef\u80fd|\u4e4b\u95f4",
    re.IGNORECASE,
)
_WORDS = (
    "mm|cm|km|inch|inches|ft|foot|feet|yards?|miles?|met(?:er|re)s?|hours?|minutes?|seconds?|days?|weeks?|months?|years?"
    "|dollars?|cents?|grams?|kg|pounds?|lit(?:er|re)s?|degrees?|percent|units?|mph|people|students"
    "|(?![\u5341\u591a\u4f59\u51e0\u500d\u5206\u534a])[\u4e00-\u9fff]{1,4}"
)
_PLAIN_UNIT = re.compile(
    rf"(?<=[0-9}}])\s*((?:square |cubic )?(?:{_WORDS}))(\^\s*\{{?[0-9]\}}?)?\.?$"
)


@dataclass(frozen=True, slots=True)
class Grade:
    """`score` is the reward; `formatted` says whether an answer was where it should be, right or wrong."""

    score: float
    formatted: bool


def answered(completion: str) -> str:
    """Returns what stands behind the thought of a completion, whoever opened it; "" behind an unfinished one."""
    rest = completion.rpartition("</think>")[2]
    return "" if "<think>" in rest else rest


def last_answer(text: str) -> str | None:
    """Returns the content of the last answer block; None where there is none, or the last one is not closed."""
    _, opened, rest = text.rpartition(OPEN)
    content, closed, _ = rest.partition(CLOSE)
    return content if opened and closed else None


def written_answer(text: str) -> str | None:
    r"""Returns what stands in the last answer block, or in the last `\boxed{}` in it or of a text without a block.

    "" where it is cut off, None where there is neither.
    """
    place = (last_answer(text) or "") if OPEN in text else text
    if "\\boxed" in place:
        return last_boxed(place) or ""
    return place if OPEN in text else None


def plain(text: str) -> str:
    """Returns an answer with full-width characters, bold type, mixed numbers and odds (1 in 6) as LaTeX has them."""
    if not text.isascii():
        text = _DASH.sub("-", text.translate(_CHARACTERS))
    if "**" in text:
        text = _BOLD.sub(r"\1", text)
    text = _ODDS.sub(r"\1/\2", text)
    return _MIXED.sub(r"\1\\frac{\2}{\3}", text) if "/" in text else text


def tidied(text: str) -> str:
    r"""Returns one spelling for what is typeset alike: dollars, spacing, sizes, `\dfrac`, percent signs, a final full
    stop.

    A space that is left between two digits separates two numbers, except in groups of three (12\,345).
    """
    text = plain(text)
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
        if match and match.start() > 0 and not is_part_of_value(match[1]):
            power = re.sub(r"[^0-9-]", "", match[2] or "")
            value = text[: match.start()].strip()
            if value[-1:] not in ("", ",", "="):
                return value, match[1].strip().lower().rstrip("s") + power
    return text, ""


def is_part_of_value(words: str) -> bool:
    """Returns whether words behind a number make it another value: thousand, or more."""
    read = re.findall(r"[a-z]+|[^\x00-\x7f]", words.lower())
    return (
        any(word in _NO_UNIT or word.rstrip("s") in MULTIPLIERS for word in read)
        or QUALIFIER.search(words) is not None
    )
