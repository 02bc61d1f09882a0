"""Nothing is found in healthy runs: `benchmarks/diagnosis.py --record` wrote what is read of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from swift_r1.diagnosis.watch import Diagnosis
from tests.runs.made import write_rows

RUNS = [json.loads(line) for line in (Path(__file__).parent / "healthy.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["name"])
def test_nothing_is_found(tmp_path: Path, run: Mapping[str, Any]) -> None:
    (tmp_path / "args.json").write_text(json.dumps({"args": run["args"], "plan": run["plan"]}))
    write_rows(tmp_path / "logging.jsonl", run["log"])
    found = Diagnosis(tmp_path)
    found.refresh()
    assert found.problems == [] and found.findings == {}
