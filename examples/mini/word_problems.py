r"""Two-step word problems for models of half a million parameters, in the answer forms of the recipes.

    ann buys 3 bags of 4 pens. 5 are lost. how many pens has ann?

A problem is three numbers from 2 to 7 and one of five stories, each of which says which operation comes first and
which second. 200 problems are held out, the same ones whatever the seed. A worked answer shows both steps::

    3*4=12, 12-5=7

What comes before and behind it is the recipe's form, see `FORMS`. The worked answers that a model begins with
(`write_trace`) calculate right but often take the wrong operation: about two in five end right. To choose the right
one is what is left to reinforcement learning.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product

from swift_r1.data.prompts import Wording

NUMBERS = range(2, 8)
HELD_OUT = 200
SPLIT_SEED = 20250221  # not the run's seed: the held-out problems never change
RIGHT_OPERATION = 0.6  # chance of it, at each of the two steps of a trace
NAMES, THINGS = ("ann", "tom", "mia", "sam"), ("pens", "apples", "books", "cups")
STORIES: Mapping[str, str] = {
    "+-": "{n} has {a} {t} and finds {b} more. {c} are lost. how many {t} has {n}?",
    "*-": "{n} buys {a} bags of {b} {t}. {c} are lost. how many {t} has {n}?",
    "*+": "{n} buys {a} bags of {b} {t} and finds {c} more. how many {t} has {n}?",
    "-*": "{n} has {a} {t}, then {b} are lost. {m} has {c} times as many. how many {t} has {m}?",
    "+*": "{n} has {a} {t} and finds {b} more. {m} has {c} times as many. how many {t} has {m}?",
}


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """`operations` is a key of `STORIES`: the first is between `a` and `b`, the second between that and `c`."""

    operations: str
    a: int
    b: int
    c: int

    @property
    def steps(self) -> tuple[str, int]:
        """The worked answer and its result."""
        return worked(self, self.operations)

    def question(self, rng: random.Random) -> str:
        names, thing = rng.sample(NAMES, 2), rng.choice(THINGS)
        return STORIES[self.operations].format(
            n=names[0], m=names[1], t=thing, a=self.a, b=self.b, c=self.c
        )


@dataclass(frozen=True, slots=True)
class Form:
    """How a recipe asks and how it is answered.

    Attributes:
        wording: the flags `--system`, `--prompt_template` and `--response_prefix` of its mini.sh.
        answer: the rest of the model's turn, with `{steps}` and `{result}`.
        rambles: half of the traces go on with another question, as base models do: for `--stop_words`.
    """

    wording: Wording
    answer: str
    rambles: bool = False


TAG_SYSTEM = "think first, then give one number. <reasoning> reasoning here </reasoning> <answer> number here </answer>"
FORMS: Mapping[str, Form] = {
    "gsm8k": Form(Wording(), "{steps}\n#### {result}", rambles=True),
    "tags": Form(
        Wording(TAG_SYSTEM, response_prefix="<reasoning>"),
        "{steps}</reasoning>\n<answer>{result}</answer>",
    ),
    "boxed": Form(Wording(template="qwen_math"), "{steps}, so \\boxed{{{result}}}."),
}


def worked(problem: Problem, operations: str) -> tuple[str, int]:
    """Both steps with the given operations, and the result.

    >>> worked(Problem("*-", 3, 4, 5), "*-")
    ('3*4=12, 12-5=7', 7)
    """
    first = _calculated(problem.a, operations[0], problem.b)
    result = _calculated(first, operations[1], problem.c)
    steps = (
        f"{problem.a}{operations[0]}{problem.b}={first}, {first}{operations[1]}{problem.c}={result}"
    )
    return steps, result


def _calculated(left: int, operation: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[operation]


@cache
def split() -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
    """All problems whose numbers never fall below 0, as (training, held out)."""
    every = (
        Problem(story, *numbers) for story in STORIES for numbers in product(NUMBERS, repeat=3)
    )
    problems = [p for p in every if p.steps[1] >= 0 and (p.operations[0] != "-" or p.a > p.b)]
    random.Random(SPLIT_SEED).shuffle(problems)
    return tuple(problems[HELD_OUT:]), tuple(problems[:HELD_OUT])


def write_trace(problem: Problem, form: Form, rng: random.Random) -> str:
    """The model's turn behind the prompt: calculated right, each operation right with `RIGHT_OPERATION`."""
    first = _taken(problem.operations[0], "+-*", rng)
    # No product of a product: its numbers would be larger than any that is ever right.
    second = _taken(problem.operations[1], "+-" if first == "*" else "+-*", rng)
    steps, result = worked(problem, first + second)
    text = form.answer.format(steps=steps, result=result)
    if form.rambles and rng.random() < 0.5:
        text += f"\n\nQuestion: {rng.choice(split()[0]).question(rng)}"
    return text


def _taken(right: str, possible: str, rng: random.Random) -> str:
    if right in possible and rng.random() < RIGHT_OPERATION:
        return right
    return rng.choice([one for one in possible if one != right])
