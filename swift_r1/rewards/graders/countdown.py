"""Countdown: does the answer reach the target with every number used exactly once?"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from swift_r1.rewards.graders.arithmetic import ArithmeticFault, evaluate
from swift_r1.rewards.graders.grade import Grade
from swift_r1.rewards.graders.tags import first_answer, last_answer

TAG_SCORE = 0.1  # oat's reward for an answer tag around a wrong answer


def grade_countdown(
    completion: str, nums: Sequence[int], target: int, mode: Literal["ms_swift", "oat"] = "ms_swift"
) -> Grade:
    """Grades one completion with exact fractions; only `+ - * /`, parentheses and unary minus are arithmetic.

    Args:
        completion: the model's text.
        nums: the numbers of the problem, each to be used exactly once.
        target: what the expression must equal.
        mode: `ms_swift`: the first answer tag, in it the text before `=`; 1 for right, else 0.
            `oat`: the last answer tag of the last line, all its text (an `=` makes it wrong); 1 for right, 0.1
            for a tag with a wrong answer, 0 for no tag.

    Raises:
        ValueError: the mode is unknown, or `nums` and `target` are not whole numbers; never because of the completion.
    """
    wanted, goal = sorted(_whole(number) for number in nums), _whole(target)
    if mode == "ms_swift":
        answer = first_answer(completion)
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
    """The number as an int, whatever the data file made of it."""
    value = Fraction(number)
    if value.denominator != 1:
        raise ValueError(f"not a whole number: {number}")
    return value.numerator
