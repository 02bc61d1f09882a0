"""The time page in a browser: what it says is what the files say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import until
from tests.lab.runs.made import make_run
from tests.lab.runs.timed import write_lane


@pytest.mark.long
def test_idle_time_and_the_share_of_each_phase(viewer: Any, tab: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "one", steps=1)
    (run / "events.jsonl").unlink()
    write_lane(run, "rank-0", [(0, 2, "generate", 1), (2, 3, "train", 1), (3, 8, "wait", 1)])
    write_lane(run, "server-0", [(1, 2, "generate", 1)])
    make_run(tmp_path / "runs" / "other")
    (tmp_path / "runs" / "other" / "events.jsonl").unlink()
    page = tab()
    page.goto(f"{viewer(tmp_path / 'runs').url}/time?run=one&run=other")
    page.get_by_role("heading", name="one").wait_for()

    def shown() -> list[list[str]]:
        rows = page.locator(".view-table tr").all()
        return [row.locator("th, td").all_inner_texts() for row in rows]

    until(shown)
    assert page.locator(".view-idle").all_inner_texts() == [
        "rank-0 was idle for 62.5 % of 8 s",
        "This run recorded no times.",
    ]
    assert shown() == [
        ["share of the time, %", "idle", "generate", "train", "wait"],
        ["rank-0", "62.5", "25.0", "12.5", "62.5"],
        ["server-0", "87.5", "12.5", "0.0", "0.0"],
    ]
    write_lane(run, "rank-0", [(8, 10, "save", 1)])
    until(lambda: shown()[1] == ["rank-0", "50.0", "20.0", "10.0", "20.0", "50.0"])
