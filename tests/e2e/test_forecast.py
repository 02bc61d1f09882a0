"""`swift forecast` as a user runs it, on the digits task."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from swift_r1.cli.main import main
from tests import forks
from tests.conftest import until, wait_until_gone

PLUGIN = Path(__file__).parent / "digits_plugin.py"
FLAGS = {
    "rlhf_type": "grpo",
    "external_plugins": PLUGIN,
    "dataset": "counting#200",
    "reward_funcs": "digits",
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 12,
    "lr_scheduler_type": "constant",
    "max_steps": 100,
    "num_prompts": 6,
    "num_completions": 8,
}


def words(model: Path, **flags: Any) -> list[str]:
    found = [word for name, value in (FLAGS | flags).items() for word in (f"--{name}", str(value))]
    return ["forecast", "--model", str(model), *found]


def forecast(
    model: Path, folder: Path, processes: int = 1, **flags: Any
) -> tuple[str, dict[str, Any]]:
    """What it printed, and its JSON; of its own folder nothing may be left."""
    asked = words(model, json=folder / "forecast.json", **flags)
    environ = {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "NPROC_PER_NODE": str(processes)}
    done = forks.run(["-m", "swift_r1", *asked], cwd=folder, environ=environ, timeout=280)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert list(folder.glob("swift-forecast-*")) == []
    return done.stdout, json.loads((folder / "forecast.json").read_text())


def test_a_run_that_would_learn(tiny_model: Path, tmp_path: Path) -> None:
    said, found = forecast(tiny_model, tmp_path)
    assert "Verdict: learnable" in said and "seconds a step" in said
    assert [len(found["prompts"]), found["completions"], found["own_size"]] == [6, 8, 4]
    assert found["rewards"][0]["differing"] == 1 and found["own_signal"]["value"] > 0.8
    cost = found["cost"]
    assert min(cost["seconds"][name] for name in ("generate", "train", "sync")) > 0
    assert cost["hours"] == pytest.approx(100 * cost["step"] / 3600)
    assert cost["peak_gib"] > 0 and "fits" in found["memory"]
    # rewards were asked again, and say the same
    assert (found["rewards"][0]["changed"], found["rewards"][0]["noise"]) == (0, 0)
    power = found["power"]
    assert power["planned"] == 100 and power["error"] > 0 and power["rounds"] >= 6
    assert power["reward"] < power["best"] and "power: the mean reward of a round" in said


@pytest.mark.long
def test_two_ranks_a_server_and_larger_groups_than_were_sampled(
    tiny_model: Path, start_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "own").mkdir()
    server = start_tiny(tiny_model)
    more = {
        "use_vllm": "true",
        "vllm_server_base_url": server.url,
        "deepspeed": "zero2",
        "num_generations": 16,
    }
    said, found = forecast(tiny_model, tmp_path / "own", 2, **more)
    assert "of groups of 16 at least" in said
    assert found["signal"]["16"] is None and found["cost"]["seconds"]["train"] > 0


@pytest.mark.long
def test_ppo_compares_with_the_whole_step(tiny_model: Path, tmp_path: Path) -> None:
    ppo = {
        "rlhf_type": "ppo",
        "num_generations": 1,
        "num_mini_batches": 2,
        "critic_warmup_steps": 4,
    }
    _, found = forecast(tiny_model, tmp_path, **ppo)
    assert (
        found["level"] == "learnable" and found["own_size"] == 8 and found["groups_per_step"] == 1
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)],
)
def test_a_signal_ends_it_and_leaves_nothing(
    tiny_model: Path, tmp_path: Path, number: int, code: int
) -> None:
    loads, own = tmp_path / "loads", tmp_path / "own"
    own.mkdir()
    plugins = f"{PLUGIN} {PLUGIN.with_name('waiting_plugin.py')}"
    environ = os.environ | {"TMPDIR": str(own), "WAITING_PLUGIN": str(loads)}
    asked = [word for one in words(tiny_model, external_plugins=plugins) for word in one.split()]
    process = subprocess.Popen(
        [sys.executable, "-m", "swift_r1", *asked], env=environ, start_new_session=True
    )
    try:
        until(loads.exists, 120)
        below = psutil.Process(process.pid).children(recursive=True)
        # A terminal's Ctrl-C goes to the whole group; SIGTERM to the command alone.
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        assert process.wait(20) == code
        wait_until_gone(below)
        assert list(own.glob("swift-forecast-*")) == []
    finally:
        process.kill()
        process.wait()


def test_what_a_run_would_refuse(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(words(tiny_model, num_promts=3, resume_from_checkpoint="last", json="nowhere/f.json"))
        == 2
    )
    said = capsys.readouterr().err
    assert "did you mean --num_prompts?" in said and "--model CHECKPOINT" in said
    assert main(words(tiny_model, json="nowhere/f.json")) == 2
    assert "there is no folder nowhere" in capsys.readouterr().err
