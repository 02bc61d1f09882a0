"""`swift rlhf` on two ZeRO-3 processes while its rollout server is killed: no prompt is lost, none comes twice."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swift_r1.lab.runs.timeline import Timeline
from tests.e2e.live_run import (
    SOAK_S,
    STEPS,
    LiveRun,
    check_every_prompt_once,
    never,
    steps_of,
    train_to_the_end,
    what_was_learned,
    words_of,
)

LOGP_NOISE = 2e-3


def train(
    model: Path,
    urls: list[str],
    folder: Path,
    steps: int,
    at_step: Callable[[int], None],
    processes: int,
    **more: Any,
) -> str:
    """Runs to the end, calling `at_step` after each step; returns what was said. Every prompt must have come once."""
    flags = {
        "per_device_train_batch_size": 16 // processes,
        "max_steps": steps,
        "use_vllm": "true",
        "vllm_server_base_url": urls,
        "vllm_server_timeout": 200,
        "learning_rate": 1e-3,
        "save_steps": steps,
        **({"deepspeed": "zero3"} if processes > 1 else {}),
    }
    said = train_to_the_end(
        words_of(model, folder, **flags | more), at_step, processes, SOAK_S if steps > 100 else 280
    )
    differences = [step["rollout/logp_diff"] for step in steps_of(folder)]
    assert len(differences) == steps and max(differences) < LOGP_NOISE
    check_every_prompt_once(folder, steps)
    return said


def test_a_killed_server_loses_no_prompt(
    tiny_model: Path, tiny_server: Any, tmp_path: Path
) -> None:
    def kill(step: int) -> None:
        if step == 2:
            tiny_server.kill()
            tiny_server.start()

    errors = train(tiny_model, [tiny_server.url], tmp_path / "run", 4, kill, processes=2)
    assert errors.count("was started again and holds weight version 0") == 1
    assert "s left" in errors
    timeline = Timeline(tmp_path / "run")
    timeline.refresh()
    kinds = [mark.kind for mark in timeline.marks]
    assert (
        kinds == ["started", "server_lost", "server_restored", "saved", "ended"]
        and timeline.problems == []
    )
    assert timeline.lanes == ["rank-0", "rank-1", "rewards", "server-0", "server-0-weights"]
    # Rank 0 asks the server, and the other waits for it.
    for lane, name in (("rank-0", "generate"), ("rank-1", "wait"), ("rank-1", "train")):
        assert {span.step for span in timeline.spans(lane) if span.name == name} == {1, 2, 3, 4}
    assert not any(span.name == "generate" for span in timeline.spans("rank-1"))


@pytest.mark.long
@pytest.mark.parametrize(("processes", "async_generate"), [(2, "false"), (1, "true")])
def test_told_to_stop_without_its_server_a_run_saves_the_last_whole_step(
    tiny_model: Path, tiny_server: Any, tmp_path: Path, processes: int, async_generate: str
) -> None:
    """Whoever ends them both cannot know which one needs the other."""
    flags = {
        "per_device_train_batch_size": 16 // processes,
        "max_steps": 5,
        "use_vllm": "true",
        "vllm_server_base_url": tiny_server.url,
        "vllm_server_timeout": 30,
        "async_generate": async_generate,
    }
    words = words_of(tiny_model, tmp_path / "run", **flags)
    run = LiveRun(words, processes, cold=processes > 1)

    def end_both(step: int) -> None:
        if step == 2:
            tiny_server.kill()
            run.process.send_signal(signal.SIGTERM)

    try:
        assert run.follow(end_both, 150) == 143, run.said
    finally:
        run.close()
    assert "no rollout server is there" in run.said
    last = steps_of(tmp_path / "run")[-1]["step"]  # a step may have had its completions already
    assert last in (2, 3) and (tmp_path / "run" / f"checkpoint-{last}").exists()
    tiny_server.start()
    train_to_the_end([*words, "--resume_from_checkpoint", "last"], processes=processes)
    check_every_prompt_once(tmp_path / "run", 5)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_one_of_two_servers_is_killed_under_zero3(
    tiny_model: Path, tiny_server: Any, second_tiny_server: Any, tmp_path: Path
) -> None:
    """The run goes on without waiting for it, and with it when it is back."""

    def kill(step: int) -> None:
        if step == 2:
            second_tiny_server.kill()
        if step == 4:
            second_tiny_server.start()

    urls = [tiny_server.url, second_tiny_server.url]
    errors = train(tiny_model, urls, tmp_path / "run", 80, kill, processes=2)
    assert (
        f"the rollout server at {second_tiny_server.url} is lost: its work goes to the other one"
        in errors
    )
    assert "2 of 2 servers" in errors
    servers = [step["rollout/servers"] for step in steps_of(tmp_path / "run")]
    assert servers[0] == 2 and min(servers) == 1 and servers[-1] == 2


@pytest.mark.long
@pytest.mark.timeout(2 * SOAK_S)
def test_soak_of_two_servers_with_random_kills_equals_an_undisturbed_run_with_one(
    tiny_model: Path, tiny_server: Any, second_tiny_server: Any, tmp_path: Path
) -> None:
    """Either is killed, at times both; in float32 it does not matter which of them writes a completion."""
    steps, kills = STEPS, []
    random.seed(11)
    train(tiny_model, [tiny_server.url], tmp_path / "calm", steps, never, processes=1)
    due = [random.randrange(5, 12)]

    def kill(step: int) -> None:
        if step == due[0] and step < steps:
            time.sleep(random.random() * 0.3)
            due[0] = step + random.randrange(5, 12)
            for server in random.choice(
                [[tiny_server], [second_tiny_server], [tiny_server, second_tiny_server]]
            ):
                kills.append(step)
                server.kill()
                server.start()

    urls = [tiny_server.url, second_tiny_server.url]
    train(tiny_model, urls, tmp_path / "soak", steps, kill, processes=1, weight_delta="true")
    assert len(kills) >= steps // 12
    assert what_was_learned(tmp_path / "soak") == what_was_learned(tmp_path / "calm")
