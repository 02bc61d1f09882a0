r"""Fifty wrong answers near each gold of GSM8K, MATH-500, AIME, Minerva and OlympiadBench: how many earn a reward?

`python -m tests.fuzz.near_answers [--data FOLDER] [--every 1] [--verifiers gsm8k math ...]`. They are near as numbers
(plus one, ten times, digits swapped, sign, a tiny relative change, reciprocal), as text, hedged, or right only in the
thought. What a verifier accepts is compared with the gold by exact arithmetic; what is equal to it after all is left out.
Lists the false positives, and ends with 1 where there are more than one in 10,000.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import islice
from pathlib import Path

from swift_r1.rewards.graders import grade_gsm8k, grade_math
from swift_r1.rewards.orm import build_reward

DATA = Path(
    os.environ.get("SWIFT_R1_DATA", Path(__file__).parents[2] / ".." / "shared" / "data")
).resolve()
SETS = (
    "gsm8k_test",
    *(f"math_eval/{name}" for name in ("math500", "aime24", "minerva", "olympiad_bench")),
)
NEAR = 50
ALLOWED = 1 / 10_000
NUMBER = re.compile(r"(?<![0-9.,])(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?![0-9])")
# where an answer stands; `math` reads the first alone
PLACES = (r"So it is \boxed{%s}.", "<answer>%s</answer>", "The answer is %s.")

accuracy = build_reward("accuracy")
VERIFIERS: dict[str, Callable[[str, str], float | None]] = {
    "accuracy": lambda text, gold: accuracy.call([text], {"solution": [gold]})[0],
    "gsm8k": lambda text, gold: grade_gsm8k(text, gold).score,
    "math": lambda text, gold: grade_math(text, gold).score,
    "math, math_verify": lambda text, gold: grade_math(text, gold, "math_verify").score,
}


def gold_answers(data: Path) -> list[str]:
    """Each once, without dollars and final full stops."""
    found: dict[str, None] = {}
    for name in SETS:
        for line in (data / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            answer = json.loads(line)["answer"]
            answer = answer[0] if isinstance(answer, list) else answer
            found[re.sub(r"(?<!\\)\$", "", str(answer)).strip().removesuffix(".")] = None
    return list(found)


def as_number(text: str) -> Fraction | None:
    return Fraction(text.replace(",", "")) if re.fullmatch(f"-?{NUMBER.pattern}", text) else None


def written(value: Fraction) -> str:
    """A decimal where it ends within 40 places, else a fraction."""
    scaled = value * 10**40
    if scaled.denominator > 1:
        return rf"{'-' * (value < 0)}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"
    whole, digits = divmod(abs(scaled.numerator), 10**40)
    return f"{'-' * (value < 0)}{whole}.{digits:040d}".rstrip("0").rstrip(".")


def near_numbers(value: Fraction) -> Iterator[str]:
    """Numbers that are another one, by exact arithmetic."""
    tiny = [Fraction(1, 10**places) for places in (2, 4, 6, 7, 9, 12, 16, 25)]
    near = [value + step for step in (1, -1, 2, -2, 10, -10, Fraction(1, 2), -Fraction(1, 10))]
    near += [value * factor for factor in (-1, 2, 10, 100, 1000, Fraction(1, 2), Fraction(1, 10))]
    near += [value * Fraction(1, 100), value**2, value**3, value - Fraction(1, 10**20)]
    near += [value * (1 + part) for part in tiny] + [value + tiny[-1], value * (1 - tiny[3])]
    near += [1 / value, -1 / value, 1 + 1 / value] if value else []
    digits = written(abs(value))
    texts = [
        digits[:at] + digits[at + 1] + digits[at] + digits[at + 2 :]
        for at in range(len(digits) - 1)
    ]
    texts += [
        digits[1:],
        digits[:-1],
        digits + digits[-1],
        digits[::-1],
        f"1{digits}",
        f"{digits}0",
    ]
    near += [Fraction(text) for text in texts if re.fullmatch(NUMBER.pattern, text)]
    yield from (written(number) for number in near if number != value)


def near_texts(gold: str) -> Iterator[str]:
    """Another number, sign, function, letter or bracket in it; a factor, power or summand more."""
    for found in list(NUMBER.finditer(gold))[:6]:
        number = Fraction(found[0].replace(",", ""))
        for other in (number + 1, number * 10, number + Fraction(1, 10**9), abs(number - 1)):
            yield gold[: found.start()] + written(other) + gold[found.end() :]
    for old, new in (
        ("+", "-"),
        ("-", "+"),
        ("sin", "cos"),
        (r"\pi", "e"),
        ("x", "y"),
        ("n", "k"),
        ("[", "("),
        ("]", ")"),
    ):
        if old in gold:
            yield gold.replace(old, new, 1)
    yield from (
        rf"-({gold})",
        rf"({gold})+1",
        rf"({gold})-10^{{-30}}",
        rf"10({gold})",
        rf"\frac{{1}}{{{gold}}}",
    )
    yield from (
        rf"({gold})(1+10^{{-12}})",
        rf"({gold})(1-\frac{{1}}{{7^{{40}}}})",
        r"\frac{1}{7^{40}}",
    )
    yield from (
        rf"\sqrt{{{gold}}}",
        rf"({gold})^2",
        rf"{gold}\pi",
        f"{gold}x",
        "",
    )
    yield from (
        gold[:-1],
        gold.lstrip("\\")[1:],
        rf"({gold})+\sqrt{{2}}\cdot 10^{{-20}}",
        r"\text{none}",
    )


def hedged(gold: str, other: str) -> Iterator[str]:
    """The gold with a word or sign that makes it a guess, a bound, another unit's or one of several."""
    for words in (
        "not %s",
        "at least %s",
        "more than %s",
        "about %s",
        "%s or more",
        "%s?",
        "x > %s",
        r"x \ne %s",
    ):
        yield words % gold
    for words in (
        r"\text{not }%s",
        r"\text{at most }%s",
        r"%s\text{ or more}",
        "%s thousand",
        r"%s\text{ million}",
    ):
        yield words % gold
    for words in (
        "%s or %s",
        "%s and %s",
        "between %s and %s",
        "either %s or %s",
        r"%s\text{ or }%s",
    ):
        yield words % (other, gold)
        yield words % (gold, other)
    yield from (f"{other} feet {gold} inches", f"{gold} feet {other} inches", f"{gold} in {other}7")


def thoughts(gold: str, other: str) -> Iterator[str]:
    """The gold in the thought, or before the last place; another answer, or none, where it counts."""
    thought = rf"So \boxed{{{gold}}}. <answer>{gold}</answer> The answer is {gold}."
    for opened in ("<think>", ""):
        yield rf"{opened}{thought}</think> So \boxed{{{other}}}."
        yield rf"{opened}{thought}</think> <answer>{other}</answer>"
        yield rf"{opened}{thought}</think> The answer is {other}."
    yield from (
        f"<think>{thought}",
        rf"\boxed{{{gold}}}, no, \boxed{{{other}",
        f"<answer>{gold}</answer>, no, <answer>{other}",
    )


def completions(gold: str, places: Sequence[str] = PLACES) -> dict[str, bool]:
    """The fifty, and whether it could be equal: most of them other values, the rest hedged, or in the thought."""
    value = as_number(gold)
    values = dict.fromkeys(text for text in near_texts(gold) if text.strip() != gold)
    if value is not None:
        values = dict.fromkeys(near_numbers(value)) | {
            text: None for text in values if not as_number(text)
        }
    other = next(iter(values))
    words = list(hedged(gold, other))
    start = len(gold) + sum(map(ord, gold))  # another part of them for another gold
    chosen = dict.fromkeys((words[(start + at) % len(words)] for at in range(15)), False)
    chosen |= dict.fromkeys(islice(values, NEAR - 9 - len(chosen)), True)
    placed = {
        places[(start + at) % len(places)] % text: chosen[text] for at, text in enumerate(chosen)
    }
    return placed | dict.fromkeys(thoughts(gold, other), False)


def is_equal(gold: str, text: str) -> bool:
    """Whether the last thing that stands where an answer should is the gold by exact arithmetic, not by a grader."""
    from math_verify import parse
    from sympy import Basic, Float, Rational, simplify

    found = re.search(
        r"(?:.*\\boxed\{(.*)\}\.|.*<answer>(.*)</answer>|.*The answer is (.*)\.)$", text, re.DOTALL
    )
    answer = next((part for part in found.groups() if part is not None), "") if found else ""
    values = []
    for part in (gold, answer):
        read = next((item for item in parse(f"\\boxed{{{part}}}") if isinstance(item, Basic)), None)
        if read is None:
            return re.sub(r"[\s{}()]", "", gold) == re.sub(r"[\s{}()]", "", answer)
        exact = {number: Rational(str(number)) for number in read.atoms(Float)}
        values.append(read.xreplace(exact).doit())
    try:
        return bool(values[0] == values[1] or simplify(values[0] - values[1]) == 0)
    except TypeError:  # sets, relations
        return False


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--every", type=int, default=1, help="take every such gold")
    parser.add_argument("--verifiers", nargs="+", choices=VERIFIERS, default=list(VERIFIERS))
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    golds = gold_answers(options.data)[:: options.every]
    print(f"{len(golds)} different golds")
    is_over = False
    for name in options.verifiers:
        started = time.process_time()
        count = equal = 0
        wrong = []
        for gold in golds:
            if name == "gsm8k" and as_number(gold) is None:
                continue
            near = completions(gold, PLACES[:1] if "math" in name else PLACES)
            for text, may_be_equal in near.items():
                count += 1
                if VERIFIERS[name](text, gold):
                    if may_be_equal and is_equal(gold, text):
                        equal += 1
                    else:
                        wrong.append(f"{gold!r}: {text!r}")
        seconds = time.process_time() - started
        print(
            f"{name}: {len(wrong)} of {count - equal} wrong answers are right; {equal} equal ones left out; {seconds:.0f} s"
        )
        for line in wrong:
            print(f"    {line}")
        is_over |= len(wrong) > ALLOWED * (count - equal)
    return int(is_over)


if __name__ == "__main__":
    sys.exit(main())
