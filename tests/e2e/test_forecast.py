"""`swift forecast` as a user runs it, on the digits task."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from swift_r1.cli.main import main
from tests import forks

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


@pytest.mark.parametrize("more", [{}, {"num_generations": 16, "per_device_train_batch_size": 16}], ids=["8", "16"])
def test_a_run_that_would_learn(tiny_model: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    asked = words(tiny_model, json=tmp_path / "forecast.json", **more)
    environ = {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = forks.run(["-m", "swift_r1", *asked], cwd=tmp_path, environ=environ, timeout=280)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert "Verdict: learnable" in done.stdout and "seconds a step" in done.stdout
    found = json.loads((tmp_path / "forecast.json").read_text())
    assert [len(found["prompts"]), found["completions"], found["own_size"]] == [6, 8, more.get("num_generations", 4)]
    assert found["rewards"][0]["differing"] == 1 and found["own_signal"]["value"] > 0.8
    assert found["cost"]["seconds"]["generate"] > 0 and found["cost"]["seconds"]["train"] > 0
    assert found["cost"]["hours"] == pytest.approx(100 * found["cost"]["step"] / 3600)
    assert found["cost"]["peak_gib"] > 0 and "fits" in found["memory"]
    assert sorted(os.listdir(tmp_path)) == ["forecast.json"]  # nothing else is left


def test_what_a_run_would_refuse(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(tiny_model, num_promts=3, resume_from_checkpoint="last", json="nowhere/f.json")) == 2
    said = capsys.readouterr().err
    assert "did you mean --num_prompts?" in said and "--model CHECKPOINT" in said
    assert main(words(tiny_model, json="nowhere/f.json")) == 2
    assert "there is no folder nowhere" in capsys.readouterr().err
