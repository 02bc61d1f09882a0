"""What the detectors say of real runs: `benchmarks/diagnosis.py` made them and recorded what is read of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from swift_r1.diagnosis.watch import Diagnosis
from tests.runs.made import write_rows

RUNS = [json.loads(line) for name in ("faults", "healthy") for line in (Path(__file__).parent / f"{name}.jsonl").open()]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["name"])
def test_the_fault_is_named_and_nothing_else_is(tmp_path: Path, run: Mapping[str, Any]) -> None:
    (tmp_path / "args.json").write_text(json.dumps({"args": run["args"], "plan": run["plan"]}))
    write_rows(tmp_path / "logging.jsonl", run["log"])
    found = Diagnosis(tmp_path)
    found.refresh()
    assert found.problems == []
    assert list(found.findings) == ([run["finding"]] if run["finding"] else [])
