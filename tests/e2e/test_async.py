"""`swift rlhf --async_generate true` beside a real server: how old completions may be, and what is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.live_run import (
    GROUP,
    check_every_prompt_once,
    never,
    rows_of,
    steps_of,
    train_to_the_end,
    words_of,
)

PROMPTS = 4


def train(
    model: Path,
    url: str,
    folder: Path,
    at_step: Callable[[int], None] = never,
    processes: int = 1,
    **more: Any,
) -> str:
    """Runs to the end, calling `at_step` after each step; returns what was said."""
    flags = {
        "use_vllm": "true",
        "vllm_server_base_url": url,
        "vllm_server_timeout": 120,
        "async_generate": "true",
        "learning_rate": 1e-3,
        "save_steps": 1000,
    }
    return train_to_the_end(words_of(model, folder, **flags | more), at_step, processes, 240)


def test_rounds_come_at_most_k_behind_and_a_killed_server_loses_none(
    tiny_model: Path, tiny_server: Any, tmp_path: Path
) -> None:
    """Two ranks, two rounds ahead, an evaluation, and a server that dies and comes back while the trainer trains."""

    def kill(step: int) -> None:
        if step == 2:
            tiny_server.kill()
            tiny_server.start()

    folder = tmp_path / "run"
    settings = {"deepspeed": "zero2", "eval_steps": 3, "eval_limit": 2, "num_generations_eval": 1}
    said = train(
        tiny_model,
        tiny_server.url,
        folder,
        kill,
        processes=2,
        max_steps=6,
        max_staleness=2,
        **settings,
    )
    check_every_prompt_once(folder, 6, prompts=2 * PROMPTS)
    assert "was started again and holds weight version" in said
    steps = steps_of(folder)
    ages = [step["rollout/staleness/max"] for step in steps]
    assert len(steps) == 6 and ages[0] == 0 and 0 < max(ages) <= 2
    assert all(step["rollout/staleness/mean"] <= step["rollout/staleness/max"] for step in steps)
    # Only older weights, and what differs between kernels, make the ratio to the engine's log-probs another one than 1.
    assert abs(steps[0]["ratio"] - 1) < 1e-3
    evaluated = [
        json.loads(line) for line in (folder / "eval_completions.jsonl").read_text().splitlines()
    ]
    published = {row["step"]: row["weight_version"] for row in evaluated}
    assert sorted(published) == [3, 6] and all(
        row["weight_version"] == published[row["step"]] for row in evaluated
    )


@pytest.mark.long
@pytest.mark.timeout(900)
def test_vllm_killed_while_rounds_are_ahead(
    tiny_model: Path, killable_vllm: Any, tmp_path: Path
) -> None:
    """Prompts without signal are replaced."""
    more = {"dynamic_sample": "true", "max_resample_times": 2}

    def kill(step: int) -> None:
        if step % 5 == 0 and step < 20:
            killable_vllm.kill()
            killable_vllm.start()

    folder = tmp_path / "run"
    train(tiny_model, killable_vllm.url, folder, kill, max_steps=20, max_staleness=2, **more)
    rows, steps = rows_of(folder), steps_of(folder)
    assert len(steps) == 20 and max(step["rollout/staleness/max"] for step in steps) <= 2
    assert len({row["request_id"] for row in rows}) * GROUP == len(rows)
    prompts = [row["prompt_id"] for row in rows[::GROUP]]
    assert len(set(prompts)) == len(prompts)  # of 200: none comes twice in an epoch
