"""500 steps with a real vLLM server, while server and trainer are killed at random."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

PLUGIN = Path(__file__).parent / "digits_plugin.py"
STEPS = 500
BLOCK = 25
DEADLINE_S = 1500


class Killed(Exception):
    """This trainer was killed on purpose."""


def run_until(model: Path, url: str, folder: Path, at_step: Any) -> None:
    """One trainer process group, from its newest checkpoint to its end, or until `at_step` raises Killed."""
    words = [
        *(sys.executable, "-m", "swift_r1", "rlhf", "--rlhf_type", "grpo", "--model", str(model)),
        *("--external_plugins", str(PLUGIN), "--dataset", "counting#200", "--reward_funcs", "digits"),
        *("--num_generations", "4", "--per_device_train_batch_size", "16", "--gradient_checkpointing", "false"),
        *("--max_completion_length", "12", "--max_steps", str(STEPS), "--logging_steps", "1", "--report_to", "none"),
        *("--use_vllm", "true", "--vllm_server_base_url", url, "--vllm_server_timeout", "300"),
        *("--learning_rate", "2e-4", "--lr_scheduler_type", "constant", "--save_steps", "10"),
        *("--save_total_limit", "2", "--output_dir", str(folder), "--add_version", "false"),
        *("--resume_from_checkpoint", "last"),
    ]
    log = (folder.parent / f"{folder.name}.log").open("a")
    process = subprocess.Popen(
        words,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    watchdog = threading.Timer(DEADLINE_S, os.killpg, (process.pid, signal.SIGKILL))
    watchdog.start()
    try:
        assert process.stderr is not None
        for line in process.stderr:
            log.write(line)
            log.flush()
            if line.startswith("step "):
                at_step(int(line.split()[1].split("/")[0]))
        assert process.wait(60) == 0, Path(log.name).read_text()[-4000:]
    finally:
        watchdog.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)
        log.close()


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


def rewards_of(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert max(line["rollout/logp_diff"] for line in lines) < 2e-3
    return [line["reward"] for line in lines]


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_500_steps_with_random_kills_of_server_and_trainer(tiny_model: Path, killable_vllm: Any, tmp_path: Path):
    rng = random.Random(4)
    run_until(tiny_model, killable_vllm.url, tmp_path / "calm", lambda _step: None)

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

    assert len(kills) >= 12 and len({whom for _, whom in kills}) == 2, kills
    calm, soak = rows_of(tmp_path / "calm"), rows_of(tmp_path / "soak")
    assert Counter((row["step"], row["prompt_id"]) for row in soak) == Counter(
        (row["step"], row["prompt_id"]) for row in calm
    )
    # Rounds of 4 prompts, 4 completions each: ids are run/round/place, and a resumed run is one of another name.
    places = Counter(tuple(row["request_id"].split("/")[1:]) for row in soak)
    assert places == {(str(one), str(place)): 4 for one in range(STEPS) for place in range(4)}
    # The band: how far the undisturbed run's own means of 25 steps lie from one another once it has learned.
    rewards = rewards_of(tmp_path / "calm")
    blocks = [statistics.fmean(rewards[i : i + BLOCK]) for i in range(STEPS - 4 * BLOCK, STEPS, BLOCK)]
    expected, band = statistics.fmean(blocks), max(3 * statistics.stdev(blocks), 0.01)
    last = statistics.fmean(rewards_of(tmp_path / "soak")[-4 * BLOCK :])
    print(f"kills: {kills}; reward of the last 100 steps {last:.3f}, undisturbed {expected:.3f} +- {band:.3f}")
    assert abs(last - expected) < band
