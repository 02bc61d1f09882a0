"""Signals and `--max_runtime`: the run saves, ends with its exit code, and goes on as if nothing had been."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from swift_r1.runtime import stopping
from tests.resume.conftest import happened

# The signal comes in the third round, whose first of two steps is then the last.
SETTINGS = {"max_steps": 8, "steps_per_generation": 2, "save_steps": 100, "logging_steps": 3}


@pytest.fixture(scope="module")
def uninterrupted(runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert runs.run(folder, **SETTINGS).code == 0
    return folder


def order(folder, step, number, times=1):
    (folder / "signals.json").write_text(
        json.dumps({"step": step, "signal": number, "times": times})
    )


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.long)],
)
def test_a_stopped_run_goes_on_as_if_nothing_had_been(
    runs, uninterrupted, tmp_path, same, number, code
):
    folder = tmp_path / "run"
    order(tmp_path, 4, number)
    ended = runs.run(folder, resume_from_checkpoint="last", **SETTINGS)
    assert ended.code == code and ended.said.count("stopping after this step") == 1
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-5"]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 5 and summary["exit_code"] == code
    marks = happened(folder)
    assert [(kind, step) for kind, step, _ in marks] == [
        ("started", 0),
        ("stopping", 4),
        ("saved", 5),
        ("ended", 5),
    ]
    assert signal.Signals(number).name in marks[1][2]
    # What was not due yet is logged for people, and not twice after resuming.
    assert [
        json.loads(line)["step"] for line in (folder / "logging.jsonl").read_text().splitlines()
    ] == [1, 3, 5]
    assert runs.run(folder, resume_from_checkpoint="last", **SETTINGS).code == 0
    same(uninterrupted, folder)
    assert [(kind, step) for kind, step, _ in happened(folder)[4:]] == [
        ("resumed", 5),
        ("saved", 8),
        ("ended", 8),
    ]


@pytest.mark.long
def test_a_signal_ends_an_evaluation_which_the_resumed_run_does(runs, tmp_path, same):
    """In the middle of a round."""
    flags = SETTINGS | {"eval_steps": 3, "eval_limit": 8}
    assert runs.run(tmp_path / "whole" / "run", **flags).code == 0
    folder = tmp_path / "run"
    assert (
        runs.run(folder, forget="evaluation:3", resume_from_checkpoint="last", **flags).code == 143
    )
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-3"]
    assert "evaluated" not in [kind for kind, *_ in happened(folder)]
    assert runs.run(folder, resume_from_checkpoint="last", **flags).code == 0
    same(tmp_path / "whole" / "run", folder)
    assert [step for kind, step, _ in happened(folder) if kind == "evaluated"] == [3, 6, 8]


def test_a_second_signal_stops_at_once(runs, tmp_path):
    order(tmp_path, 4, signal.SIGTERM, times=2)
    ended = runs.run(tmp_path / "run", **SETTINGS)
    assert ended.code == 143
    assert (
        not list((tmp_path / "run").glob("checkpoint-*"))
        and not (tmp_path / "run" / "summary.json").exists()
    )
    assert [kind for kind, *_ in happened(tmp_path / "run")] == ["started", "stopping", "killed"]


@pytest.mark.parametrize(
    ("begin", "code"),
    [
        ("Watchdog(0.1, 0, hang).__enter__()", 5),
        (
            "stop = StopRequest().listen(); stop.in_order(hang); [os.kill(os.getpid(), 15) for _ in 'ab']",
            143,
        ),
    ],
)
def test_a_disk_that_stands_still_does_not_keep_a_process_alive(begin, code):
    """What would be written of its end never is."""
    lines = "import os, threading\nfrom swift_r1.runtime.stopping import StopRequest, Watchdog\n"
    lines += f"hang = lambda _text: threading.Event().wait()\n{begin}\nthreading.Event().wait(20)\n"
    ended = subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, timeout=60, check=False
    )
    assert ended.returncode == code


def test_max_runtime_saves_and_ends(runs, tmp_path):
    folder = tmp_path / "run"
    ended = runs.run(folder, **SETTINGS | {"max_steps": 1_000_000, "max_runtime": "3s"})
    assert ended.code == 0 and "--max_runtime 3s is over after step" in ended.said
    steps = json.loads((folder / "summary.json").read_text())["steps"]
    assert 0 < steps < 1_000_000
    saved = sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*"))
    assert saved[-1] == steps


def test_a_run_that_ends_before_its_first_step_begins_again(runs, tmp_path):
    flags = SETTINGS | {"eval_steps": 3, "eval_limit": 8, "eval_on_start": "true"}
    ended = runs.run(tmp_path / "run", forget="evaluation:0", **flags)
    assert ended.code == 143 and not list((tmp_path / "run").glob("checkpoint-*"))
    assert (
        "with --resume_from_checkpoint last begins again: there is no checkpoint yet" in ended.said
    )


def test_time_is_up_when_another_step_and_a_save_may_not_fit(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: clock.now))
    stop = stopping.StopRequest()
    stop.limit(100)
    due = []
    # the longest step takes 20 s; what comes before the first is no step
    for now in (1020, 1030, 1050, 1059, 1061):
        clock.now = now
        due.append(stop.due())
    assert due == [0, 0, 0, 0, stopping.OUT_OF_TIME]


def test_a_signal_outranks_the_time(monkeypatch):
    stop = stopping.StopRequest()
    stop.limit(-1)
    assert stop.due() == stopping.OUT_OF_TIME
    stop.in_order()
    stop._on_signal(signal.SIGTERM)
    assert stop.due() == 143
