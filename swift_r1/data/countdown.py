"""Countdown problems: reach a target from a few numbers, each used once. Generated, and always solvable.

Problem `index` of seed `seed` is a pure function of both, so any sample is made at once, without a file. Whether a
problem is for training or held out is decided by a hash of what makes it that problem (its sorted numbers and
target), so the two never share one, whatever the seeds.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

HELD_OUT_SHARE = 32  # one problem in so many is held out
_ATTEMPTS = 1_000_000


@dataclass(frozen=True, slots=True)
class CountdownSpec:
    """What problems to make.

    Attributes:
        counts: how many numbers a problem has, one of these with equal odds.
        numbers: smallest and largest number.
        operators: those a solution may use, of `+-*/`. Its divisions leave no remainder.
        targets: smallest and largest target.
    """

    counts: tuple[int, ...] = (3, 4)
    numbers: tuple[int, int] = (1, 99)
    operators: str = "+-*/"
    targets: tuple[int, int] = (10, 99)


@dataclass(frozen=True, slots=True)
class CountdownProblem:
    """Numbers, of which one expression at least reaches `target`."""

    nums: tuple[int, ...]
    target: int

    @property
    def identity(self) -> tuple[tuple[int, ...], int]:
        """Problems with the same sorted numbers and target are the same problem."""
        return tuple(sorted(self.nums)), self.target


DEFAULT_SPEC = CountdownSpec()


def is_held_out(nums: Sequence[int], target: int) -> bool:
    """Returns whether a problem belongs to the held-out set; the same for every seed and every spec."""
    key = f"{sorted(nums)}={target}".encode()
    return zlib.crc32(key) % HELD_OUT_SHARE == 0


def countdown_problem(
    index: int,
    seed: int = 42,
    split: Literal["train", "eval"] = "train",
    spec: CountdownSpec = DEFAULT_SPEC,
) -> CountdownProblem:
    """Problem number `index` of a split. Two indices can give the same problem, most of all in a small space.

    Raises ValueError where the spec has no such problem, as far as a million attempts can tell.
    """
    rng = random.Random(f"{seed}:{split}:{index}")
    lowest, highest = spec.targets
    first = spec.numbers[0]
    size = spec.numbers[1] - spec.numbers[0] + 1
    count = rng.choice(spec.counts)
    draw = rng.random
    for _ in range(_ATTEMPTS):
        nums = [first + int(draw() * size) for _ in range(count)]
        joins = [
            (draw(), draw(), spec.operators[int(draw() * len(spec.operators))])
            for _ in range(count - 1)
        ]
        target = _value(nums, joins)
        if target is None or not lowest <= target <= highest:
            continue
        if is_held_out(nums, target) == (split == "eval"):
            return CountdownProblem(tuple(nums), target)
    raise ValueError(f"no Countdown problem found for {spec} ({split})")


def countdown_problems(
    count: int,
    seed: int = 42,
    split: Literal["train", "eval"] = "train",
    spec: CountdownSpec = DEFAULT_SPEC,
) -> Iterator[CountdownProblem]:
    """Yields `count` problems in order of their index; those of the held-out split are all different.

    Raises ValueError where the spec has fewer than `count` of those, as far as many attempts can tell.
    """
    seen: set[tuple[tuple[int, ...], int]] = set()
    index = made = 0
    while made < count:
        problem = countdown_problem(index, seed, split, spec)
        index += 1
        if split == "eval":
            if problem.identity in seen:
                if index > 1000 + 100 * made:
                    raise ValueError(
                        f"only {made} held-out problems found for {spec}, {count} were asked for"
                    )
                continue
            seen.add(problem.identity)
        made += 1
        yield problem


# A join takes two terms out of those left, chosen by two numbers in [0, 1), and puts their result back.
_Join = tuple[float, float, str]


def _value(nums: Sequence[int], joins: Sequence[_Join]) -> int | None:
    """Returns what the joins make of the numbers; None when a division leaves a remainder."""
    terms = list(nums)
    for first, second, operator in joins:
        a = terms.pop(int(first * len(terms)))
        b = terms.pop(int(second * len(terms)))
        if operator == "+":
            terms.append(a + b)
        elif operator == "-":
            terms.append(a - b)
        elif operator == "*":
            terms.append(a * b)
        elif b == 0 or a % b:
            return None
        else:
            terms.append(a // b)
    return terms[0]
