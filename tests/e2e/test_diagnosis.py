"""Runs with a fault say so once, and `swift why` says it of what they leave."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from swift_r1.cli.main import main

PLUGINS = [Path(__file__).parent / f"{name}_plugin.py" for name in ("digits", "faults")]
COMMON = {
    **{
        "external_plugins": PLUGINS,
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "learning_rate": 1e-2,
    },
    # a random model ends some time
    **{"max_completion_length": 64, "stop_words": list("ABCDEFGH")},
}
# Each sign is also found in a recorded log (tests/lab/diagnosis): here that a run finds its own.
FAULTS: Mapping[str, Mapping[str, Any]] = {
    "rewards invalid": {
        "reward_funcs": ["digits", "sometimes_nan"],
        "max_steps": 9,
        "max_invalid_reward_ratio": 0.5,
    },
    "weights not moving": {"torch_dtype": "bfloat16", "learning_rate": 1e-9, "max_steps": 10},
}


def names(folder: Path) -> list[str]:
    path = folder / "diagnosis.jsonl"
    return (
        [json.loads(line)["name"] for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )


@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_named(rlhf, tiny_model, name):
    run = rlhf(tiny_model, **COMMON | FAULTS[name])
    assert run.code == 0
    assert names(run.folder) == [name]


@pytest.mark.long
def test_a_run_without_a_signal_says_so_once_also_after_a_resume(
    rlhf, tiny_model, capsys, tmp_path
):
    flags = COMMON | {
        "dataset": "same",
        "reward_funcs": "nothing",
        "max_steps": 20,
        "save_steps": 5,
    }
    flags |= {"per_device_train_batch_size": 8, "num_generations": 2}
    run = rlhf(tiny_model, **flags)
    assert run.code == 0
    assert names(run.folder) == ["no signal", "data repeated"]
    assert run.errors.count("warning: no signal, steps 1 to 8: 100% of the groups") == 1
    told = run.lines("diagnosis.jsonl")[0]
    assert told["steps"] == [1, 8] and told["numbers"] == {
        "frac_reward_zero_std": {"first": 1.0, "last": 1.0}
    }

    # Killed after step 9, it takes steps 6 to 20 again.
    for number in (10, 15, 20):
        shutil.rmtree(run.folder / f"checkpoint-{number}")
    again = rlhf(tiny_model, **flags, resume_from_checkpoint="last")
    assert again.code == 0 and again.steps[-1]["step"] == 20
    assert "warning: no signal" not in again.errors and names(run.folder) == [
        "no signal",
        "data repeated",
    ]

    capsys.readouterr()
    assert main(["why", str(run.folder), "--json"]) == 6
    [told] = json.loads(capsys.readouterr().out)
    assert (told["status"], told["steps"], told["problems"]) == ("ended", 20, [])
    assert told["findings"] == run.lines("diagnosis.jsonl")
    assert "evaluation falling" in told["not_judged"]
    assert main(["why", str(run.folder)]) == 6
    assert "no signal, steps 1 to 8: 100% of the groups" in capsys.readouterr().out


def test_a_healthy_run_says_nothing(rlhf, tiny_model, capsys):
    run = rlhf(tiny_model, **COMMON | {"learning_rate": 1e-3}, max_steps=10)
    assert run.code == 0 and names(run.folder) == []
    assert {"prompts/repeated", "completions/foreign_letters", "memory/host_gib"} <= run.steps[
        0
    ].keys()
    assert main(["why", str(run.folder)]) == 0
    shown = capsys.readouterr().out
    assert "  reward " in shown and "  0 of " in shown
