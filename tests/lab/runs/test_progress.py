"""What is said of a run's progress."""

from __future__ import annotations

from pathlib import Path

from swift_r1.lab.runs.progress import status_of
from swift_r1.record.folder import RunFolder
from swift_r1.record.metric_log import MetricLog
from tests.lab.runs.made import make_run


def test_a_run_without_events_that_has_all_its_steps_has_ended(tmp_path: Path) -> None:
    for old, said in ((True, "ended"), (False, "killed")):
        path = make_run(tmp_path / said, steps=4, old=old, exit_code=None)
        log = MetricLog(path)
        run = RunFolder(path, said)
        assert status_of(run, log) == "killed"  # nothing is read yet
        log.refresh()
        assert status_of(run, log) == said
