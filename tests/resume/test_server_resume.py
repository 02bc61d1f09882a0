"""Resuming beside a rollout server: the same prompts in the same order, none lost and none twice."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

SETTINGS = {
    "max_steps": 8,
    "steps_per_generation": 2,
    "save_steps": 3,
    "logging_steps": 1,
    "deterministic": "false",
    "use_vllm": "true",
}


def prompts(folder: Path) -> list[tuple[int, str, int]]:
    rows = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    assert len({row["request_id"] for row in rows}) * 4 == len(rows)
    return [(row["step"], row["prompt_id"], row["group"]) for row in rows]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_killed_run_asks_the_server_for_what_is_left(runs, launch_server, tiny_model, tmp_path):
    settings = SETTINGS | {"vllm_server_base_url": launch_server(tiny_model).url}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert runs.run(whole, **settings).code == 0
    (tmp_path / "signals.json").write_text(
        json.dumps({"step": 4, "signal": signal.SIGKILL, "times": 1})
    )
    ended = runs.wait(runs.start(resumed, **settings), resumed)
    assert ended.code == -signal.SIGKILL
    assert runs.run(resumed, resume_from_checkpoint="last", **settings).code == 0
    assert prompts(resumed) == prompts(whole)
    lines = [json.loads(line) for line in (resumed / "logging.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    # Its weights are the trainer's after every push, those of the resumed run too.
    assert all(line["rollout/logp_diff"] < 0.05 for line in lines)
