"""Files of a run: standard JSON whatever the values, exact means, curves, and trackers that never ask."""

import io
import json
import math
import os
import sqlite3
import subprocess
import sys

import psutil
import pytest

from swift_r1.errors import UsageError
from swift_r1.plugins import load_plugins, ms_swift
from swift_r1.record import reporters
from swift_r1.record.console import RunConsole
from swift_r1.record.metrics import JsonLines, merged, read_json_lines
from swift_r1.record.recorder import RunRecorder
from swift_r1.record.reporters import (
    TrackerFlags,
    chosen_trackers,
    open_reporters,
    tracker_faults,
)
from swift_r1.runtime.terminal import Terminal


def test_every_line_is_standard_json(tmp_path):
    path = tmp_path / "log.jsonl"
    with JsonLines(path) as log:
        log.write(
            {
                "a": math.nan,
                "b": [math.inf, 1.5],
                "c": {"d": "ü"},
                "e": object,
                "f": None,
                "g": True,
            }
        )
        # On disk at once, not when the file is closed: a killed run keeps its lines.
        (line,) = path.read_text().splitlines()
    row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert row == {
        "a": None,
        "b": [None, 1.5],
        "c": {"d": "ü"},
        "e": "<class 'object'>",
        "f": None,
        "g": True,
    }


def test_a_window_gives_means_maxima_and_latest_values():
    window = {
        "loss": [1.0, math.nan, 2.0],
        "completions/max_length": [9.0, 5.0],
        "learning_rate": [1e-3, 2e-3],
        "kl": [math.nan],
    }
    found = merged(window)
    assert (
        found["loss"] == 1.5
        and found["completions/max_length"] == 9.0
        and found["learning_rate"] == 2e-3
    )
    assert math.isnan(found["kl"])


def test_a_recorder_averages_between_log_lines_and_flushes_the_last(tmp_path):
    text = io.StringIO()
    console = RunConsole(5, Terminal(file=text, width=200))
    with RunRecorder(tmp_path, console, [], logging_steps=2, show_completions=True) as recorder:
        recorder.completions(
            [{"prompt": "p[red]", "completion": "c", "reward": 1.0, "advantage": 0.0, "step": 1}]
        )
        for step in range(1, 6):
            recorder.step(step, {"loss": float(step), "reward": 1.0}, last=step == 5)
        recorder.evaluation(
            5,
            {"eval/d/accuracy": 0.5, "eval/d/completions": 4.0, "eval/d/reward": 0.5},
            [{"step": 5}],
        )
        recorder.finish({"steps": 5, "exit_code": 0})
    lines = read_json_lines(tmp_path / "logging.jsonl")
    assert [(line["step"], line.get("loss")) for line in lines] == [
        (2, 1.5),
        (4, 3.5),
        (5, 5.0),
        (5, None),
    ]
    with RunRecorder(
        tmp_path, RunConsole(3, Terminal(file=text)), [], 2, False, first_step=True
    ) as recorder:
        for step in range(1, 4):
            recorder.step(step, {"loss": float(step)}, last=step == 3)
    assert [line["step"] for line in read_json_lines(tmp_path / "logging.jsonl")][len(lines) :] == [
        1,
        2,
        3,
    ]
    assert len((tmp_path / "completions.jsonl").read_text().splitlines()) == 1
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 5, "exit_code": 0}
    assert {path.name for path in (tmp_path / "images").iterdir()} >= {
        "reward.png",
        "loss.png",
        "eval.png",
    }
    shown = text.getvalue()
    assert "step 4/5" in shown and "held-out accuracy 0.500 on d" in shown and "p[red]" in shown


def test_wandb_without_a_key_is_offline_and_does_not_ask(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    flags = TrackerFlags(["wandb"], wandb_project="mine", wandb_log_unique_prompts=True)
    (reporter,) = open_reporters(flags, tmp_path, {"a": 1})
    reporter.log({"loss": 1.0}, 1)
    row = {"step": 1, "prompt": "p", "completion": "c", "reward": 1.0, "advantage": 0.0}
    reporter.log_completions([row, row | {"completion": "d"}, row | {"prompt": "q"}], 1)
    (table,) = (tmp_path / "wandb").rglob("completions*.table.json")
    assert [line[1:3] for line in json.loads(table.read_text())["data"]] == [["p", "c"], ["q", "c"]]
    import wandb

    assert wandb.run.project == "mine"
    reporter.close()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert not [child for child in psutil.Process().children() if "wandb-core" in child.name()]


_TRACK = """
import math, sys
from pathlib import Path
from swift_r1.record.reporters import TrackerFlags, open_reporters

[reporter] = open_reporters(TrackerFlags([sys.argv[1]], run_name="mine", project="ours"), Path("run"), {"seed": 1})
reporter.log({"step": 1, "loss": 1.0, "kl": math.nan, "eval/a/avg@4/low": 0.5}, 1)
reporter.log({"loss": 2.0}, 2)
row = {"step": 2, "prompt": "p", "completion": "c", "reward": 1.0, "advantage": None}
reporter.log_completions([row], 2)
reporter.close()
"""


def tracked(tmp_path, name):
    """What a process has left in its run folder that sent two steps and a completion there, and knew of no account."""
    pytest.importorskip(name, reason=f"pip install {name}")
    (tmp_path / "run").mkdir()
    unknown = {
        "HF_TOKEN",
        "TRACKIO_DIR",
        "TRACKIO_SPACE_ID",
        "TRACKIO_SERVER_URL",
    }
    environ = {key: value for key, value in os.environ.items() if key not in unknown}
    command = [sys.executable, "-c", _TRACK, name]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environ | {"HOME": str(tmp_path / "home")},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0
    # nothing where it was started
    assert {path.name for path in tmp_path.iterdir()} <= {"run", "home"}
    return tmp_path / "run" / name


def test_trackio_keeps_a_run_in_its_folder(tmp_path):
    folder = tracked(tmp_path, "trackio")
    with sqlite3.connect(folder / "ours.db") as found:
        rows = found.execute(
            "select run_name, step, metrics from metrics order by step, id"
        ).fetchall()
    values = [(run, step, json.loads(metrics)) for run, step, metrics in rows]
    assert [(run, step) for run, step, _ in values] == [("mine", 1), ("mine", 2), ("mine", 2)]
    assert [metrics["loss"] for *_, metrics in values[:2]] == [1.0, 2.0]
    assert values[0][2].keys() == {
        "loss",
        "kl",
        "eval/a/avg@4/low",
    } and '"completion": "c"' in json.dumps(values[2][2])


PLUGIN = """
from swift_r1 import trackers


class Lines:
    def __init__(self, flags, run_dir, config):
        self.file = open(run_dir / "lines.txt", "a")

    def log(self, metrics, step):
        print(step, metrics["loss"], file=self.file)

    def log_completions(self, rows, step):
        print(len(rows), "completions", file=self.file)

    def close(self):
        self.file.close()


trackers["lines"] = Lines
"""


def test_a_tracker_of_a_plugin_gets_the_metrics(tmp_path, monkeypatch):
    monkeypatch.setattr(reporters, "trackers", trackers := dict(reporters.trackers))
    monkeypatch.setitem(ms_swift.REGISTRIES, "tracker", (trackers, "", ""))
    assert tracker_faults(["lines"]) == [
        "--report_to: there is no tracker lines: known are tensorboard, wandb, trackio; others come from "
        "--external_plugins"
    ]
    (tmp_path / "plugin.py").write_text(PLUGIN)
    [plugin] = load_plugins([str(tmp_path / "plugin.py")])
    assert plugin.trackers == ("lines",)
    [reporter] = open_reporters(TrackerFlags(["lines"]), tmp_path, {})
    reporter.log({"loss": 0.5}, 3)
    reporter.log_completions([{}], 3)
    reporter.close()
    assert (tmp_path / "lines.txt").read_text() == "3 0.5\n1 completions\n"


def test_a_tracker_that_is_not_there_is_named(tmp_path, caplog):
    plugin = "swanlab comes from a plugin: --external_plugins plugins/swanlab_tracker.py"
    with pytest.raises(UsageError, match=plugin):
        open_reporters(TrackerFlags(["swanlab"]), tmp_path, {})
    # One tracker of two is enough: scripts name those of their authors.
    (reporter,) = open_reporters(
        TrackerFlags(["tensorboard", "swanlab"], logging_dir=str(tmp_path / "t")), tmp_path, {}
    )
    reporter.log({"loss": 1.0}, 1)
    reporter.close()
    assert list((tmp_path / "t").glob("events*")) and plugin in caplog.text
    assert "swanlab" not in chosen_trackers(["all"]) and chosen_trackers(["none"]) == []
