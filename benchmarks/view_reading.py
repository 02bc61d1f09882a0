"""How fast the completions of a large run are shown, and how much memory that takes.

    python benchmarks/view_reading.py            # 100,000 completions of about 1 KB
    python benchmarks/view_reading.py 1000000

A row is a request as the page makes it: the rows of the first page and how many there are. The process's resident
memory is that of all requests together; what importing the libraries takes is subtracted.
"""

from __future__ import annotations

import json
import random
import string
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb  # noqa: F401  imported before the clock starts, as in a page that runs
import psutil
import pyarrow  # noqa: F401
from rich.console import Console
from rich.table import Table

from swift_r1.lab.runs.completions import CompletionTable
from swift_r1.lab.runs.heatmap import heatmaps
from swift_r1.lab.runs.query import FAILURE, LENGTH, CompletionQuery

GROUPS, PER_GROUP = 32, 16


def row(place: int, words: list[str], chance: random.Random) -> dict[str, Any]:
    group, step = place // PER_GROUP, place // (GROUPS * PER_GROUP) + 1
    right, rare = float(chance.random() < 0.3), " rare needle" if chance.random() < 0.001 else ""
    answer = "<answer>(98 - 19) * 3</answer>" if chance.random() < 0.8 else ""
    return {
        "step": step,
        "prompt_id": f"countdown:{group % 997}",
        "request_id": f"5a2c33c42766/{step}/{group % GROUPS}",
        "number": place % PER_GROUP,
        "group": group % GROUPS,
        "prompt": "Using the numbers [98, 19, 3], create an equation that equals 237.\n" * 2,
        "completion": f'<think>{" ".join(chance.choices(words, k=150))}\n"so"{rare}</think>\n{answer}',
        "rewards/countdown": right,
        "rewards/format": float(bool(answer)),
        "reward": right + 0.1 * bool(answer),
        "advantage": chance.gauss(0, 1),
        "finish_reason": "stop" if answer else "length",
        "weight_version": step - 1,
        "nums": [98, 19, 3],
        "target": chance.randint(10, 999),
    }


def some_words(chance: random.Random) -> list[str]:
    return [
        "".join(chance.choices(string.ascii_lowercase, k=chance.randint(2, 9)))
        for _ in range(3_000)
    ]


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    chance = random.Random(0)
    words = some_words(chance)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "completions.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for place in range(count):
                file.write(json.dumps(row(place, words, chance), ensure_ascii=False) + "\n")
        measured(path, json.dumps(row(count, words, chance)))


class MostMemory(threading.Thread):
    """Reads a process's resident memory every 5 ms from now on; `end` returns the most bytes it has had."""

    def __init__(self, process: psutil.Process) -> None:
        super().__init__()
        self._process = process
        self._done = threading.Event()
        self._most = 0
        self.start()

    def run(self) -> None:
        while not self._done.wait(0.005):
            self._most = max(self._most, self._process.memory_info().rss)

    def end(self) -> int:
        self._done.set()
        self.join()
        return self._most


def measured(path: Path, line: str) -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    memory = MostMemory(process)
    result = Table("request", "seconds", "completions", title=f"{path.stat().st_size >> 20} MiB")

    def timed(name: str, do: Callable[[], int]) -> None:
        start = time.perf_counter()
        found = do()
        result.add_row(name, f"{time.perf_counter() - start:.3f}", str(found))

    def ask(query: CompletionQuery) -> int:
        table.page(query, 0, 50, longest=2_000)
        return table.count(query)

    def opened() -> int:
        table.refresh()
        return ask(CompletionQuery())

    def grown() -> int:
        with path.open("a", encoding="utf-8") as file:
            file.write((line + "\n") * 512)
        return table.refresh()

    start = time.perf_counter()
    with CompletionTable(path) as table:
        timed("opened, first page", opened)
        timed("512 completions more", grown)
        timed("second page", lambda: len(table.page(CompletionQuery(), 50, 50, longest=2_000)))
        timed(
            "last page",
            lambda: len(table.page(CompletionQuery(), table.count(CompletionQuery()) - 50, 50)),
        )
        timed("text in few", lambda: ask(CompletionQuery(text="Rare needle")))
        timed("text in all", lambda: ask(CompletionQuery(text="create an equation")))
        timed("reward > 0.5", lambda: ask(CompletionQuery(where=[("reward", ">", 0.5)])))
        timed("column of the data", lambda: ask(CompletionQuery(where=[("target", "<", 100)])))
        timed(
            "text and column", lambda: ask(CompletionQuery(text="so", where=[("target", "<", 100)]))
        )
        timed("by advantage", lambda: ask(CompletionQuery(order_by="advantage", descending=True)))
        timed("by length", lambda: ask(CompletionQuery(order_by=LENGTH)))
        timed("by column of the data", lambda: ask(CompletionQuery(order_by="target")))
        timed("one step", lambda: ask(CompletionQuery(steps=(7, 7))))
        timed("a group", lambda: len(table.group(7, 3)))
        timed("columns", lambda: len(table.columns))
        timed("prompts", lambda: table.prompts("237")[0])
        timed("failure classes, first time", lambda: len(table.failure_classes()))
        timed("failure classes", lambda: len(table.failure_classes()))
        timed("of one class", lambda: ask(CompletionQuery(where=[(FAILURE, "=", "truncated")])))
        timed("group shares", lambda: len(table.group_shares()))
        timed("heat map of rewards", lambda: len(heatmaps([table], "reward")[0].steps))
        timed("heat map of a column", lambda: len(heatmaps([table], "rewards/countdown")[0].steps))
    seconds = time.perf_counter() - start
    most = memory.end()
    console = Console(width=100)
    console.print(result)
    console.print(f"all in {seconds:.1f} s; {(most - before) / 2**20:.0f} MiB at most")


if __name__ == "__main__":
    main()
