"""Finding runs, and what their folders say of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from swift_r1.errors import UsageError
from swift_r1.record.folder import find_runs
from swift_r1.runtime.processes import run_folder_held, run_folder_is_held
from tests.lab.runs.made import make_run, write_rows

HOLD = """
import sys
from pathlib import Path
from swift_r1.runtime.processes import run_folder_held
with run_folder_held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_runs_are_found(tmp_path, monkeypatch):
    one = make_run(tmp_path / "output" / "b" / "v0-20260101-000000", seed=1)
    two = make_run(tmp_path / "output" / "a" / "v0-20260101-000000", seed=2)
    three = make_run(tmp_path / "output" / "a" / "v1-20260101-000000", seed=3)
    (three / "checkpoint-4").mkdir()
    (three / "checkpoint-4" / "args.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert [run.path for run in find_runs()] == [one, two, three]
    names = [run.name for run in find_runs([one, "output", three])]
    assert names == ["b/v0-20260101-000000", "a/v0-20260101-000000", "v1-20260101-000000"]
    assert [run.name for run in find_runs([one])] == ["v0-20260101-000000"]


def test_an_evaluation_is_no_run(tmp_path):
    run = make_run(tmp_path / "out" / "run")
    evaluation = tmp_path / "out" / "evaluation"
    evaluation.mkdir()
    (evaluation / "completions.jsonl").write_text("{}\n")
    (evaluation / "settings.json").write_text("{}\n")
    assert [one.path for one in find_runs([tmp_path])] == [run]
    with pytest.raises(UsageError, match="is an evaluation, no run"):
        find_runs([evaluation])
    (run / "settings.json").write_text("{}\n")
    assert [one.path for one in find_runs([run])] == [run]


def test_what_is_no_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="there is no folder output here"):
        find_runs()
    (tmp_path / "file").write_text("")
    run = make_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError) as caught:
        find_runs(["missing", "file", "empty", "run/tokens"])
    assert caught.value.faults == (
        "missing: there is no such folder",
        "file is a file: name the folder of a run, in which args.json and logging.jsonl are",
        "empty: there is no run in it (a folder with args.json, logging.jsonl or completions.jsonl)",
        f"run/tokens is a part of a run: name the run's folder, {run}",
    )


@pytest.mark.parametrize(
    ("code", "status"), [(0, "ended"), (5, "failed"), (130, "interrupted"), (None, "killed")]
)
def test_how_a_run_ended(tmp_path, code, status):
    [run] = find_runs([make_run(tmp_path / "run", exit_code=code)])
    assert run.status == status


def test_a_failure_without_a_summary(tmp_path):
    run = make_run(tmp_path / "run", exit_code=None)
    write_rows(
        run / "events.jsonl", [{"time": 1.0, "step": 4, "kind": "failed", "text": "no memory"}]
    )
    assert find_runs([run])[0].status == "failed"
    write_rows(
        run / "events.jsonl",
        [{"time": 2.0, "step": 4, "kind": "resumed", "text": "from checkpoint-4"}],
    )
    assert find_runs([run])[0].status == "killed"


def test_a_run_is_running_while_a_process_holds_its_lock(tmp_path):
    run = make_run(tmp_path / "run", exit_code=None)
    assert find_runs([run])[0].status == "killed"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        assert find_runs([run])[0].status == "running"
        process.kill()
        process.wait(30)
    assert find_runs([run])[0].status == "killed"


def test_looking_does_not_release_the_own_lock(tmp_path):
    """The process that trains writes the model card from its own folder."""
    other = "import sys; from swift_r1.runtime.processes import *; sys.exit(run_folder_is_held(Path(sys.argv[1])))"
    with run_folder_held(tmp_path):
        assert run_folder_is_held(tmp_path)
        assert (
            subprocess.run([sys.executable, "-c", other, str(tmp_path)], timeout=60).returncode == 1
        )
    assert not run_folder_is_held(tmp_path)
