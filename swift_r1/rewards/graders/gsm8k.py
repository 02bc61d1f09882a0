"""GSM8K: one number is the answer."""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction
from typing import Literal

from swift_r1.rewards.graders.answers import (
    CLOSE,
    MULTIPLIERS,
    OPEN,
    QUALIFIER,
    Grade,
    answered,
    plain,
    tidied,
    without_unit,
    written_answer,
)

MAX_DIGITS = 60
MAX_SLOT = 2_000  # characters of an answer; more is no number

# 1,234.5 or 1234. or .5, 3/4, 2 3/4, 5 thousand; not a part of a word, of an exponent or of another number
_NUMBER = re.compile(
    r"(?<![\w.^])(?P<sign>(?:(?<![\w)%])[-+]\s?)?)\$?\s?(?P<late>(?<=\$)-)?"
    r"(?:(?P<whole>[0-9]+)\s+(?=[0-9]+\s?/\s?[0-9]))?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?P<power>[eE][-+]?[0-9]{1,2}(?!\w))?"
    r"(?:\s?/\s?(?P<over>[0-9]+)(?!\w|\.[0-9]))?"
    rf"(?:[\s-]?(?P<times>{'|'.join(MULTIPLIERS)}|K)s?(?![A-Za-z]))?",
    re.ASCII,
)
_TEXT = re.compile(r"\\(?:text[a-z]*|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_CALCULATION = re.compile(r"<<[^<>\n]*>>")  # GSM8K's own
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(-?[0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}")
# Several answers: 7 or 8; x = 7, x = 8.
_HEDGE = re.compile(r"\b(?:or|either)\b|[0-9]\s*(?:[,;](?![0-9]{3}(?![0-9]))|and\b)|\band\W*[0-9]")
_NOT_EQUAL = re.compile(
    r"[<>?~≈≠≤≥]|!=|\\(?:l|g|le|ge|leq|geq|leqslant|geqslant|ne|neq|lt|gt|approx|sim|pm|mp)(?![A-Za-z])"
)
_SPELT = (
    "half|halves|quarters?|twice|double|triple|plus|minus|negative|root|power|sqrt|log|ln|sin|cos|tan|exp|mod|point"
    "|(?:third|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth)s?|zero|two|three|four|five|six|seven"
    "|eight|nine|ten|eleven|twelve|[a-z]+teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty"
)
# Beside a number: another one, a power, a function, a letter. All together they are another number, or several.
_BEFORE = re.compile(
    rf"[0-9^*+_|/\\]|[A-Za-z-]\($|\b[B-HJ-Zb-z]\s?$|\b(?:{_SPELT})\b", re.IGNORECASE | re.ASCII
)
_AFTER = re.compile(
    rf"^[A-Za-z(']|^\s(?![mglLhs]\b)[A-Za-z]\b|[0-9^*+_|!=&]|/(?!\s?[A-Za-z])|\\(?!text)[A-Za-z]"
    rf"|\b(?:{_SPELT}|squared|cubed|factorial)\b|^[十多余几倍分半]",
    re.ASCII,
)
_JOINED = re.compile(
    r"\s*(?:[\^!+?]|\\(?:sqrt|pi|times|cdot)\b)|[A-Za-z(]|\s(?![mglLhs]\b)[B-HJ-Zb-z]\b(?!\.[a-z])"
    rf"|[\s.,;:(]*(?:\w+\s)?(?:or|nor|and a|and one)\b|[\s.,;:(]*(?:no|not|wrong|incorrect)\b|[十多余几倍分半以左]"
    rf"|\s(?:{_SPELT}|squared|cubed|factorial)\b",
    re.ASCII,
)
_OF_A_UNIT = re.compile(r"\^\\circ|(?<=m)\^[23]|(?<=ft)\^[23]")  # 5 m^2
# not equal to 5, x > 5, 17 or 18, 5 feet 10, 1 out of 6
_NOT_THE = re.compile(
    rf"(?:{QUALIFIER.pattern}|{_NOT_EQUAL.pattern})(?:\s\w+|[一-鿿]){{0,2}}[\s$*]*$|\b(?:or|{_SPELT})(?: of)?[\s$*]*$"
    r"|[0-9]\s?(?:[A-Za-z']+,?\s|(?:[A-Za-z]+\s)?(?:and|to|out of)\s|,\s?|[/:-]\s?|\N{EN DASH}\s?)[$*]*$"
    r"|(?:[A-Za-z-]\(|\\(?!quad|implies|therefore|[Rr]ightarrow)[A-Za-z]+[\s$]*\{?)[\s$]*$",
    re.IGNORECASE,
)
_OAT_NUMBER = re.compile(r"(?:(?<![0-9])-)?(?:[0-9]*\.[0-9]+|[0-9]+)")


def grade_gsm8k(
    completion: str,
    gold: str | int | float,
    mode: Literal["number", "oat", "r1rl"] = "number",
    *,
    strip_gold: bool = False,
) -> Grade:
    """Grades one completion: 1 for the right number, else 0.

    Args:
        completion: the model's text.
        gold: the right number, as text or number; thousands commas allowed. As GSM8K has it, with `####` before it.
        mode: how the answer is found and compared.
            `number`: behind the thought the last answer tag, else the last box, else after the last `####`, and there
            the only number after the last `=`; else the last number of the text. `7 or 8`, `not 7`, `x > 7`, `7?`
            and `10^3` are no answer. Compared as exact numbers: `$18.00` is 18, `18.` is 18, `1,234` is 1234,
            `5 thousand` is 5000; units and percent signs do not count.
            `oat`: the last number of the text, commas removed from both sides, compared as text (18.0 is not 18).
            `r1rl`: the first answer tag, all of it, commas removed, compared with the gold text.
        strip_gold: `r1rl`: remove the commas of the gold answer too (without it, `1,234` can never be answered).

    Raises ValueError: the mode is unknown, or the gold answer is not a number; never because of the completion.
    """
    if mode == "number":
        right = _gold_number(gold)
        number, formatted = number_answer(completion)
        return Grade(float(number == right), formatted)

    text = str(gold).strip()
    if mode == "oat":
        numbers = _OAT_NUMBER.findall(completion.replace(",", ""))
        return Grade(float(bool(numbers) and numbers[-1] == text.replace(",", "")), bool(numbers))

    if mode == "r1rl":
        answer, closed, _ = completion.partition(OPEN)[2].partition(CLOSE)
        if not closed:
            return Grade(0.0, False)
        text = text.replace(",", "") if strip_gold else text
        return Grade(float(answer.strip().replace(",", "") == text), True)

    raise ValueError(f"unknown mode {mode!r}: number, oat or r1rl")


def number_answer(completion: str) -> tuple[Fraction | None, bool]:
    """Returns the number that a completion answers, as the mode `number` reads it; and whether it stood where it
    should.

    None where there is none (or one of too many digits).
    """
    text = answered(completion)
    slot = written_answer(text)
    if slot is None and "####" in text:
        slot = text.rpartition("####")[2].partition("\n")[0]
    if slot is not None:
        return only_number(slot), bool(slot)

    # From the end, in growing pieces: the last number is all that is wanted of a long text.
    for length in (250, len(text)):
        piece = _plain(text[-length:])
        match = next(iter(deque(_NUMBER.finditer(piece), maxlen=1)), None)
        if match is not None and (match.start() > 80 or length >= len(text)):
            start, end = match.span()
            before = re.split(r"[.!;]\s|\n", piece[max(0, start - 60) : start])[-1]
            alone = not _JOINED.match(piece, end) and not _NOT_THE.search(before)
            return (_value(match) if alone else None), False

    return None, False


def only_number(text: str) -> Fraction | None:
    """Returns the number after the last `=` of an answer, alone but for its unit or words; None where there is more, or
    words that make it another value or a guess."""
    text = plain(text)
    if len(text) > MAX_SLOT or any(
        pattern.search(text) for pattern in (_HEDGE, QUALIFIER, _NOT_EQUAL)
    ):
        return None
    text = _plain(_OF_A_UNIT.sub("", without_unit(tidied(text.rpartition("=")[2]))[0]))
    number = _NUMBER.search(text)
    if (
        number is None
        or _BEFORE.search(text[: number.start()])
        or _AFTER.search(text[number.end() :])
    ):
        return None
    return _value(number)


def _plain(text: str) -> str:
    """Returns a text with LaTeX's signs, thousands and fractions as plain text."""
    text = plain(text)
    if "<<" in text:
        text = _CALCULATION.sub("", text)
    if "\\" in text or "{" in text:
        text = _LATEX_FRACTION.sub(r" \1/\2", _TEXT.sub(r"\1", text))
        text = text.replace("{,}", ",").replace("\\!", "").replace("\\,", "").replace("\\$", "$")
        text = text.replace("\\(", " ").replace("\\[", " ")
    return text


def _value(match: re.Match[str]) -> Fraction | None:
    """Returns the number of a match of `_NUMBER`; None where it has too many digits, or divides by zero."""
    digits = match["digits"].replace(",", "")
    over = match["over"]
    if len(digits) > MAX_DIGITS or len(over or "") > MAX_DIGITS:
        return None
    value = Fraction(digits)
    if match["power"]:
        value *= Fraction(10) ** int(match["power"][1:])
    if over is not None:
        if int(over) == 0:
            return None
        value /= int(over)
    value += int(match["whole"] or 0)
    if match["times"]:
        value *= MULTIPLIERS.get(match["times"]) or MULTIPLIERS[match["times"].lower()]
    return -value if "-" in (match["sign"] or "") or match["late"] else value


def _gold_number(gold: str | int | float) -> Fraction:
    """Returns the right number. Raises ValueError: it is none."""
    text = _plain(str(gold).rpartition("####")[2]).strip().rstrip("%").strip()
    number = _NUMBER.fullmatch(text)
    value = None if number is None else _value(number)
    if value is None:
        raise ValueError(f"the gold answer is not a number: {gold!r}")
    return value
