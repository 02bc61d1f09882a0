"""Runs with a fault, and healthy ones in which nothing is found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from swift_r1.lab.diagnosis.watch import Diagnosis
from tests.lab.diagnosis.recorded import RUNS, run_folder


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["name"])
def test_what_is_found(tmp_path: Path, run: Mapping[str, Any]) -> None:
    found = Diagnosis(run_folder(tmp_path, run))
    found.refresh()
    wanted = run["finding"].split(", ") if run["finding"] else []
    assert found.problems == [] and sorted(found.findings) == sorted(wanted)
