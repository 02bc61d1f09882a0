"""`swift rlhf --vllm_server_file`: servers join, leave, die and return while it trains, and it learns the same."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.e2e.live_run import check_every_prompt_once, never, rows_of, steps_of, train_to_the_end, words_of

UNLIKE = ("request_id", "weight_version")
"""Of a completion: the run's name, and the number of the weights, of which a server that returns needs a higher one."""


def written(folder: Path) -> list[dict[str, Any]]:
    """All that `completions.jsonl` says, to the last bit, but for `UNLIKE`."""
    return [{key: value for key, value in row.items() if key not in UNLIKE} for row in rows_of(folder)]


class Listed:
    """A server file, replaced as a whole at each change."""

    def __init__(self, path: Path, urls: Sequence[str]) -> None:
        self.path = path
        self.write(urls)

    def write(self, urls: Sequence[str]) -> None:
        new = self.path.with_suffix(".new")
        new.write_text("".join(f"{url}\n" for url in urls))
        new.replace(self.path)


def train(model: Path, folder: Path, steps: int, at_step: Callable[[int], None], **more: Any) -> str:
    flags = {"max_steps": steps, "use_vllm": "true", "vllm_server_timeout": 100, "learning_rate": 1e-3}
    said = train_to_the_end(words_of(model, folder, **flags | {"save_steps": steps} | more), at_step)
    check_every_prompt_once(folder, steps)
    return said


def kinds_of(folder: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines()]


def test_a_server_joins_does_all_and_the_first_returns(
    tiny_model: Path, tiny_server: Any, second_tiny_server: Any, tmp_path: Path
) -> None:
    one, other = tiny_server.url, second_tiny_server.url
    train(tiny_model, tmp_path / "calm", 40, never, vllm_server_base_url=one)
    listed = Listed(tmp_path / "servers.txt", [one])
    story = {3: [one, other], 12: [other], 22: [], 24: [one]}

    def change(step: int) -> None:
        if step in story:
            listed.write(story[step])
        if step < 38:
            time.sleep(0.15)  # so that the run is long enough for the looks at the file

    run = tmp_path / "run"
    said = train(tiny_model, run, 40, change, vllm_server_file=listed.path)
    assert written(run) == written(tmp_path / "calm")
    kinds = [kind for kind in kinds_of(run) if kind.startswith("server")]
    assert kinds == ["server_joined", "server_left", "server_left", "server_joined"]
    servers = [step["rollout/servers"] for step in steps_of(run)]
    assert servers[0] == 1 and max(servers) == 2 and servers[-1] == 1
    assert f"the rollout server at {one} joins with weight version" in said
