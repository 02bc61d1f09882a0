"""Mutated completions through each grader: never an exception, never over its time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from swift_r1.rewards.graders import Grade, grade_countdown, grade_gsm8k, grade_math

LONGEST = 0.25  # seconds of processor time for one grading

SEEDS = [
    "<think>1 + 2 = 3</think> <answer>(1 + 2) * 3</answer>",
    "<think>3 * 2 - 1</think>\n<answer>3*2-1 = 5</answer>",
    r"So we find $x^2 + 2x + 1$, hence \boxed{\frac{1}{2}} and \boxed{(x+1)^2}.",
    r"</think> <answer>\boxed{\left( 3, \frac{\pi}{2} \right)}</answer>",
    r"It is \boxed{12,\!345.5\text{ cm}^2} or \boxed{3 \pm 2\sqrt[3]{2}}",
    "He pays 5 * $18.00 = $90.00 in 1,234 days.\n#### 90",
    r"\boxed{x \in \{1 \pm \sqrt{2}, 3^\circ\}} or \boxed{\begin{pmatrix} 1 & x^2 \\ 2 & 12\,345 \end{pmatrix}}",
    r"\boxed{\{1, 2\} \cup [3, 4) \cup \binom{5}{2}! + \log_{2} 8 + |x| + \sin^{2} 3x}",
]
LATEX_PIECES = r"\boxed{ \left( \right) \frac \sqrt \pi \pm \cup \text{ \{ \} \infty \sin \log_ \% \, \! \binom \lfloor"
LATEX_PIECES += r" \rfloor \\ \in \begin{pmatrix} \end{pmatrix} \mathbf{ \emptyset ^\circ \mp \le 1&2\\3&4 x_1= \approx"
PLAIN_PIECES = "{ } ( ) [ ] ^ ^{ _ + - * / // ** = , ; ! | . 0 1 2 3 9 99999 1e9 x e i % $ ~ #### nan inf lambda"
TAG_PIECES = "<answer> </answer> <think> </think> (1+2)*3 3*(1+2) 2*3-1 ٣ − é 𝟗"
PIECES = [
    *LATEX_PIECES.split(),
    *PLAIN_PIECES.split(),
    *TAG_PIECES.split(),
    " ",
    "\n",
    "\x00",
    "\ud800",
    "\\",
]


def mutated(chance: random.Random) -> str:
    """A seed after a few edits: pieces put in, spans left out, doubled, swapped or repeated many times."""
    text = chance.choice(SEEDS)
    for _ in range(chance.randint(1, 8)):
        start = chance.randrange(len(text) + 1)
        end = min(len(text), start + chance.randint(0, 12))
        span = text[start:end]
        kind = chance.randrange(12)
        if kind < 6:
            new = chance.choice(PIECES) + span
        elif kind < 8:
            new = ""
        elif kind == 8:
            new = span * 2
        elif kind == 9:
            new = chance.choice(PIECES) * chance.choice([2, 5, 80])
        elif kind == 10:
            new = span[::-1]
        else:
            new = chance.choice(SEEDS)[: chance.randint(1, 60)]
        text = text[:start] + new + text[end:]
    return text


def timed(grade: Callable[[], Grade], longest: float, text: str) -> Grade:
    started = time.process_time()
    result = grade()
    assert time.process_time() - started < longest, text
    return result


def hammer(
    count: int, seed: int, grade: Callable[[str, random.Random], Grade], longest: float = LONGEST
) -> list[float]:
    chance = random.Random(seed)
    scores = []
    for _ in range(count):
        text = mutated(chance)
        result = timed(lambda text=text: grade(text, chance), longest, text)  # type: ignore[misc]
        assert result.score in (0.0, 0.1, 1.0) and isinstance(result.formatted, bool), text
        scores.append(result.score)
    return scores


def gsm8k(text: str, chance: random.Random) -> Grade:
    return grade_gsm8k(text, "90", chance.choice(["number", "oat", "r1rl"]))


def countdown(text: str, chance: random.Random) -> Grade:
    return grade_countdown(text, [1, 2, 3], 9, chance.choice(["ms_swift", "oat"]))


def fast_math(text: str, chance: random.Random) -> Grade:
    matrix = r"\begin{pmatrix} 1 & x^2 \\ 2 & 12345 \end{pmatrix}"
    gold = chance.choice(
        [
            r"\frac{1}{2}",
            "(x+1)^2",
            r"(3, \frac{\pi}{2})",
            ["5", r"\{1,2\}"],
            142.0,
            matrix,
            r"1 \pm 2",
        ]
    )
    return grade_math(text, gold, answer=chance.choice(["boxed", "tag", "tag_strict"]))


def library_math(text: str, chance: random.Random) -> Grade:
    return grade_math(text, chance.choice([r"\frac{1}{2}", "(x+1)^2", "2^{99}"]), "math_verify")


def test_mutated_completions() -> None:
    assert 0 < sum(hammer(4_000, 1, gsm8k)) < 4_000
    assert 0 < sum(hammer(4_000, 2, fast_math)) < 4_000
    assert 0 < sum(hammer(150, 3, library_math, longest=25.0)) < 150
    assert 0 < sum(hammer(4_000, 4, countdown)) < 4_000
