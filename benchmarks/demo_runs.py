"""Runs of `examples/countdown_demo` with other flags, for benchmarks. One that was ended goes on, and one that is over
is not done again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swift_r1.cli import demo  # its flags

DEMO = demo.FILES


def trained(folder: Path, more: Sequence[str] = (), **own: Any) -> dict[int, float]:
    """The held-out accuracy by optimizer step, 0 before the first; `own` and `more` are flags, of which the last count.
    Ends the benchmark where the run fails, or ended before its `max_steps`."""
    summary = folder / "summary.json"
    flags = by_name((*demo.DATA, *demo.FLAGS, *demo.OF_GRPO))
    own |= {"output_dir": folder, "add_version": "false", "resume_from_checkpoint": "last"}
    flags |= {f"--{name}": [str(value)] for name, value in own.items()} | by_name(more)
    if not summary.exists() or json.loads(summary.read_text())["steps"] < own["max_steps"]:
        folder.mkdir(parents=True, exist_ok=True)
        words = [word for flag, values in flags.items() for word in (flag, *values)]
        with (folder.parent / f"{folder.name}.log").open("ab") as log:
            if subprocess.run(
                [*demo.SWIFT, "rlhf", *words], stdout=log, stderr=subprocess.STDOUT
            ).returncode:
                sys.exit(f"{folder} failed: see {log.name}")
    lines = [json.loads(line) for line in (folder / "logging.jsonl").read_bytes().splitlines()]
    name = f"eval/{flags['--dataset'][0]}/accuracy"
    found = {line["step"]: line[name] for line in lines if name in line}
    if own["max_steps"] not in found:
        sys.exit(f"{folder} ended before step {own['max_steps']}: the same command goes on")
    return found


def by_name(words: Sequence[str]) -> dict[str, list[str]]:
    """The values of each flag."""
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            found[word] = []
        else:
            found[next(reversed(found))].append(word)
    return found
