"""GSM8K: one number is the answer."""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction
from typing import Literal

from swift_r1.data.builtin import last_boxed
from swift_r1.rewards.graders.answers import Grade, first_answer, last_answer, tidied, without_unit

MAX_DIGITS = 60
MAX_SLOT = 2_000  # characters of an answer; more is no number

# 1,234.5 or 1234. or .5; not a part of a word, of an exponent or of another number
_NUMBER = re.compile(
    r"(?<![\w.^])(?P<sign>(?:(?<![\w)%])[-+]\s?)?)\$?\s?(?P<late>(?<=\$)-)?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?P<power>[eE][-+]?[0-9]{1,2}(?!\w))?"
    r"(?:\s?/\s?(?P<over>[0-9]+)(?![\w.]))?"
)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(-?[0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}")
# Several answers: 7 or 8; x = 7, x = 8.
_HEDGE = re.compile(r"\bor\b|[0-9]\s*(?:[,;](?![0-9]{3}(?![0-9]))|and\b)")
# Beside a number: another one, a power, a function, a constant. All together they are another number, or several.
_NOT_ALONE = re.compile(r"[0-9^]|\\(?!text)[A-Za-z]+")
_JOINED = re.compile(r"\s*(?:\^|\\(?:sqrt|pi|times|cdot)\b)")
_OF_A_UNIT = re.compile(r"\^\\circ|(?<=m)\^[23]|(?<=ft)\^[23]")  # 5 m^2
_OR = re.compile(r"\bor\s+\$?$")
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
            `number`: the last answer tag, else the last box, else after the last `####`, and there the only number
            after the last `=` (`7 or 8` and `10^3` are no answer); else the last number of the text. Compared as
            exact numbers: `$18.00` is 18, `18.` is 18, `1,234` is 1234; units and percent signs do not count.
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
        answer = first_answer(completion)
        if answer is None:
            return Grade(0.0, False)
        text = text.replace(",", "") if strip_gold else text
        return Grade(float(answer.strip().replace(",", "") == text), True)
    raise ValueError(f"unknown mode {mode!r}: number, oat or r1rl")


def number_answer(completion: str) -> tuple[Fraction | None, bool]:
    """Returns the number that a completion answers, as the mode `number` reads it; and whether it stood where it
    should.

    None where there is none (or one of too many digits).
    """
    slot = _slot(completion)
    if slot is not None:
        return _only_number(slot), True

    # From the end, in growing pieces: the last number is all that is wanted of a long text.
    for length in (200, len(completion)):
        match = next(iter(deque(_NUMBER.finditer(_plain(completion[-length:])), maxlen=1)), None)
        if match is not None and (match.start() > 20 or length >= len(completion)):
            text = match.string
            start, end = match.span()
            alone = not _JOINED.match(text, end) and not _OR.search(text, max(0, start - 5), start)
            return (_value(match) if alone else None), False
    return None, False


def _only_number(text: str) -> Fraction | None:
    """Returns the number after the last `=` of an answer, alone but for its unit or words; None where there is more."""
    if len(text) > MAX_SLOT or _HEDGE.search(text):
        return None
    text = _plain(_OF_A_UNIT.sub("", without_unit(tidied(text.rpartition("=")[2]))[0]))
    number = _NUMBER.search(text)
    if number is None or _NOT_ALONE.search(text[: number.start()] + " " + text[number.end() :]):
        return None
    return _value(number)


def _slot(completion: str) -> str | None:
    """Returns what stands where an answer should be: in the last answer tag or box, or after the last `####`."""
    answer = last_answer(completion)
    place = completion if answer is None else answer
    boxed = last_boxed(place) if "\\boxed" in place else None
    if boxed is not None:
        return boxed
    if answer is not None:
        return answer
    _, mark, after = completion.rpartition("####")
    return after.partition("\n")[0] if mark else None


def _plain(text: str) -> str:
    """Returns a text with LaTeX's signs, thousands and fractions as plain text."""
    text = text.replace("\u2212", "-")
    if "\\" in text or "{" in text:
        text = _LATEX_FRACTION.sub(r"\1/\2", text)
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
    return -value if "-" in (match["sign"] or "") or match["late"] else value


def _gold_number(gold: str | int | float) -> Fraction:
    """Returns the right number. Raises ValueError: it is none."""
    text = _plain(str(gold).rpartition("####")[2]).strip().rstrip("%").strip()
    number = _NUMBER.fullmatch(text)
    value = None if number is None else _value(number)
    if value is None:
        raise ValueError(f"the gold answer is not a number: {gold!r}")
    return value
