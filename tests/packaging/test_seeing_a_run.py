"""docs/seeing-a-run.md: its columns are those of the files; tests/docs runs its commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.lab.runs.made import make_run

pytestmark = pytest.mark.long
PAGE = (Path(__file__).parents[2] / "docs" / "seeing-a-run.md").read_text()


def test_the_query_of_tokens_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import duckdb

    make_run(tmp_path / "output" / "my-run" / "v0-20261122-120000", steps=4)
    monkeypatch.chdir(tmp_path)
    [query] = re.findall(r'duckdb\.sql\(\s*"(.*)"\s*\)', PAGE)
    assert sorted(step for step, _ in duckdb.sql(query).fetchall()) == [1, 2, 3, 4]
