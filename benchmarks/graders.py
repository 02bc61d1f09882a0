"""Gradings a second of the graders, on one core: `python benchmarks/graders.py [--data FOLDER]`.

GSM8K: worked solutions of the test split, each ending in its number, so that long texts are read. Math: every gold
answer of the five evaluation sets, boxed after some text, against itself and against the next item's; "symbolic": the
same in another spelling (0 + the answer), so that most need the symbolic check. The slowest of five passes is what
must be above the floor; it is the first, with nothing remembered from the pass before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from swift_r1.rewards.graders import Grade, grade_countdown, grade_gsm8k, grade_math

SETS = ("aime24", "amc23", "math500", "minerva", "olympiad_bench")
FLOORS = {"gsm8k": 10_000, "math fast": 2_000, "math symbolic": 2_000}


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def rate(name: str, grade: Callable[..., Grade], items: Iterable[tuple], repeats: int = 5) -> bool:
    """Prints the best and the slowest of a few passes, by the processor's time; False where that is below the floor."""
    items = list(items)
    seconds = []
    for _ in range(repeats):
        started = time.process_time()
        right = sum(grade(*item).score == 1.0 for item in items)
        seconds.append(time.process_time() - started)
    found = len(items) / min(seconds)
    slowest = len(items) / max(seconds)
    print(
        f"{name:14} {found:10,.0f} a second (slowest pass {slowest:,.0f}; {len(items)} items, {right} right)"
    )
    return slowest >= FLOORS.get(name, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    here = Path(__file__).resolve().parent.parent
    parser.add_argument(
        "--data",
        type=Path,
        default=os.environ.get("SWIFT_R1_DATA", here / ".." / "shared" / "data"),
    )
    data = Path(parser.parse_args().data)
    gsm8k = rows(data / "gsm8k_test.jsonl")
    golds = [row["answer"] for name in SETS for row in rows(data / "math_eval" / f"{name}.jsonl")]
    boxed = [
        f"So the answer is \\boxed{{{gold[0] if isinstance(gold, list) else gold}}}."
        for gold in golds
    ]
    ok = rate("gsm8k", grade_gsm8k, [(row["solution"], row["answer"]) for row in gsm8k])
    rate(
        "gsm8k text",
        grade_gsm8k,
        [(row["solution"].replace("####", "so"), row["answer"]) for row in gsm8k],
    )
    pairs = [*zip(boxed, golds, strict=True), *zip(boxed, golds[1:] + golds[:1], strict=True)]
    ok &= rate("math fast", grade_math, pairs)
    respelled = [
        (text.replace("\\boxed{", "\\boxed{0 + "), gold) for text, gold in pairs[: len(golds)]
    ]
    ok &= rate("math symbolic", grade_math, respelled)
    numbers = itertools.product(range(1, 20), range(1, 20), range(1, 10))
    rate(
        "countdown",
        grade_countdown,
        [(f"<answer>({a} + {b}) * {c}</answer>", (a, b, c), 24) for a, b, c in numbers],
    )
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
