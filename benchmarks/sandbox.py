"""Programs a second that `code` scores, with a reward process per core: `python benchmarks/sandbox.py [--tests 5]`.

The reward's whole way: the pool's workers, the program out of the completion, a fresh process, /tmp and namespace for
each test, and the comparison. The programs are of the size that models write; every eighth is wrong and every
sixteenth raises. `python -c` is what one plain start of the interpreter costs, for comparison.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from types import SimpleNamespace

from swift_r1.rewards.pool import RewardPool
from swift_r1.rewards.types import RewardBatch

FLOOR = 50  # programs of one test a second on two cores
PROGRAM = """
import sys
from collections import Counter, defaultdict
def solve(values):
    counts = Counter(values)
    best = defaultdict(int)
    for value, count in sorted(counts.items()):
        best[value] = max(best[value - 1], best[value - 2] + value * count)
    return best[max(counts)] if counts else 0
def main():
    size, *values = map(int, sys.stdin.read().split())
    assert size == len(values)
    print(solve(values))
main()
"""


def completion(number: int) -> str:
    program = PROGRAM
    if number % 16 == 7:
        program = PROGRAM.replace("size == len", "size != len")
    elif number % 8 == 3:
        program = PROGRAM.replace("max(best", "min(best")
    return f"<think>Points taken together.</think>\n<answer>\n```python\n{program}```\n</answer>"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=400)
    parser.add_argument("--tests", type=int, default=1)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    flags = parser.parse_args()
    started = time.perf_counter()
    for _ in range(10):
        subprocess.run([sys.executable, "-I", "-S", "-c", "0"], check=True)
    print(f"python -c 0: {(time.perf_counter() - started) / 10 * 1000:.1f} ms")
    case = {"input": "5\n1 2 2 3 4", "output": "8"}
    tests = {"language": "python", "test_cases": [case] * flags.tests}
    args = SimpleNamespace(
        reward_timeout=10.0,
        reward_num_workers=flags.workers,
        reward_memory_limit=1.0,
        reward_env=[],
    )
    texts = [completion(number) for number in range(flags.programs)]
    batch = RewardBatch(texts, {"verification_info": [tests] * len(texts)}, 8)
    with RewardPool(args, ["code"]) as pool:
        pool.wait_ready()
        rates = []
        for _ in range(3):
            started = time.perf_counter()
            (column,) = pool.score(batch)
            rates.append(len(texts) / (time.perf_counter() - started))
            right = sum(value == 1.0 for value in column.values)
            print(
                f"{rates[-1]:.0f} programs a second, {rates[-1] * flags.tests:.0f} runs ({right} right)",
                flush=True,
            )
            assert not column.invalid, column.invalid[0]
    return 0 if max(rates) * flags.tests >= FLOOR else 1


if __name__ == "__main__":
    sys.exit(main())
