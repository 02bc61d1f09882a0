"""`swift rlhf --async_generate true` beside a real server: how old completions may be, and what is lost."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swift_r1.record.metrics import read_json_lines
from tests.e2e.live_run import (
    GROUP,
    SOAK_S,
    STEPS,
    check_every_prompt_once,
    never,
    rows_of,
    steps_of,
    train_to_the_end,
    words_of,
)

PROMPTS = 4


class Killed(Exception):
    """This trainer was killed on purpose."""


def train(
    model: Path,
    url: str,
    folder: Path,
    at_step: Callable[[int], None] = never,
    processes: int = 1,
    within_s: float = 240,
    **more: Any,
) -> str:
    """Runs to the end, or until `at_step`, called after each step, raises Killed; returns what was said."""
    flags = {
        "use_vllm": "true",
        "vllm_server_base_url": url,
        "vllm_server_timeout": 120,
        "async_generate": "true",
        "learning_rate": 1e-3,
        "save_steps": 1000,
    }
    return train_to_the_end(words_of(model, folder, **flags | more), at_step, processes, within_s)


def check_spans_and_events(folder: Path) -> None:
    """Of that run: every phase of every step, rounds ahead of their time, and the server's absence."""
    lanes = {path.stem: read_json_lines(path) for path in (folder / "spans").iterdir()}
    names = {"rank-0", "rank-1", "rewards", "server-0", "server-0-weights"}
    assert set(lanes) == names | {f"rollout-ahead-{number}" for number in range(3)}
    for rows in lanes.values():
        assert all(row["start"] <= row["end"] for row in rows)
        assert all(one["end"] <= other["start"] + 1e-3 for one, other in itertools.pairwise(rows))
    for rank in ("rank-0", "rank-1"):
        for name in ("wait", "train", "sync"):
            assert {row["step"] for row in lanes[rank] if row["name"] == name} >= set(range(1, 9))
        assert [row["step"] for row in lanes[rank] if row["name"] == "evaluate"] == [4, 8]
    ahead = [
        row
        for number in range(3)
        for row in lanes[f"rollout-ahead-{number}"]
        if row["name"] == "generate"
    ]
    assert sorted(row["step"] for row in ahead) == list(range(1, 9))
    first = {
        row["step"]: row["start"] for row in reversed(lanes["rank-0"]) if row["name"] == "wait"
    }
    assert any(row["start"] < first[row["step"]] for row in ahead)
    events = read_json_lines(folder / "events.jsonl")
    kinds = [event["kind"] for event in events]
    lost, back = kinds.index("server_lost"), kinds.index("server_restored")
    assert (
        kinds[0] == "started"
        and kinds[-1] == "ended"
        and lost < back
        and kinds.count("evaluated") == 2
    )
    away = (events[lost]["time"], events[back]["time"])
    assert not [row for row in lanes["server-0"] if away[0] < row["start"] < away[1]]


def test_rounds_come_at_most_k_behind_and_a_killed_server_loses_none(
    tiny_model: Path, tiny_server: Any, tmp_path: Path
) -> None:
    """Two ranks, two rounds ahead, an evaluation, and a server that dies and comes back while the trainer trains."""

    def kill(step: int) -> None:
        if step == 3:
            tiny_server.kill()
            tiny_server.start()

    folder = tmp_path / "run"
    settings = {"deepspeed": "zero2", "eval_steps": 4, "eval_limit": 2, "num_generations_eval": 1}
    said = train(
        tiny_model,
        tiny_server.url,
        folder,
        kill,
        processes=2,
        max_steps=8,
        max_staleness=2,
        **settings,
    )
    check_every_prompt_once(folder, 8, prompts=2 * PROMPTS)
    assert "was started again and holds weight version" in said
    check_spans_and_events(folder)
    steps = steps_of(folder)
    ages = [step["rollout/staleness/max"] for step in steps]
    assert len(steps) == 8 and ages[0] == 0 and 0 < max(ages) <= 2
    assert all(step["rollout/staleness/mean"] <= step["rollout/staleness/max"] for step in steps)
    # Only older weights, and what differs between kernels, make the ratio to the engine's log-probs another one than 1.
    assert abs(steps[0]["ratio"] - 1) < 1e-3
    evaluated = [
        json.loads(line) for line in (folder / "eval_completions.jsonl").read_text().splitlines()
    ]
    published = {row["step"]: row["weight_version"] for row in evaluated}
    assert sorted(published) == [4, 8] and all(
        row["weight_version"] == published[row["step"]] for row in evaluated
    )


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "more",
    [
        {"dynamic_sample": "true", "max_resample_times": 2},
        {
            "num_iterations": 2,
            "steps_per_generation": 2,
            "rollout_importance_sampling_mode": "token_truncate",
        },
    ],
    ids=["dynamic sampling", "decoupled"],
)
def test_vllm_killed_while_rounds_are_ahead(
    tiny_model: Path, killable_vllm: Any, tmp_path: Path, more: dict[str, Any]
) -> None:
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


@pytest.mark.long
@pytest.mark.timeout(SOAK_S)
def test_soak_ahead_with_random_kills_of_server_and_trainer(
    tiny_model: Path, tiny_server: Any, tmp_path: Path
) -> None:
    """Two rounds ahead: as many prompts, in the same order, as without a kill; none too old."""
    steps, rng, folder = STEPS, random.Random(5), tmp_path / "run"
    kills: list[tuple[int, str]] = []
    due = rng.randint(8, 16)

    def at_step(step: int) -> None:
        nonlocal due
        if step < due or step >= steps:
            return
        kills.append((step, rng.choice(["server", "trainer"])))
        due = step + rng.randint(8, 16)
        if kills[-1][1] == "trainer":
            raise Killed
        tiny_server.kill()
        tiny_server.start()

    more = {"max_steps": steps, "max_staleness": 2, "save_steps": 4, "save_total_limit": 2}
    while True:
        try:
            train(
                tiny_model,
                tiny_server.url,
                folder,
                at_step,
                within_s=SOAK_S,
                resume_from_checkpoint="last",
                **more,
            )
            break
        except Killed:
            pass
    assert len(kills) >= steps // 17 and len({whom for _, whom in kills}) == 2, kills
    check_every_prompt_once(folder, steps)
    logged = steps_of(folder)
    assert [step["step"] for step in logged] == list(range(1, steps + 1))
    assert max(step["rollout/staleness/max"] for step in logged) <= 2
    # Epochs of 200 prompts, 4 a step: each once in each.
    prompts = [row["prompt_id"] for row in rows_of(folder)[::GROUP]]
    for epoch in range(0, len(prompts), 200):
        assert len(set(prompts[epoch : epoch + 200])) == len(prompts[epoch : epoch + 200])
    rewards = [step["reward"] for step in logged]
    assert sum(rewards[-20:]) > 2 * sum(rewards[:20])
