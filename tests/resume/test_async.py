"""Runs that generate ahead: the same run where nothing is ahead, and none lost and none twice where they are killed."""

from __future__ import annotations

import json
import signal
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swift_r1.data.choices import Choices
from swift_r1.data.sampler import Outcome, build_sampler
from swift_r1.plugins import load_plugins

pytestmark = pytest.mark.timeout(600)

SETTINGS = {
    "deterministic": "false",
    "use_vllm": "true",
    "weight_check_steps": 0,
    "logging_steps": 1,
    "max_steps": 6,
    "save_steps": 100,
    "reward_isolation": "inline",
}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def prompts(folder: Path) -> list[tuple[int, str]]:
    return [(row["step"], row["prompt_id"]) for row in rows_of(folder)]


def chosen_again(folder: Path, ahead: int) -> list[tuple[int, str]]:
    """What the run's sampler chooses where it is told of each round's rewards once the weights show them."""
    args, rows = json.loads((folder / "args.json").read_text())["args"], rows_of(folder)
    load_plugins(args["external_plugins"])
    data = [{"prompt_id": f"counting:{number}"} for number in range(40)]
    choices = Choices(build_sampler("lowest", data, SimpleNamespace(**args)), ahead)
    found: list[tuple[int, str]] = []
    for number, (step, round_) in enumerate(groupby(rows, key=lambda row: row["step"])):
        groups = [list(group) for _, group in groupby(round_, key=lambda row: row["group"])]
        first = len(found)
        choices.choose(first + len(groups), number)
        chosen = [choices.row(place) for place in range(first, first + len(groups))]
        means = [sum(row["reward"] for row in group) / len(group) for group in groups]
        choices.hear(
            number,
            [Outcome(*one, 0.0, True, 0.0) for one in zip(chosen, [step] * 9, means, strict=False)],
        )
        found += [(step, data[row]["prompt_id"]) for row in chosen]
    return [one for one in found for _ in range(4)]


def test_without_staleness_the_run_is_the_synchronous_one_bit_for_bit(runs, tiny_server, tmp_path):
    settings = SETTINGS | {"vllm_server_base_url": tiny_server.url, "max_steps": 3}
    folders = [tmp_path / "plain", tmp_path / "ahead"]
    for folder, more in zip(
        folders, ({}, {"async_generate": "true", "max_staleness": 0}), strict=True
    ):
        assert runs.run(folder, **settings, **more).code == 0
    weights = [(folder / "checkpoint-3" / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1]
    kept = ("step", "prompt_id", "completion", "reward", "advantage")
    plain, ahead = ([[row[key] for key in kept] for row in rows_of(folder)] for folder in folders)
    assert plain == ahead
    ages = [
        {key: value for key, value in step.items() if "staleness" in key}
        for step in steps_of(folders[1])
    ]
    assert ages == [{"rollout/staleness/mean": 0.0, "rollout/staleness/max": 0.0}] * 3
    assert not any("staleness" in key for step in steps_of(folders[0]) for key in step)


@pytest.mark.parametrize("sampler", ["uniform", pytest.param("lowest", marks=pytest.mark.long)])
def test_a_killed_run_takes_again_what_was_only_generated(runs, tiny_server, tmp_path, sampler):
    """In the middle of a round, while a later one is scored."""
    settings = SETTINGS | {
        "vllm_server_base_url": tiny_server.url,
        "async_generate": "true",
        "max_staleness": 2,
        "steps_per_generation": 2,
        "save_steps": 1,
        "eval_steps": 2,
        "eval_limit": 2,
        "num_generations_eval": 1,
        "prompt_sampler": sampler,
    }
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert runs.run(whole, **settings).code == 0
    # By a reward of the round that begins after step 4, while the trainer is at most there.
    order = {
        "step": 4,
        "signal": signal.SIGKILL,
        "times": 1,
        "after": "resumed/checkpoint-1/manifest.json",
    }
    (tmp_path / "signals.json").write_text(json.dumps(order))
    assert runs.wait(runs.start(resumed, **settings), resumed).code == -signal.SIGKILL
    assert runs.run(resumed, resume_from_checkpoint="last", **settings).code == 0
    if sampler == "uniform":
        assert prompts(resumed) == prompts(whole)
    for folder in (whole, resumed):
        assert sampler == "uniform" or prompts(folder) == chosen_again(folder, ahead=2)
        rows = rows_of(folder)
        assert len({row["request_id"] for row in rows}) * 4 == len(rows)
        steps = steps_of(folder)
        assert [step["step"] for step in steps] == list(range(1, 7))
        assert max(step["rollout/staleness/max"] for step in steps) <= 2
