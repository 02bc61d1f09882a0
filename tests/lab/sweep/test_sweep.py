"""`swift sweep` as a user runs it, of runs of a tiny model."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from swift_r1.launch.environment import usable_cpus
from tests import forks
from tests.conftest import until, wait_until_gone

PLUGIN = Path(__file__).parents[2] / "e2e" / "digits_plugin.py"


def write(file: Path, model: Path, flags: dict[str, Any], **keys: Any) -> Path:
    common = {
        "rlhf_type": "grpo",
        "model": str(model),
        "external_plugins": str(PLUGIN),
        "dataset": "counting#40",
        "reward_funcs": "digits",
        "reward_isolation": "inline",
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "report_to": "none",
        "max_steps": 2,
    }
    file.write_text(
        yaml.safe_dump({"output_dir": str(file.with_suffix("")), "flags": common | flags, **keys})
    )
    return file


def sweep(file: Path, *words: str) -> tuple[int, str]:
    done = forks.run(["-m", "swift_r1", "sweep", str(file), *words], cwd=file.parent, timeout=240)
    print(done.stdout, done.stderr)
    return done.returncode, done.stdout + done.stderr


def record(file: Path) -> dict[str, Any]:
    return json.loads((file.with_suffix("") / "sweep.json").read_text())


def states(file: Path) -> dict[str, str]:
    return {run["name"]: run["state"] for run in record(file)["runs"]}


def events(folder: Path) -> dict[str, float]:
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return {row["kind"]: row["time"] for row in rows}


@pytest.mark.long
def test_points_beside_each_other(tiny_model: Path, tmp_path: Path) -> None:
    two = min(2, len(usable_cpus()))
    rates = {"learning_rate": ["1e-3", "3e-3"]}
    file = write(tmp_path / "rates.yaml", tiny_model, {}, grid=rates, seeds=[1], parallel=str(two))
    code, said = sweep(file)
    names = [f"learning_rate={rate},seed=1" for rate in ("1e-3", "3e-3")]
    assert code == 0 and states(file) == dict.fromkeys(names, "ended")
    folders = [tmp_path / "rates" / name for name in names]
    if two > 1:
        # Not when they began to train: on a busy machine one may be done by then.
        launched = [json.loads((folder / "args.json").read_text())["started"] for folder in folders]
        assert max(launched) < min(events(folder)["ended"] for folder in folders)
        used = json.loads((folders[0] / "args.json").read_text())
        assert used["hardware"]["cores"] == len(usable_cpus()) // 2
    args = [json.loads((folder / "args.json").read_text())["args"] for folder in folders]
    assert [(one["learning_rate"], one["seed"]) for one in args] == [(1e-3, 1), (3e-3, 1)]
    points = record(file)["points"]
    assert (
        len(points) == 2
        and points[0]["against_best"] == "best"
        and points[0]["mean"] >= points[1]["mean"]
    )
    assert f"Best: {points[0]['point']}" in said and "[2/2]" in said
    report = (tmp_path / "rates" / "report.html").read_text()
    assert "The sweep" in report and f"Best: {points[0]['point']}" in report

    before = [events(folder) for folder in folders]
    code, said = sweep(file)
    assert code == 0 and "2 of 2 runs are done already" in said
    assert [events(folder) for folder in folders] == before
    changed = yaml.safe_load(file.read_text())
    changed["flags"]["max_steps"], changed["seeds"] = 3, [1, 2]
    file.write_text(yaml.safe_dump(changed))
    code, said = sweep(file)
    assert code == 2 and "another sweep" in said
    assert "flags.max_steps: 2 became 3" in said and "seeds: [1] became [1, 2]" in said


def test_a_failing_run_does_not_end_the_others_and_a_hopeless_point_is_stopped(
    tiny_model: Path, tmp_path: Path
) -> None:
    points = [
        {"name": "broken", "weight_decay": 1e30, "max_skipped_steps": 0, "max_steps": 20},
        {"name": "down", "reward_weights": [-1.0], "max_steps": 5000},
    ]
    rule = {"stop_after": 2, "stop_below": -0.001}
    file = write(tmp_path / "s.yaml", tiny_model, {}, runs=points, **rule)
    code, said = sweep(file)
    assert code == 5
    assert states(file) == {"broken": "failed", "down": "stopped"}
    found = {run["name"]: run for run in record(file)["runs"]}
    assert 2 <= found["down"]["step"] < 5000 and "below -0.001" in found["down"]["why"]
    assert list((tmp_path / "s" / "down").glob("checkpoint-*"))
    assert found["broken"]["why"] and found["broken"]["why"] in said
    assert "broken/output.log" in said
    assert record(file)["points"] == [] and "so none is best" in said


@pytest.fixture
def started(tiny_model: Path, tmp_path: Path) -> Iterator[Any]:
    """`started(file, steps) -> process`, once its run has made more than `steps`."""
    running: list[forks.ForkedProcess] = []

    def start(file: Path, steps: int) -> forks.ForkedProcess:
        with (tmp_path / "said").open("a") as out:
            words = ["-m", "swift_r1", "sweep", str(file)]
            running.append(forks.start(words, cwd=tmp_path, stdout=out, stderr=forks.STDOUT))
        log = tmp_path / "s" / "seed=0" / "logging.jsonl"
        until(lambda: log.exists() and len(log.read_text().splitlines()) > steps, 120)
        return running[-1]

    yield start
    for one in running:
        one.kill()


@pytest.mark.long
def test_interrupted_and_killed_it_goes_on(tiny_model: Path, tmp_path: Path, started: Any) -> None:
    file = write(tmp_path / "s.yaml", tiny_model, {"max_steps": 150, "save_steps": 1000}, seeds=[0])
    process = started(file, 2)
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    wait_until_gone(below)
    assert states(file) == {"seed=0": "interrupted"}
    assert "the same command continues" in (tmp_path / "said").read_text()
    folder = tmp_path / "s" / "seed=0"
    [saved] = [int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*")]

    process = started(file, saved + 1)
    below = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait(10)
    wait_until_gone(below, 30)

    code, _ = sweep(file)
    assert code == 0 and set(states(file).values()) == {"ended"}
    steps = [
        json.loads(line)["step"] for line in (folder / "logging.jsonl").read_text().splitlines()
    ]
    assert steps == list(range(1, 151))
    assert re.findall(r'"kind": "(resumed)"', (folder / "events.jsonl").read_text()) == [
        "resumed",
        "resumed",
    ]
