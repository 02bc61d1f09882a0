"""A long run with a real vLLM server, while server and trainer are killed at random."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.live_run import (
    SOAK_S,
    STEPS,
    check_every_prompt_once,
    never,
    rows_of,
    steps_of,
    train_to_the_end,
    words_of,
)

BLOCK = 25


class Killed(Exception):
    """This trainer was killed on purpose."""


def run_until(model: Path, url: str, folder: Path, at_step: Any) -> None:
    """One trainer, from its newest checkpoint to its end, or until `at_step` raises Killed."""
    flags = {
        "max_steps": STEPS,
        "use_vllm": "true",
        "vllm_server_base_url": url,
        "vllm_server_timeout": 300,
        "learning_rate": 2e-4,
        "save_steps": 10,
        "save_total_limit": 2,
        "resume_from_checkpoint": "last",
        "reward_isolation": "process",
    }
    train_to_the_end(words_of(model, folder, **flags), at_step, within_s=SOAK_S)


def rewards_of(folder: Path) -> list[float]:
    lines = steps_of(folder)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert max(line["rollout/logp_diff"] for line in lines) < 2e-3
    return [line["reward"] for line in lines]


@pytest.mark.long
@pytest.mark.timeout(2 * SOAK_S)
def test_random_kills_of_server_and_trainer(tiny_model: Path, killable_vllm: Any, tmp_path: Path):
    rng = random.Random(4)
    run_until(tiny_model, killable_vllm.url, tmp_path / "calm", never)

    kills: list[tuple[int, str]] = []
    due = rng.randint(20, 60)

    def at_step(step: int) -> None:
        nonlocal due
        if step < due or step >= STEPS:
            return
        time.sleep(rng.random() * 0.5)  # anywhere in the step that follows
        whom = rng.choice(["server", "trainer"])
        kills.append((step, whom))
        due = step + rng.randint(20, 60)
        if whom == "trainer":
            raise Killed
        killable_vllm.kill()
        killable_vllm.start()

    while True:
        try:
            run_until(tiny_model, killable_vllm.url, tmp_path / "soak", at_step)
            break
        except Killed:
            pass

    assert len(kills) >= STEPS // 41 and len({whom for _, whom in kills}) == 2, kills
    calm, soak = rows_of(tmp_path / "calm"), rows_of(tmp_path / "soak")
    assert Counter((row["step"], row["prompt_id"]) for row in soak) == Counter(
        (row["step"], row["prompt_id"]) for row in calm
    )
    check_every_prompt_once(tmp_path / "soak", STEPS)
    # The band: how far the undisturbed run's own means of 25 steps lie from one another once it has learned.
    rewards = rewards_of(tmp_path / "calm")
    blocks = [
        statistics.fmean(rewards[i : i + BLOCK]) for i in range(STEPS - 4 * BLOCK, STEPS, BLOCK)
    ]
    expected, band = statistics.fmean(blocks), max(3 * statistics.stdev(blocks), 0.01)
    last = statistics.fmean(rewards_of(tmp_path / "soak")[-4 * BLOCK :])
    print(
        f"kills: {kills}; reward of the last 100 steps {last:.3f}, undisturbed {expected:.3f} +- {band:.3f}"
    )
    assert abs(last - expected) < band
