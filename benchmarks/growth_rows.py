"""Start of a run over many rows: time to its first prompts, memory, and the cache, the first time and the second.

    python benchmarks/growth_rows.py                                   # 10^3 to 10^5 rows of JSON lines
    python benchmarks/growth_rows.py --sizes 1000 1000000 --kind parquet
    python benchmarks/growth_rows.py --sizes 1000 10000 100000 1000000 10000000 --plot true

Rows of a question and its answer go through a preprocessor plugin in Python, which is most of the first start and which
`--processes` divides. The second start takes the rows from the cache. Each start is a process of its own, from the
flags to 64 tokenised prompts, with held-out rows taken out of the training rows and `--max_length` looked at. Memory is
that of the process and its children without pages of mapped files, beyond what the imports take. A line of JSON for
each size has the wall-clock seconds too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from growth_plot import growth

DEMO = Path(__file__).parent.parent / "examples" / "countdown_demo"
PROMPTS = 64
SERIES = {
    "cpu": "first start, CPU s",
    "cpu_second": "second start, CPU s",
    "memory": "peak MB",
    "memory_second": "peak MB, second",
    "cache": "cache MB",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--kind", choices=("jsonl", "parquet"), default="jsonl")
    parser.add_argument("--processes", type=int, default=1, help="--dataset_num_proc")
    parser.add_argument("--plot", choices=("true", "false"), default="false")
    # the process that is measured
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start is not None:
        print(json.dumps(start(args.start, args.processes)))
        return 0
    rows = []
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"rows.{args.kind}"
            write(file, size)
            row: dict[str, float] = {"rows": size, "file": file.stat().st_size / 1e6}
            for turn in ("", "_second"):
                words = [
                    sys.executable,
                    __file__,
                    "--start",
                    str(file),
                    "--processes",
                    str(args.processes),
                ]
                found = run_and_watch(words, folder)
                row[turn.removeprefix("_") or "first"] = found["seconds"]
                row[f"cpu{turn}"], row[f"memory{turn}"] = found["cpu"], found["memory"]
            row["cache"] = (
                sum(path.stat().st_size for path in (Path(folder) / "data").iterdir()) / 1e6
            )
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    growth(
        f"rows-{args.kind}",
        "rows",
        rows,
        SERIES,
        y_label="CPU seconds, MB",
        plot=args.plot == "true",
    )
    return 0


def write(path: Path, count: int) -> None:
    """Rows of about 80 bytes, all different."""
    import pyarrow as pa
    from pyarrow import parquet

    def block(first: int) -> list[dict[str, Any]]:
        numbers = range(first, min(first + 100_000, count))
        return [
            {
                "question": f"How much is {n} and {n % 89} times {n % 97}?",
                "gold": n + n % 89 * (n % 97),
            }
            for n in numbers
        ]

    if path.suffix == ".jsonl":
        with path.open("w", encoding="utf-8") as file:
            for first in range(0, count, 100_000):
                file.writelines(json.dumps(row) + "\n" for row in block(first))
        return
    with parquet.ParquetWriter(path, pa.Table.from_pylist(block(0)[:1]).schema) as writer:
        for first in range(0, count, 100_000):
            writer.write_table(pa.Table.from_pylist(block(first)))


def preprocess(row: dict[str, Any]) -> dict[str, Any]:
    """As a user's plugin has it."""
    content = f"{row['question']} Think first, then answer between <answer> and </answer>."
    return {"messages": [{"role": "user", "content": content}], "solution": row["gold"]}


def start(file: Path, processes: int) -> dict[str, float]:
    """What the launcher and rank 0 do with the data flags before the first generation."""
    sys.path.insert(0, str(DEMO))
    import numpy  # noqa: F401  imports are no part of it
    import pyarrow  # noqa: F401
    import tiny_model

    from swift_r1.data import DatasetMeta, register_dataset
    from swift_r1.data.loading import columns_of, load_rows
    from swift_r1.data.prompts import PromptEncoder
    from swift_r1.data.sampler import PromptSampler
    from swift_r1.data.sources import DataFlags
    from swift_r1.rollout.prompts import PromptStream

    register_dataset(
        DatasetMeta(dataset_name="rows", dataset_path=str(file), preprocess_func=preprocess)
    )
    tokenizer = tiny_model.make_tokenizer()
    before, began, cpu = held(psutil.Process()), time.perf_counter(), cpu_seconds()
    data = load_rows(
        DataFlags(["rows"], dataset_num_proc=processes, evaluates=True, eval_limit=500)
    )
    columns_of(data.train, data.eval)
    data.train.digest()
    encoder = PromptEncoder(tokenizer, max_length=256)
    rows = encoder.fitting(data.train)
    stream = PromptStream(rows, encoder, PromptSampler(len(rows), PROMPTS), workers=0)
    stream.take(PROMPTS)
    seconds, spent = time.perf_counter() - began, cpu_seconds() - cpu
    return {"seconds": seconds, "cpu": spent, "held_before": before}


def cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def run_and_watch(words: list[str], cache: str) -> dict[str, float]:
    """What `start` says, and `memory`: most MB that its processes held after the imports, looked at every 20 ms."""
    with subprocess.Popen(
        words, env={**os.environ, "SWIFT_R1_CACHE": cache}, stdout=subprocess.PIPE
    ) as running:
        process, peak = psutil.Process(running.pid), 0
        while running.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                peak = max(peak, sum(map(held, [process, *process.children(recursive=True)])))
            time.sleep(0.02)
        if running.returncode or running.stdout is None:
            sys.exit(running.returncode)
        found = json.loads(running.stdout.read().splitlines()[-1])
    return found | {"memory": (peak - found["held_before"]) / 1e6}


def held(process: psutil.Process) -> int:
    """Bytes of its memory that are no mapped files."""
    own = process.memory_info()
    return own.rss - own.shared


if __name__ == "__main__":
    sys.exit(main())
