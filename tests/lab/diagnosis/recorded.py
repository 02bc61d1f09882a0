"""Logs of real runs, with a fault and healthy, as `benchmarks/diagnosis.py --record` has written them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.lab.runs.made import write_rows

RUNS = [
    json.loads(line)
    for name in ("faults.jsonl", "healthy.jsonl")
    for line in (Path(__file__).parent / name).read_text().splitlines()
]


def rows_of(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the lines of its log."""
    columns = run["log"]
    return [
        {name: value for name, value in zip(columns, row, strict=True) if value is not None}
        for row in zip(*columns.values(), strict=True)
    ]


def run_folder(folder: Path, run: str | Mapping[str, Any], lines: int | None = None) -> Path:
    """Writes a run, or the one of this name, or its first lines; returns its folder."""
    if isinstance(run, str):
        [run] = [one for one in RUNS if one["name"] == run]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "args.json").write_text(json.dumps({"args": run["args"], "plan": run["plan"]}))
    write_rows(folder / "logging.jsonl", rows_of(run)[:lines])
    return folder
