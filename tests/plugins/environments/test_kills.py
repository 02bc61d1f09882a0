"""Runs of environments with a server or the trainer killed in the middle: each episode is there once, and the same."""

from __future__ import annotations

import json
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import until
from tests.e2e.live_run import train_to_the_end, what_was_learned, words_of
from tests.resume.conftest import runs  # noqa: F401  the fixture

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

LOGP_NOISE = 2e-3
GAME = """
import random
from trl import GRPOTrainer

class Game:
    def __init__(self):
        self.drawn = random.randrange(10)
    def reset(self, start, progress, **row):
        self.progress = progress
        return f" {start} {self.drawn}"
    def get_reward(self):
        with open(self.progress, "a") as file:
            file.write(".")
        return random.random()

def digits(completions, **columns):
    return [sum(one.isdigit() for one in messages[-1]["content"]) for messages in completions]

rows = [{"prompt": f"count from {number}", "start": number, "progress": PROGRESS} for number in range(COUNT)]
GRPOTrainer("m", digits, train_dataset=rows, environment_factory=Game)
"""


def flags_of(folder: Path, progress: Path, count: int) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    script = folder / "game.py"
    script.write_text(GAME.replace("PROGRESS", repr(str(progress))).replace("COUNT", str(count)))
    return {
        "reward_funcs": "agent_reward",
        "dataset": "env",
        "env": f"trl:{script}",
        "max_completion_length": 8,
    }


@pytest.mark.parametrize("prompts", [6, 50])
def test_one_of_two_servers_is_killed(
    tiny_model: Path, tiny_server: Any, second_tiny_server: Any, tmp_path: Path, prompts: int
) -> None:
    group = 4

    def play(name: str) -> Path:
        progress = tmp_path / f"{name}.progress"
        flags = flags_of(tmp_path / "scripts", progress, prompts) | {
            "num_generations": group,
            "per_device_train_batch_size": prompts * group,
            "max_steps": 2,
            "use_vllm": "true",
            "vllm_server_base_url": [tiny_server.url, second_tiny_server.url],
            "learning_rate": 1e-3,
        }

        def kill() -> None:
            until(
                lambda: progress.exists() and progress.stat().st_size >= prompts * group * 3 // 2,
                300,
            )
            second_tiny_server.kill()
            second_tiny_server.start()

        killer = threading.Thread(target=kill, daemon=True)
        if name == "killed":
            killer.start()
        said = train_to_the_end(words_of(tiny_model, tmp_path / name, **flags), within_s=420)
        if name == "killed":
            killer.join()
            assert second_tiny_server.url in said  # it was missed
        assert progress.stat().st_size >= 2 * prompts * group
        return tmp_path / name

    folder = play("killed")
    rows = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    places = Counter((*row["request_id"].split("/")[1:], row["number"]) for row in rows)
    assert places == {
        (str(n), str(p), i): 1 for n in range(2) for p in range(prompts) for i in range(group)
    }
    assert all("failure" not in row for row in rows)
    assert all(
        len({row["prompt"] for row in rows if row["prompt_id"] == one}) == 1
        for one in {row["prompt_id"] for row in rows}
    )
    steps = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
    assert max(line["rollout/logp_diff"] for line in steps if "loss" in line) < LOGP_NOISE
    assert what_was_learned(folder) == what_was_learned(play("calm"))


def test_a_killed_trainer_goes_on_with_the_same_episodes(runs: Any, tmp_path: Path) -> None:  # noqa: F811
    progress = tmp_path / "progress"
    flags = flags_of(tmp_path / "scripts", progress, 40) | {
        "max_steps": 4,
        "save_steps": 1,
        "logging_steps": 1,
    }
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert runs.run(whole, **flags).code == 0
    progress.unlink()
    run = runs.start(killed, **flags)
    # in the third round, of 8 episodes
    until(lambda: progress.exists() and progress.stat().st_size >= 2 * 8 + 3, 200)
    below = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(signal.SIGKILL)
    assert run.wait(60) == -signal.SIGKILL
    until(
        lambda: (
            not [one for one in below if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        ),
        60,
    )
    assert runs.run(killed, resume_from_checkpoint="last", **flags).code == 0

    def learned(folder: Path) -> list[list[Any]]:
        kept = (
            "step",
            "prompt_id",
            "number",
            "completion",
            "messages",
            "reward",
            "advantage",
            "turns",
            "tokens",
        )
        return [
            [json.loads(line)[key] for key in kept]
            for line in (folder / "completions.jsonl").open()
        ]

    assert learned(killed) == learned(whole)
    weights = [
        (folder / "checkpoint-4" / "model.safetensors").read_bytes() for folder in (killed, whole)
    ]
    assert weights[0] == weights[1]
