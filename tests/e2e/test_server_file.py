"""`swift rlhf --vllm_server_file`: servers join, leave, die and return while it trains, and it learns the same."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.live_run import check_every_prompt_once, never, train_to_the_end, words_of

UNLIKE = ("request_id", "weight_version")
"""Of a completion: the run's name, and the number of the weights, of which a server that returns needs a higher one."""


def written(folder: Path, name: str = "completions.jsonl") -> list[dict[str, Any]]:
    """All that the file says, to the last bit, but for `UNLIKE`."""
    rows = map(json.loads, (folder / name).read_text().splitlines())
    return [{key: value for key, value in row.items() if key not in UNLIKE} for row in rows]


class Listed:
    """A server file, replaced as a whole at each change."""

    def __init__(self, path: Path, urls: Sequence[str]) -> None:
        self.path = path
        self.write(urls)

    def write(self, urls: Sequence[str]) -> None:
        new = self.path.with_suffix(".new")
        new.write_text("".join(f"{url}\n" for url in urls))
        new.replace(self.path)


def train(
    model: Path, folder: Path, steps: int, at_step: Callable[[int], None], **more: Any
) -> str:
    flags = {
        "max_steps": steps,
        "use_vllm": "true",
        "vllm_server_timeout": 100,
        "learning_rate": 1e-3,
    }
    said = train_to_the_end(
        words_of(model, folder, **flags | {"save_steps": steps} | more), at_step
    )
    if more.get("rlhf_type") != "ppo":
        check_every_prompt_once(folder, steps)
    return said


def kinds_of(folder: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines()]


EVALUATED = {"eval_steps": 10, "eval_limit": 2, "num_generations_eval": 1, "weight_check_steps": 3}


PPO = {
    "rlhf_type": "ppo",
    "num_generations": 1,
    "num_mini_batches": 2,
    "critic_learning_rate": 3e-3,
}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "more",
    [
        EVALUATED,
        {"weight_transport": "http", "weight_delta": "true"},
        {"weight_transport": "shm"},
        {"async_generate": "true", "max_staleness": 0},
        PPO,
        {"train_type": "lora", "lora_rank": 4},
        {"async_generate": "true", "max_staleness": 2},
    ],
    ids=["grpo", "delta", "shm", "async 0", "ppo", "lora", "async 2"],
)
def test_servers_join_leave_die_and_return_at_random(
    tiny_model: Path,
    tiny_server: Any,
    second_tiny_server: Any,
    tmp_path: Path,
    more: dict[str, Any],
) -> None:
    steps, draw, both = 120, random.Random(5), [tiny_server, second_tiny_server]
    if not (ahead := more.get("max_staleness") == 2):
        train(
            tiny_model,
            tmp_path / "calm",
            steps,
            never,
            vllm_server_base_url=tiny_server.url,
            **more,
        )
    listed = Listed(tmp_path / "servers.txt", [tiny_server.url])
    due, done = [2], list[str]()

    def disturb(step: int) -> None:
        if step < due[0] or step > steps - 5:
            return
        due[0] = step + draw.randrange(4, 9)
        time.sleep(0.2 * draw.random())
        if draw.random() < 0.3:
            done.append("killed")
            server = draw.choice(both)
            server.kill()
            server.start()
        else:
            done.append("listed")
            listed.write(
                [one.url for one in draw.choice([both, both[:1], both[1:], both[:1], both[1:], []])]
            )
            if not listed.path.read_text():
                time.sleep(1.2)
                listed.write([draw.choice(both).url])

    run = tmp_path / "run"
    train(tiny_model, run, steps, disturb, vllm_server_file=listed.path, **more)
    kinds = kinds_of(run)
    assert done.count("killed") >= 3 and kinds.count("server_joined") >= 3 <= kinds.count(
        "server_left"
    )
    assert ahead or written(run) == written(tmp_path / "calm")
