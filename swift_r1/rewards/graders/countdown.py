"""Countdown: does the answer reach the target with every number used exactly once?

Answers are in a small arithmetic language, evaluated exactly:

    sum     = product (("+" | "-") product)*
    product = factor (("*" | "/") factor)*
    factor  = "-" factor | "(" sum ")" | integer

Anything else (powers, floor division, names, decimals, numbers with leading zeros) is a syntax error. Length, depth
and digits are bounded, so hostile text is refused at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from swift_r1.rewards.graders.answers import Grade, answered, last_answer

TAG_SCORE = 0.1  # oat's reward for an answer tag around a wrong answer
MAX_LENGTH = 1000
MAX_DEPTH = 50
MAX_DIGITS = 15

_TOKEN = re.compile(r"[0-9]+|[-+*/()]")
_FOREIGN = re.compile(r"[^-+*/()0-9\s]")


def grade_countdown(
    completion: str, nums: Sequence[int], target: int, mode: Literal["ms_swift", "oat"] = "ms_swift"
) -> Grade:
    """Grades one completion with exact fractions; only `+ - * /`, parentheses and unary minus are arithmetic.

    Args:
        completion: the model's text.
        nums: the numbers of the problem, each to be used exactly once.
        target: what the expression must equal.
        mode: `ms_swift`: the last answer tag behind the thought, in it the text before `=`; 1 for right, else 0.
            `oat`: the last answer tag of the last line, all its text (an `=` makes it wrong); 1 for right, 0.1
            for a tag with a wrong answer, 0 for no tag.

    Raises ValueError: the mode is unknown, or `nums` and `target` are not whole numbers; never because of the
    completion.
    """
    wanted = sorted(_whole(number) for number in nums)
    goal = _whole(target)
    if mode == "ms_swift":
        answer = last_answer(answered(completion))
        if answer is None:
            return Grade(0.0, False)
        return Grade(float(_is_right(answer.partition("=")[0], wanted, goal)), True)

    if mode == "oat":
        answer = last_answer(completion.rpartition("\n")[2])
        if answer is None:
            return Grade(0.0, False)
        return Grade(1.0 if _is_right(answer, wanted, goal) else TAG_SCORE, True)

    raise ValueError(f"unknown mode {mode!r}: ms_swift or oat")


def _is_right(expression: str, nums: list[int], target: int) -> bool:
    try:
        result = evaluate(expression)
    except ArithmeticFault:
        return False
    return sorted(result.numbers) == nums and result.value == target


def _whole(number: int | float | str) -> int:
    """Returns the number as an int, whatever type the data file gave it."""
    value = Fraction(number)
    if value.denominator != 1:
        raise ValueError(f"not a whole number: {number}")
    return value.numerator


class ArithmeticFault(ValueError):
    """Not an expression of this language, too large, or a division by zero."""


@dataclass(frozen=True, slots=True)
class ExpressionValue:
    """The exact value of an expression, and the integers written in it, from left to right."""

    value: Fraction
    numbers: tuple[int, ...]


def evaluate(text: str) -> ExpressionValue:
    """Evaluates one expression.

    >>> evaluate("(1 + 2) / 4")
    Evaluated(value=Fraction(3, 4), numbers=(1, 2))

    Raises ArithmeticFault: the text is not an expression, exceeds a bound, or divides by zero.
    """
    if len(text) > MAX_LENGTH:
        raise ArithmeticFault(f"longer than {MAX_LENGTH} characters")
    foreign = _FOREIGN.search(text)
    if foreign:
        raise ArithmeticFault(f"unexpected {foreign[0]!r}")
    parser = _Parser(_TOKEN.findall(text))
    value = parser.sum(0)
    if parser.token is not None:
        raise ArithmeticFault(f"unexpected {parser.token!r}")
    return ExpressionValue(value, tuple(parser.numbers))


class _Parser:
    """Recursive descent over the tokens, evaluating as it goes; one method per rule of the grammar."""

    def __init__(self, tokens: list[str]) -> None:
        self.numbers: list[int] = []
        self._rest = iter(tokens)
        self.token = next(self._rest, None)

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while self.token in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            value += sign * self._product(depth)
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._factor(depth)
        while self.token in ("*", "/"):
            operator = self._take()
            right = self._factor(depth)
            if operator == "*":
                value *= right
            elif right:
                value /= right
            else:
                raise ArithmeticFault("division by zero")
        return value

    def _factor(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ArithmeticFault(f"nested more than {MAX_DEPTH} deep")
        token = self._take()
        if token == "-":
            return -self._factor(depth + 1)
        if token == "(":
            value = self.sum(depth + 1)
            if self._take() != ")":
                raise ArithmeticFault("a parenthesis is not closed")
            return value

        if token is None or not token.isdigit():
            raise ArithmeticFault("unexpected end" if token is None else f"unexpected {token!r}")
        if len(token) > MAX_DIGITS or (token[0] == "0" and len(token) > 1):
            raise ArithmeticFault(f"not a number: {token[:MAX_DIGITS]}")
        self.numbers.append(int(token))
        return Fraction(int(token))

    def _take(self) -> str | None:
        token = self.token
        self.token = next(self._rest, None)
        return token
