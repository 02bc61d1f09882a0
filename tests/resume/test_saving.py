"""Saving survives exits at any file operation, and full disks."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from swift_r1.training.checkpoint.folder import fault_of
from swift_r1.training.checkpoint.resume import RunSummary
from tests import forks

HERE = Path(__file__).parent


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.long)])
def test_an_exit_at_any_file_operation_leaves_a_whole_checkpoint(tiny_model, tmp_path, stride):
    words = [str(HERE / "exit_at_operation.py"), str(tiny_model), str(tmp_path), str(stride)]
    done = forks.run(words, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    # A file is opened, synced and hashed, folders are made, synced and renamed, the old one is removed file by file.
    assert int(done.stdout.split()[-1]) > 50


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 6 MB, on which there is room for the logs and two checkpoints of about 1.5 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_survived_for_two_saves(runs, small_disk):
    """Each step saves; the third save in a row that does not fit ends the run, and what was saved is whole."""
    ended = runs.run(small_disk / "run", max_steps=9, save_steps=1, logging_steps=1)
    assert ended.code == 5
    assert ended.said.count("the run continues and tries again at the next save") == 2
    assert "earlier checkpoints are untouched (3 saves in a row failed)" in ended.said
    steps = [
        json.loads(line)["step"]
        for line in (small_disk / "run" / "logging.jsonl").read_text().splitlines()
    ]
    saved = len(list((small_disk / "run").glob("checkpoint-*")))
    assert saved > 0 and steps == list(range(1, saved + 4))
    # With room again it goes on from the last that was saved.
    subprocess.run(["mount", "-o", "remount,size=60m", str(small_disk)], check=True)
    ended = runs.run(
        small_disk / "run",
        max_steps=9,
        save_steps=5,
        logging_steps=1,
        resume_from_checkpoint="last",
    )
    assert ended.code == 0 and f"checkpoint-{saved}\n" in ended.said


def test_room_made_in_time_lets_the_run_go_on(runs, small_disk):
    """With one checkpoint kept the old one is removed only after the new one is whole: two fit, so it never fails."""
    ended = runs.run(
        small_disk / "run", max_steps=5, save_steps=1, logging_steps=1, save_total_limit=1
    )
    assert ended.code == 0 and "cannot be saved" not in ended.said


@pytest.mark.long
def test_the_best_checkpoint_stays(runs, tmp_path):
    """None solves anything, so all are equally good and the first one is the best; a resumed run knows it too."""
    flags = {
        **{
            "save_steps": 1,
            "eval_steps": 1,
            "eval_limit": 4,
            "split_dataset_ratio": 0.1,
            "save_total_limit": 1,
        },
        **{"learning_rate": 0, "weight_decay": 0, "metric_for_best_model": "accuracy"},
    }
    for steps, more in ((3, {}), (4, {"resume_from_checkpoint": "last", "resume_force": "true"})):
        ended = runs.run(tmp_path / "run", max_steps=steps, **flags | more)
        assert ended.code == 0
        kept = {path.name for path in (tmp_path / "run").glob("checkpoint-*")}
        assert kept == {"checkpoint-1", f"checkpoint-{steps}"}
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert (summary["best_step"], summary["best_metric"]) == (1, 0.0)


def test_which_evaluation_is_the_best():
    outcome = RunSummary()
    for step, values in (
        (1, (0.1, 0.3)),
        (2, (0.2, 0.2)),
        (3, (0.5, 0.1)),
        (4, (float("nan"), 0.9)),
    ):
        outcome.steps = step
        metrics = dict(zip(("eval/a/accuracy", "eval/b/accuracy"), values, strict=True)) | {
            "eval/a/reward": 1.0 / step
        }
        outcome.saw_checkpoint(metrics, "accuracy", True)
    assert (outcome.best_step, outcome.best_metric) == (3, 0.3)
    outcome.saw_checkpoint({"eval/a/reward": 0.1}, "reward", False)
    assert (outcome.best_step, outcome.best_metric) == (4, 0.1)


@pytest.mark.long
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_two_ranks_share_a_save_and_wait_for_slow_rewards(runs, same, tmp_path, stage):
    """Rewards take longer than `--ddp_timeout`. Both ranks write weights and state; the run goes on from it exactly."""
    (tmp_path / "slow").write_text("16")
    flags = {
        "processes": 2,
        "deepspeed": stage,
        "per_device_train_batch_size": 4,
        "num_generations": 8,
    }
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert (
        runs.run(
            whole, "nothing", max_steps=2, save_steps=1, logging_steps=1, ddp_timeout=6, **flags
        ).code
        == 0
    )
    checkpoint = whole / "checkpoint-1"
    assert fault_of(checkpoint) is None
    weights = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    assert weights == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert len(list((checkpoint / "state").glob("optimizer-*.safetensors"))) > 4
    AutoModelForCausalLM.from_pretrained(checkpoint)
    (tmp_path / "slow").unlink()
    shutil.copytree(whole, halves)
    shutil.rmtree(halves / "checkpoint-2")
    more = {"logging_steps": 1, "save_steps": 1, "max_steps": 2, "resume_from_checkpoint": "last"}
    assert runs.run(halves, "nothing", **more, **flags).code == 0
    same(whole, halves)
