"""When a Slurm job is queued again; a script stands in for `scontrol`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from swift_r1.launch.cluster.engines import slurm

SCONTROL = """#!/bin/sh
echo "$1" >> {calls}
[ "$2" = show ] && echo JobId=7 JobState=RUNNING
exit 0
"""


def test_a_job_that_waits_for_no_known_reason() -> None:
    assert slurm._waiting("1", {"Reason": "None"}) == "job 1 waits: Slurm has not said yet for what"
    assert slurm._waiting("1", {"Reason": "Priority"}) == "job 1 waits: Priority (others are before it)"


@pytest.fixture
def end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], int]:
    """`end(start, step)`: the job's start of this number ends by SIGTERM, after the checkpoint of a step."""
    calls, folder = tmp_path / "calls", tmp_path / "run"
    (folder / "launch").mkdir(parents=True)
    (tmp_path / "scontrol").write_text(SCONTROL.format(calls=calls))
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    def run(start: int, step: int) -> int:
        if start:
            monkeypatch.setenv("SLURM_RESTART_COUNT", str(start))
        if step:
            (folder / f"checkpoint-{step}").mkdir(exist_ok=True)
        calls.write_text("")
        code = slurm.after(143, folder, 2)
        assert ("requeue" in calls.read_text()) is (code == 143)
        return code

    return run


def test_a_job_that_gains_no_step_is_not_queued_again_for_ever(
    end: Callable[[int, int], int], capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [0, 0, 9, 9, 9, 30, 30, 30]
    assert [end(start, step) for start, step in enumerate(steps)] == [143] * len(steps)
    assert end(len(steps), 30) == 5
    assert "job 7 is not queued again, since starts without a step gained: 3 (--max" in capsys.readouterr().err


def test_what_an_earlier_job_did_in_the_folder_does_not_count(end: Callable[[int, int], int]) -> None:
    assert [end(0, 0) for _ in range(5)] == [143] * 5
