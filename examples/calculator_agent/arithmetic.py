"""Arithmetic that takes two calls of a calculator: `37*58+71` and `37*58-71`, with numbers from 11 to 99.

The products of one tenth of the pairs of factors are held out: training has no problem with any of them, whatever the
seed. The calculator takes two numbers and one operator, so a right answer comes from three turns::

    <tool_call>{"name": "calculate", "arguments": {"expression": "37*58"}}</tool_call>
    <tool_call>{"name": "calculate", "arguments": {"expression": "2146+71"}}</tool_call>
    2217
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

NUMBERS = range(11, 100)
HELD_OUT = 128
SPLIT_SEED = 20251123  # not the run's seed: the held-out problems never change
WAYS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def calculated(expression: str) -> int:
    """Of two whole numbers and an operator between them.

    >>> calculated("37*58")
    2146
    """
    found = re.fullmatch(r"\s*(-?\d{1,12})\s*([-+*])\s*(\d{1,12})\s*", expression)
    if found is None:
        raise ValueError("give two whole numbers with one of + - * between them")
    return int(WAYS[found[2]](int(found[1]), int(found[3])))


@dataclass(frozen=True, slots=True)
class Problem:
    """`left * right`, then `other` added or subtracted."""

    left: int
    right: int
    way: str
    other: int

    @property
    def question(self) -> str:
        return f"{self.left}*{self.right}{self.way}{self.other}"

    @property
    def answer(self) -> int:
        return calculated(f"{self.left * self.right}{self.way}{self.other}")


def problems(split: str, rng: random.Random) -> Iterator[Problem]:
    """Endless problems of `train` or of `eval`, which have no product in common."""
    pairs = [(left, right) for left in NUMBERS for right in NUMBERS if left <= right]
    random.Random(SPLIT_SEED).shuffle(pairs)
    held_out = len(pairs) // 10
    pairs = pairs[held_out:] if split == "train" else pairs[:held_out]
    while True:
        yield Problem(*rng.sample(rng.choice(pairs), 2), rng.choice("+-"), rng.choice(NUMBERS))


def write_trace(problem: Problem, rng: random.Random) -> tuple[list[str], str]:
    """The expressions of the calls and the answer of somebody who knows the form of a call and can copy numbers, but
    neither calculates nor has a plan: every choice is drawn. One in twenty ends right."""
    expressions: list[str] = []
    while len(expressions) < 3 and rng.random() < (0.5 if expressions else 0.7):
        expressions.append(_drawn_expression(problem, expressions, rng))
    if expressions and rng.random() < 0.7:
        return expressions, str(calculated(expressions[-1]))
    return expressions, str(rng.choice((problem.left, problem.right, problem.other)))


def _drawn_expression(problem: Problem, expressions: list[str], rng: random.Random) -> str:
    """Two neighbours in the question, or the last answer and the end of the question."""
    if expressions and rng.random() < 0.5:
        return f"{calculated(expressions[-1])}{problem.way}{problem.other}"
    return rng.choice(
        (f"{problem.left}*{problem.right}", f"{problem.right}{problem.way}{problem.other}")
    )
