"""Runs with a fault, and healthy ones in which nothing is found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from swift_r1.lab.diagnosis.watch import Diagnosis
from tests.lab.diagnosis.recorded import RUNS, run_folder

BLIND = {
    kind: [
        json.loads(line)
        for line in (Path(__file__).parent / f"blind_{kind}.jsonl").read_text().splitlines()
    ]
    for kind in ("faults", "healthy")
}
"""Runs whose faults were thought of by who knew no detector."""


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["name"])
def test_what_is_found(tmp_path: Path, run: Mapping[str, Any]) -> None:
    found = Diagnosis(run_folder(tmp_path, run))
    found.refresh()
    wanted = run["finding"].split(", ") if run["finding"] else []
    assert found.problems == [] and sorted(found.findings) == sorted(wanted)


@pytest.mark.parametrize("kind", BLIND)
def test_verdicts_on_what_nobody_had_prepared_for(tmp_path: Path, kind: str) -> None:
    """What is said of each is what was said when it was recorded: a change of a threshold shows here."""
    for number, run in enumerate(BLIND[kind]):
        log = Diagnosis(run_folder(tmp_path / str(number), run))
        log.refresh()
        verdict = log.verdict
        assert verdict is not None and log.problems == []
        causes = [cause.name for cause in verdict.causes]
        assert [verdict.reward.kind, *causes, *log.findings] == run["found"], run["name"]


def test_most_of_them_are_named() -> None:
    right = [run["right"] for run in BLIND["faults"]]
    assert len(right) >= 40
    assert sum(verdict for verdict, _ in right) >= 0.9 * len(right)
    assert sum(first for _, first in right) >= 0.75 * len(right)
    assert all(first for _, first in (run["right"] for run in BLIND["healthy"]))
