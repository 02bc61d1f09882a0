"""What becomes of runs that no process is started for: the rule that stops points, and the table of points."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swift_r1.errors import UsageError
from swift_r1.flags import parse_arguments
from swift_r1.lab.report.blocks import Note, Table
from swift_r1.lab.sweep.flags import SweepArguments
from swift_r1.lab.sweep.points import plan_runs
from swift_r1.lab.sweep.running import Sweep
from swift_r1.lab.sweep.table import section

FLAGS = "{rlhf_type: grpo, model: m, dataset: d, reward_funcs: a, per_device_train_batch_size: 8}"


def made(folder: Path, text: str, stopped: dict[str, str]) -> Sweep:
    file = folder / "sweep.yaml"
    file.write_text(f"{text}\nseeds: [1, 2]\nflags: {FLAGS}\n")
    args = parse_arguments(SweepArguments, [str(file)], {})
    planned = plan_runs(args, str(file), folder, {})
    for run in planned[:2]:
        run.folder.mkdir()
        rows = [{"step": step, "reward": float(run.point == "good")} for step in (1, 2, 3)]
        (run.folder / "logging.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Sweep(args, planned, [], stopped, lambda run: None, lambda: None)


def test_the_other_seeds_of_a_stopped_point_do_not_begin(tmp_path: Path) -> None:
    runs = "runs: [{name: good}, {name: bad}]\nstop_after: 3\nstop_below: "
    sweep = made(tmp_path, runs + "2", {})  # it has no place where a run could begin
    sweep.run()
    assert {run.state for run in sweep.runs} == {"stopped"} and set(sweep.stopped) == {
        "good",
        "bad",
    }
    assert sweep.runs[3].why == "reward 0 at step 3, below 2"


def test_a_metric_that_no_step_has(tmp_path: Path) -> None:
    sweep = made(tmp_path, "runs: [{name: good}, {name: bad}]\nmetric: rewrd", {})
    log = tmp_path / sweep.runs[0].plan.folder.name / "logging.jsonl"
    log.write_text(json.dumps({"step": 4, "loss": 0.5, "reward": 1}) + "\n")
    sweep.runs[0].log.refresh()
    with pytest.raises(
        UsageError, match=r"--metric rewrd: .* have no such metric; did you mean reward"
    ):
        sweep.run()


def test_why_a_point_is_not_ranked(tmp_path: Path) -> None:
    stopped = {"b": "reward 0 at step 3, below 1"}
    sweep = made(tmp_path, "runs: [{name: a}, {name: b}, {name: c}]", stopped)
    failed, ended = (run for run in sweep.runs if run.plan.point == "a")
    failed.state, failed.why, ended.state = "failed", "the disk is full", "ended"
    [table, *reasons, _] = section(sweep, []).blocks
    assert isinstance(table, Table)
    assert [(row[0], row[3], row[4]) for row in table.rows] == [
        ("a", "1 of 2", "not all have ended"),
        ("b", "0 of 2", "stopped"),
        ("c", "0 of 2", "not all have ended"),
    ]
    assert reasons == [
        Note("a: not all have ended: the disk is full."),
        Note("b: stopped: reward 0 at step 3, below 1."),
    ]
