"""Small Countdown: three numbers, `+ - *`, one target, and a model that writes its search out.

A problem is three numbers from 1 to 9 and a target from 1 to 99 that some `a o b o c` reaches, each number
used once, no parentheses: 1,313 problems as sorted numbers + target. 128 of them are held out, always the
same ones, whatever the seed.

The prompt is `4 6 5>29` and a newline. The completion tries candidates one after another, works each out, and
says after each whether it hits the target (`y`) or not (`n`)::

    <think>4+6*5=4+30=34n,4*6+5=24+5=29y</think><answer>4*6+5</answer>

The verdict is what makes a longer search pay: without it the policy has nothing to stop on, and reinforcement
learning stays flat.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement, permutations, product

NUMBERS = range(1, 10)
TARGETS = range(1, 100)
HELD_OUT = 128
MOST_CANDIDATES = 5
SPLIT_SEED = 20250124  # not the run's seed: the held-out problems never change

_PRODUCT = re.compile(r"(\d+)\*(\d+)")
_SUM = re.compile(r"(-?\d+)([+-]\d+)")


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """`nums` sorted, so that a problem is the same whatever order the prompt shows them in."""

    nums: tuple[int, int, int]
    target: int


def work(expression: str) -> str:
    """The expression and each step of its evaluation: products first, then from the left.

    >>> work("4+6*5")
    '4+6*5=4+30=34'
    """
    steps = [expression]
    while not re.fullmatch(r"-?\d+", steps[-1]):
        step, products = _PRODUCT.subn(lambda m: str(int(m[1]) * int(m[2])), steps[-1], count=1)
        if not products:
            step = _SUM.sub(lambda m: str(int(m[1]) + int(m[2])), step, count=1)
        steps.append(step)
    return "=".join(steps)


@cache
def candidates(nums: tuple[int, int, int]) -> dict[str, int]:
    """All expressions `a o b o c` that use each of `nums` once, with their values."""
    orders = sorted(set(permutations(nums)))
    expressions = [f"{a}{o}{b}{p}{c}" for (a, b, c), o, p in product(orders, "+-*", "+-*")]
    return {e: int(work(e).rpartition("=")[2]) for e in expressions}


@cache
def split() -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
    """All problems as (training, held out): disjoint, and the same in every run."""
    problems = sorted(
        {
            Problem(nums, value)
            for nums in combinations_with_replacement(NUMBERS, 3)
            for value in candidates(nums).values()
            if value in TARGETS
        }
    )
    random.Random(SPLIT_SEED).shuffle(problems)
    return tuple(problems[HELD_OUT:]), tuple(problems[:HELD_OUT])


def prompt(nums: Sequence[int], target: int) -> str:
    """What the user says. The model's chat template ends it with a newline."""
    return f"{' '.join(map(str, nums))}>{target}"


def write_trace(
    problem: Problem,
    rng: random.Random,
    hit: float = 0.4,
    give_up: float = 0.2,
    most: int = MOST_CANDIDATES,
) -> str:
    """Writes a search that is honest but short of breath; most of these end right, far fewer of the model's own.

    Each candidate is drawn at random (a solution with probability `hit`, else anything not tried yet); the
    search ends at the first solution, after `most` candidates, or after a miss with probability `give_up`, and
    answers the last candidate, wrong as it may be. What a policy can learn from here on: search longer, and guess
    better. It keeps to `most`, since it has never seen more: without that, searches grow until they are cut off.
    """
    values = candidates(problem.nums)
    solutions = [e for e, value in values.items() if value == problem.target]
    left = list(values)
    rng.shuffle(left)
    tried = []
    while left:
        expression = rng.choice(solutions) if rng.random() < hit else left.pop()
        right = values[expression] == problem.target
        tried.append(work(expression) + ("y" if right else "n"))
        if right or len(tried) == most or rng.random() < give_up:
            break
    return f"<think>{','.join(tried)}</think><answer>{expression}</answer>"
