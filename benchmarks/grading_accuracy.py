r"""How often the math graders are wrong: `python benchmarks/grading_accuracy.py [--data FOLDER] [--list 5]`.

2,000 answers that keep the value of a gold answer of the five evaluation sets and 2,000 near ones that do not, each
in a box after some working, are graded by `fast`, by `math_verify` as we call it, and by the library as it comes
(raw). `rewritten_answers.py` makes the answers; they are the same every time. Prints how many of each kind were graded
wrongly, and examples. `--verifiers fast` leaves the slow library out.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from rewritten_answers import BY_RULE, CHANGES, KEEPS, Rule

from swift_r1.rewards.graders import grade_math

SETS = ("aime24", "amc23", "math500", "minerva", "olympiad_bench")
COUNT = 2_000  # of each sort
WORKING = (
    "{}",
    "The answer is {}.",
    "As $x^2 - 4x + 3 = (x-1)(x-3)$ and $2^3 \\cdot 2^4 = 2^7$, we get\n\\[ {} \\]",
    "We might say $\\boxed{{0}}$. But $5!! = 15$, so that is wrong.\n\nThe final answer is ${}$.",
    "By $c^2 = a^2 - b^2$ and $2^{{2023}} \\equiv 8 \\pmod{{10}}$ there is one left. **Answer:** {}",
    "<think>\n3 + 4 = 7, and $9^{{9^{{9}}}}$ is large.\n</think>\n\n$$ {} $$\n",
)

Pair = tuple[str, str, str]  # kind, gold answer, answer


def gold_answers(data: Path) -> list[str]:
    """Each once, without dollars, line ends and final full stops."""
    rows = (
        json.loads(line)
        for name in SETS
        for line in (data / "math_eval" / f"{name}.jsonl").read_bytes().splitlines()
    )
    found: dict[str, None] = {}
    for row in rows:
        answer = row["answer"][0] if isinstance(row["answer"], list) else row["answer"]
        text = str(int(answer) if isinstance(answer, float) and answer.is_integer() else answer)
        found[re.sub(r"(?<!\\)\$", "", text).strip().removesuffix(".").removeprefix("\\quad")] = (
            None
        )
    return list(found)


def pairs(
    rules: dict[str, Rule], golds: list[str], count: int = COUNT, seed: int = 13
) -> list[Pair]:
    """So many pairs, as many of each kind as there are until the rarer kinds run out; in a fixed order."""
    chance = random.Random(seed)
    waiting = []
    for kind, rewrite in rules.items():
        made = [(kind, gold, answer) for gold in golds for answer in dict.fromkeys(rewrite(gold))]
        chance.shuffle(made)
        waiting.append(made)
    chosen: list[Pair] = []
    while len(chosen) < count and any(waiting):
        chosen += [made.pop() for made in waiting if made]
    return chosen[:count]


def raw(completion: str, gold: str) -> float:
    from math_verify import parse, verify

    return float(verify(parse(f"${gold}$"), parse(completion)))


VERIFIERS: dict[str, Callable[[str, str], float]] = {
    "fast": lambda completion, gold: grade_math(completion, gold).score,
    "math_verify": lambda completion, gold: grade_math(completion, gold, "math_verify").score,
    "raw": raw,
}


def completion(answer: str, number: int) -> str:
    return WORKING[number % len(WORKING)].format(f"\\boxed{{{answer}}}")


def measure(
    title: str, chosen: list[Pair], right: float, verifiers: list[str], listed: int
) -> None:
    """Prints for each kind how many were graded wrongly, and how many grades the working changes."""
    wrong: dict[str, dict[str, list[Pair]]] = defaultdict(lambda: defaultdict(list))
    swayed: dict[str, int] = defaultdict(int)
    for number, pair in enumerate(chosen):
        for name in verifiers:
            score, alone = (
                VERIFIERS[name](completion(pair[2], place), pair[1]) for place in (number, 0)
            )
            swayed[name] += score != alone
            if score != right:
                wrong[pair[0]][name].append(pair)
    print(
        f"\n| {title} | answers | "
        + " | ".join(verifiers)
        + " |\n|---|---|"
        + "---|" * len(verifiers)
    )
    kinds = dict.fromkeys(pair[0] for pair in chosen)
    for kind in kinds:
        count = sum(pair[0] == kind for pair in chosen)
        print(
            f"| {kind} | {count} | "
            + " | ".join(str(len(wrong[kind][name])) for name in verifiers)
            + " |"
        )
    totals = [sum(len(wrong[kind][name]) for kind in kinds) for name in verifiers]
    shares = " | ".join(f"{total} ({100 * total / len(chosen):.1f} %)" for total in totals)
    print(f"| **all** | {len(chosen)} | {shares} |")
    print(
        "| changed by the working | | "
        + " | ".join(str(swayed[name]) for name in verifiers)
        + " |\n"
    )
    for name in verifiers if listed else ():
        for kind in kinds:
            for _, gold, answer in wrong[kind][name][:listed]:
                print(f"    {name}, {kind}: {answer!r} for {gold!r}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(__file__).resolve().parent.parent
    parser.add_argument(
        "--data",
        type=Path,
        default=os.environ.get("SWIFT_R1_DATA", here / ".." / "shared" / "data"),
    )
    parser.add_argument("--verifiers", nargs="+", choices=VERIFIERS, default=list(VERIFIERS))
    parser.add_argument("--list", type=int, default=3, help="examples of each kind and verifier")
    options = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    golds = gold_answers(Path(options.data))
    print(f"{len(golds)} different gold answers")
    measure("right answers called wrong", pairs(KEEPS, golds), 1.0, options.verifiers, options.list)
    measure("the same, by the rules of fast", pairs(BY_RULE, golds, 300), 1.0, options.verifiers, 0)
    measure(
        "wrong answers called right", pairs(CHANGES, golds), 0.0, options.verifiers, options.list
    )


if __name__ == "__main__":
    main()
