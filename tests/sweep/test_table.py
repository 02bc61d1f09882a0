"""What the table of the points says."""

from __future__ import annotations

from pathlib import Path

from swift_r1.arguments import parse_arguments
from swift_r1.arguments.sweep import SweepArguments
from swift_r1.report.blocks import Table
from swift_r1.sweep.places import Place
from swift_r1.sweep.points import plan_runs
from swift_r1.sweep.running import Sweep
from swift_r1.sweep.table import section


def test_why_a_point_is_not_ranked(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    flags = "{rlhf_type: grpo, model: m, dataset: d, reward_funcs: a, per_device_train_batch_size: 8}"
    file.write_text(f"runs: [{{name: a}}, {{name: b}}, {{name: c}}]\nseeds: [1, 2]\nflags: {flags}\n")
    args = parse_arguments(SweepArguments, [str(file)], {})
    planned = plan_runs(args, str(file), tmp_path, {})
    sweep = Sweep(args, planned, [Place((0,), {})], {"b": "reward 0 at step 3, below 1"}, print, print)
    failed, ended = (run for run in sweep.runs if run.plan.point == "a")
    failed.state, failed.why, ended.state = "failed", "the disk is full", "ended"
    [table, _] = section(sweep, []).blocks
    assert isinstance(table, Table)
    assert [(row[0], row[3], row[4]) for row in table.rows] == [
        ("a", "1 of 2", "not all have ended: the disk is full"),
        ("b", "0 of 2", "stopped: reward 0 at step 3, below 1"),
        ("c", "0 of 2", "not all have ended"),
    ]
