r"""Finding and tidying answers written in LaTeX: `\boxed{}`, spacing, units. Linear in the text, no evaluation."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\f?boxed(?![A-Za-z])\s*")
_SPACING = re.compile(r"\\[!,;: ]|\\q?quad(?![A-Za-z])|~")
_SIZES = re.compile(r"\\(?:left|right|[bB]ig[glr]?|displaystyle|limits)(?![A-Za-z])\.?")
_SAME = (
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\[dt]binom(?![A-Za-z])"), r"\\binom"),
    (re.compile(r"\\(?:mbox|textrm|textbf|textit|textnormal|hbox)(?![A-Za-z])"), r"\\text"),
    (re.compile(r"\\(?:cdot|ast)(?![A-Za-z])"), r"\\times"),
    (re.compile(r"\\leq(?![A-Za-z])"), r"\\le"),
    (re.compile(r"\\geq(?![A-Za-z])"), r"\\ge"),
    (re.compile(r"\\neq(?![A-Za-z])"), r"\\ne"),
    (re.compile(r"\\(?:lbrace|rbrace)(?![A-Za-z])"), lambda found: "\\" + "{}"[found[0] == r"\rbrace"]),
)
# What follows a value and is no part of it: \text{ cm}^2, \mathrm{~kg}. Euler's e and the like are values.
_UNIT = re.compile(r"\\(?:text|mathrm|rm)\s*\{\s*~?\s*([A-Za-z][A-Za-z./ ]*)\}\s*(\^\s*\{?\s*-?[0-9]\s*\}?)?\s*\.?$")
_NO_UNIT = frozenset(("e", "i", "d", "pi", "or", "and"))
_WORDS = (
    "mm|cm|km|inch|inches|ft|foot|feet|yards?|miles?|met(?:er|re)s?|hours?|minutes?|seconds?|days?|weeks?|months?|years?"
    "|dollars?|cents?|grams?|kg|pounds?|lit(?:er|re)s?|degrees?|percent|units?|mph|people|students"
)
_PLAIN_UNIT = re.compile(rf"(?<=[0-9}}])\s*((?:square |cubic )?(?:{_WORDS}))(\^\s*\{{?[0-9]\}}?)?\.?$")
_DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*)\\circ\s*\}?$|°$")


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed` holds, braces balanced; None where there is none or it is never closed."""
    found = None
    for found in _BOX.finditer(text):  # noqa: B007  only the last counts
        pass
    if found is None:
        return None
    start = found.end()
    if text[start : start + 1] != "{":
        return None
    end = closing(text, start)
    return None if end is None else text[start + 1 : end]


def closing(text: str, start: int) -> int | None:
    r"""Where the brace at `start` is closed; `\{` and `\}` do not count."""
    depth = 0
    for token in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        if token[0] == "{":
            depth += 1
        elif token[0] == "}":
            depth -= 1
            if depth == 0:
                return start + token.start()
    return None


def unboxed(text: str) -> str:
    """The content of the last box where there is a whole one, else the text."""
    inner = last_boxed(text)
    return text if inner is None else inner


def tidied(text: str) -> str:
    r"""One spelling for what is typeset alike: dollars, spacing, sizes, `\dfrac`, percent signs, a final full stop."""
    text = text.strip().replace("\u2212", "-").replace("\\(", "").replace("\\)", "")
    text = text.replace("\\[", "").replace("\\]", "").replace("{,}", ",").replace("\\$", "").replace("$", "")
    for pattern, spelling in _SAME:
        text = pattern.sub(spelling, text)
    text = _SIZES.sub("", text)
    text = re.sub(r"\\!", "", text)  # 12,\!345 is one number
    text = _SPACING.sub(" ", text)
    text = text.replace("\\%", "").replace("%", "")
    text = " ".join(text.split())
    return text[:-1].rstrip() if text.endswith(".") else text


def without_unit(text: str) -> tuple[str, str]:
    """A tidied text without its unit, and the unit in lower case and singular; "" where there is none.

    Degrees are no unit here: an angle is asked for in degrees or it is not.
    """
    text = _DEGREES.sub("", text) or text
    for pattern in (_UNIT, _PLAIN_UNIT):
        found = pattern.search(text)
        if found and found.start() > 0 and found[1].strip().lower() not in _NO_UNIT:
            power = re.sub(r"[^0-9-]", "", found[2] or "")
            value = text[: found.start()].strip()
            if value[-1:] not in ("", ",", "="):
                return value, found[1].strip().lower().rstrip("s") + power
    return text, ""
