"""Runs with a fault, and healthy ones in which nothing is found: `benchmarks/diagnosis.py --record` wrote what is read
of them, a column for each metric."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from swift_r1.lab.diagnosis.watch import Diagnosis
from tests.lab.runs.made import write_rows

RUNS = [
    json.loads(line)
    for name in ("faults.jsonl", "healthy.jsonl")
    for line in (Path(__file__).parent / name).read_text().splitlines()
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["name"])
def test_what_is_found(tmp_path: Path, run: Mapping[str, Any]) -> None:
    (tmp_path / "args.json").write_text(json.dumps({"args": run["args"], "plan": run["plan"]}))
    columns = run["log"]
    rows = zip(*columns.values(), strict=True)
    write_rows(
        tmp_path / "logging.jsonl",
        [
            {name: value for name, value in zip(columns, row, strict=True) if value is not None}
            for row in rows
        ],
    )
    found = Diagnosis(tmp_path)
    found.refresh()
    wanted = run["finding"].split(", ") if run["finding"] else []
    assert found.problems == [] and sorted(found.findings) == sorted(wanted)
