"""Runs with a fault say so once, and `swift why` says it of what they leave."""

from __future__ import annotations

import json
import shutil
import signal
import threading
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
FAULTS: Mapping[str, Mapping[str, Any]] = {
    "rewards saturated": {"reward_funcs": "anything", "max_steps": 9},
    "rewards invalid": {
        "reward_funcs": ["digits", "sometimes_nan"],
        "max_steps": 9,
        "max_invalid_reward_ratio": 0.5,
    },
    "template broken": {"max_completion_length": 2, "max_steps": 8},
    "truncation": {"reward_funcs": "longer", "max_completion_length": 32, "max_steps": 10},
    "length explosion": {
        **{"reward_funcs": ["seven", "longer"], "reward_weights": [0, 1]},
        **{"max_completion_length": 128, "max_steps": 11},
    },
    "repetition": {"reward_funcs": "again", "max_completion_length": 24, "max_steps": 12},
    "entropy collapse": {
        "reward_funcs": ["lower", "seven"],
        "reward_weights": [0, 1],
        "max_steps": 20,
    },
    "evaluation falling": {
        **{"reward_funcs": ["lower", "digits"], "reward_weights": [0, 1], "max_steps": 12},
        **{"eval_on_start": "true", "eval_steps": 4, "eval_limit": 32, "num_generations_eval": 4},
    },
    "KL running off": {"beta": 1e-4, "max_steps": 10, "learning_rate": 3e-2},
    "ratios off": {"num_iterations": 8, "max_steps": 24, "learning_rate": 3e-2},
    "weights not moving": {"torch_dtype": "bfloat16", "learning_rate": 1e-9, "max_steps": 10},
    "memory creeping": {
        **{
            "reward_funcs": "leaking",
            "reward_isolation": "inline",
            "max_steps": 34,
            "learning_rate": 1e-6,
        },
        **{"per_device_train_batch_size": 8, "max_completion_length": 32},
    },
    "data repeated": {"dataset": "same", "max_steps": 20, "learning_rate": 1e-4},
}


def names(folder: Path) -> list[str]:
    path = folder / "diagnosis.jsonl"
    return (
        [json.loads(line)["name"] for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )


# Each sign is also found in a recorded log (tests/lab/diagnosis): here that a run finds its own.
SHORT = ("rewards invalid", "weights not moving")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in FAULTS]
)
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
    [line] = [line for line in run.errors.splitlines() if "no signal" in line]
    assert (
        "no signal, steps 1 to 8: 100% of the groups have equal rewards; the mean reward is 0; try: easier"
        in line
    )
    told = run.lines("diagnosis.jsonl")[0]
    assert told["steps"] == [1, 8] and told["numbers"] == {
        "frac_reward_zero_std": {"first": 1.0, "last": 1.0}
    }

    # Killed after step 9, it takes steps 6 to 20 again.
    for number in (10, 15, 20):
        shutil.rmtree(run.folder / f"checkpoint-{number}")
    again = rlhf(tiny_model, **flags, resume_from_checkpoint="last")
    assert again.code == 0 and again.steps[-1]["step"] == 20
    assert "no signal" not in again.errors and names(run.folder) == ["no signal", "data repeated"]

    capsys.readouterr()
    assert main(["why", str(run.folder), "--json"]) == 6
    [told] = json.loads(capsys.readouterr().out)
    assert (told["status"], told["steps"], told["problems"]) == ("ended", 20, [])
    assert told["findings"] == run.lines("diagnosis.jsonl")
    assert "evaluation falling" in told["not_judged"]
    assert main(["why", str(run.folder)]) == 6
    assert "no signal, steps 1 to 8: 100% of the groups" in capsys.readouterr().out


def test_a_healthy_run_says_nothing(rlhf, tiny_model, capsys):
    run = rlhf(tiny_model, **COMMON | {"learning_rate": 1e-3}, max_steps=16)
    assert run.code == 0 and names(run.folder) == []
    assert {"prompts/repeated", "completions/foreign_letters", "memory/host_gib"} <= run.steps[
        0
    ].keys()
    assert main(["why", str(run.folder)]) == 0
    shown = capsys.readouterr().out
    assert "  reward " in shown and "  0 of " in shown


@pytest.mark.long
def test_another_script(rlhf, save_model, tmp_path):
    """Some letters of the tokenizer become Greek ones, which the reward asks for."""
    model = save_model(tmp_path / "greek")
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    for place, letter in enumerate("QXZJKVWY"):
        vocabulary[chr(0x3B1 + place)] = vocabulary.pop(letter)
    path.write_text(json.dumps(content))
    run = rlhf(model, **COMMON, reward_funcs="greek", max_steps=24)
    # Then the model has all that the reward gives.
    assert run.code == 0 and names(run.folder) in (
        ["language broken"],
        ["language broken", "rewards saturated"],
    )


@pytest.mark.long
def test_a_server_that_is_stopped_now_and_then(rlhf, tiny_model, tiny_server, second_tiny_server):
    ended = threading.Event()

    def hinder() -> None:
        while not ended.is_set():
            second_tiny_server.server.process.send_signal(signal.SIGSTOP)
            ended.wait(0.06)
            second_tiny_server.server.process.send_signal(signal.SIGCONT)
            ended.wait(0.02)

    thread = threading.Thread(target=hinder)
    thread.start()
    try:
        urls = [tiny_server.url, second_tiny_server.url]
        run = rlhf(
            tiny_model,
            use_vllm="true",
            vllm_server_base_url=urls,
            max_steps=9,
            per_device_train_batch_size=32,
        )
    finally:
        ended.set()
        thread.join()
    assert run.code == 0
    [told] = [row for row in run.lines("diagnosis.jsonl") if row["name"] == "slow server"]
    assert told["evidence"].startswith("rollout server 1 takes")


@pytest.mark.parametrize("what", ["nothing", "cut", "bytes"])
def test_why_of_a_run_that_left_little(tmp_path, capsys, what):
    run = tmp_path / "run"
    run.mkdir()
    (run / "args.json").write_text("{" if what == "bytes" else "{}")
    (run / "logging.jsonl").write_bytes(
        {"nothing": b"", "cut": b'{"step": 1, "loss": 0.1}\n{"st', "bytes": b"\0\xff\n"}[what]
    )
    assert main(["why", str(run)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("run: killed at step ") and ("damaged" in said.err) == (
        what == "bytes"
    )
    assert main(["why", str(tmp_path / "none")]) == 2
