"""`swift rlhf` on two ZeRO-3 processes while its rollout server is killed: no prompt is lost, none comes twice."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PLUGIN = Path(__file__).parent / "digits_plugin.py"
LOGP_NOISE = 2e-3


def train(model: Path, url: str, folder: Path, steps: int, at_step: Callable[[int], None], processes: int) -> list[Any]:
    """Runs to the end, calling `at_step` after each step; returns the rows of completions.jsonl."""
    words = [
        *(sys.executable, "-m", "swift_r1", "rlhf", "--rlhf_type", "grpo", "--model", str(model)),
        *("--external_plugins", str(PLUGIN), "--dataset", "counting#200", "--reward_funcs", "digits"),
        *("--num_generations", "4", "--per_device_train_batch_size", str(16 // processes)),
        *("--max_completion_length", "12", "--max_steps", str(steps), "--gradient_checkpointing", "false"),
        *("--use_vllm", "true", "--vllm_server_base_url", *url.split(), "--vllm_server_timeout", "200"),
        *("--learning_rate", "1e-3", "--lr_scheduler_type", "constant", "--save_steps", str(steps)),
        *("--logging_steps", "1", "--report_to", "none", "--output_dir", str(folder), "--add_version", "false"),
        *(("--deepspeed", "zero3") if processes > 1 else ()),
    ]
    process = subprocess.Popen(
        words,
        env=os.environ | {"NPROC_PER_NODE": str(processes), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    watchdog = threading.Timer(1500 if steps > 50 else 280, process.kill)
    watchdog.start()
    errors = []
    try:
        for line in process.stderr:
            errors.append(line)
            if line.startswith("step "):
                at_step(int(line.split()[1].split("/")[0]))
        assert process.wait(60) == 0, "".join(errors[-60:])
    finally:
        watchdog.cancel()
        process.kill()
    rows = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    logged = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
    differences = [line["rollout/logp_diff"] for line in logged if "loss" in line]
    assert len(differences) == steps and max(differences) < LOGP_NOISE
    return [rows, "".join(errors)]


def check_every_prompt_once(rows: list[dict[str, Any]], steps: int) -> None:
    """Rounds of 4 prompts, 4 completions each: ids are run/round/place."""
    places = Counter(tuple(row["request_id"].split("/")[1:]) for row in rows)
    assert places == {(str(one), str(place)): 4 for one in range(steps) for place in range(4)}


def test_a_killed_server_loses_no_prompt(tiny_model: Path, tiny_server: Any, tmp_path: Path) -> None:
    def kill(step: int) -> None:
        if step == 2:
            tiny_server.kill()
            tiny_server.start()

    rows, errors = train(tiny_model, tiny_server.url, tmp_path / "run", 4, kill, processes=2)
    check_every_prompt_once(rows, 4)
    assert errors.count("the rollout server was started anew and holds weight version 0") == 1
    assert "s left" in errors


@pytest.mark.long
@pytest.mark.timeout(900)
def test_vllm_killed_at_any_moment(tiny_model: Path, killable_vllm: Any, tmp_path: Path) -> None:
    random.seed(3)

    def kill(step: int) -> None:
        if step % 3 == 0:
            time.sleep(random.random() * 0.5)  # anywhere in the step that follows
            killable_vllm.kill()
            killable_vllm.start()

    rows, errors = train(tiny_model, killable_vllm.url, tmp_path / "run", 12, kill, processes=2)
    check_every_prompt_once(rows, 12)
    assert errors.count("the rollout server was started anew") >= 3


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_soak_with_random_kills_equals_an_undisturbed_run(tiny_model: Path, tiny_server: Any, tmp_path: Path) -> None:
    """Seeds are a completion's own, and a restored server has the very weights: the same completions come out."""
    steps, kills = 200, []
    random.seed(7)
    undisturbed, _ = train(tiny_model, tiny_server.url, tmp_path / "calm", steps, lambda _step: None, processes=1)
    due = [random.randrange(10, 17)]

    def kill(step: int) -> None:
        if step == due[0] and step < steps:
            time.sleep(random.random() * 0.3)
            kills.append(step)
            due[0] = step + random.randrange(10, 17)
            tiny_server.kill()
            tiny_server.start()

    rows, _ = train(tiny_model, tiny_server.url, tmp_path / "soak", steps, kill, processes=1)
    assert len(kills) >= 12
    check_every_prompt_once(rows, steps)
    kept = ("step", "prompt_id", "completion", "reward", "advantage")
    assert [[row[key] for key in kept] for row in rows] == [[row[key] for key in kept] for row in undisturbed]


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

    urls = f"{tiny_server.url} {second_tiny_server.url}"
    rows, errors = train(tiny_model, urls, tmp_path / "run", 80, kill, processes=2)
    check_every_prompt_once(rows, 80)
    assert f"the rollout server at {second_tiny_server.url} is lost: its work goes to the other one" in errors
    assert "2 of 2 servers" in errors
    logged = [json.loads(line) for line in (tmp_path / "run" / "logging.jsonl").read_text().splitlines()]
    servers = [line["rollout/servers"] for line in logged if "loss" in line]
    assert servers[0] == 2 and min(servers) == 1 and servers[-1] == 2


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("delta", ["auto", "true"])
def test_soak_of_two_servers_with_random_kills_equals_an_undisturbed_run_with_one(
    tiny_model: Path, tiny_server: Any, second_tiny_server: Any, tmp_path: Path, delta: str
) -> None:
    """Either is killed, at times both; in float32 it does not matter which of them writes a completion."""
    steps, kills = 100, []
    random.seed(11)
    undisturbed, _ = train(tiny_model, tiny_server.url, tmp_path / "calm", steps, lambda _step: None, processes=1)
    due = [random.randrange(5, 12)]

    def kill(step: int) -> None:
        if step == due[0] and step < steps:
            time.sleep(random.random() * 0.3)
            due[0] = step + random.randrange(5, 12)
            for server in random.choice([[tiny_server], [second_tiny_server], [tiny_server, second_tiny_server]]):
                kills.append(step)
                server.kill()
                server.start()

    urls = f"{tiny_server.url} {second_tiny_server.url} --weight_delta {delta}"
    rows, _ = train(tiny_model, urls, tmp_path / "soak", steps, kill, processes=1)
    assert len(kills) >= 8
    check_every_prompt_once(rows, steps)
    kept = ("step", "prompt_id", "completion", "reward", "advantage")
    assert [[row[key] for key in kept] for row in rows] == [[row[key] for key in kept] for row in undisturbed]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_one_of_two_vllm_servers_is_killed(
    tiny_model: Path, killable_vllm: Any, second_killable_vllm: Any, tmp_path: Path
) -> None:
    """Steps go on while vLLM starts, so there are as many as several starts take."""
    random.seed(3)
    both = [killable_vllm, second_killable_vllm]

    def kill(step: int) -> None:
        if step % 150 == 10:
            time.sleep(random.random() * 0.5)  # anywhere in the step that follows
            one = both[step // 150 % 2]
            one.kill()
            one.start()

    urls = " ".join(one.url for one in both)
    rows, errors = train(tiny_model, urls, tmp_path / "run", 600, kill, processes=2)
    check_every_prompt_once(rows, 600)
    assert errors.count("is lost: ") >= 3 and errors.count("is back with weight version") >= 2
