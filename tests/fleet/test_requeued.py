"""When a Slurm job is queued again; a script stands in for `scontrol`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from swift_r1.fleet.backends import slurm

SCONTROL = """#!/bin/sh
echo "$1" >> {calls}
[ "$2" = show ] && echo JobId=7 JobState=RUNNING
exit 0
"""


@pytest.fixture
def end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`end(step, job="7", folder="v0")`: a start of the job ends by SIGTERM, after the checkpoint of a step."""
    calls = tmp_path / "calls"
    (tmp_path / "scontrol").write_text(SCONTROL.format(calls=calls))
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def run(step: int, job: str = "7", folder: str = "v0") -> int:
        monkeypatch.setenv("SLURM_JOB_ID", job)
        if step:
            (tmp_path / folder / f"checkpoint-{step}").mkdir(parents=True, exist_ok=True)
        calls.write_text("")
        code = slurm.after(143, tmp_path / folder, tmp_path, 2)
        assert ("requeue" in calls.read_text()) is (code == 143)
        return code

    return run


def test_a_job_that_gains_no_step_is_not_queued_again_for_ever(
    end: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [0, 0, 9, 9, 9, 30, 30, 30]
    assert [end(step) for step in steps] == [143] * len(steps)
    assert end(30) == 5
    assert (
        "job 7 is not queued again, since starts without a step gained: 3 (--max"
        in capsys.readouterr().err
    )


def test_starts_that_came_to_nothing_count_though_each_has_a_folder_of_its_own(
    end: Callable[..., int],
) -> None:
    assert [end(0, folder=f"v{start}") for start in range(3)] == [143, 143, 5]


def test_what_an_earlier_job_did_does_not_count(end: Callable[..., int]) -> None:
    assert [end(0, job) for job in "12312"] == [143] * 5
