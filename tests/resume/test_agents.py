"""Runs of agents that are killed: they go on with the same episodes, and leave no process behind."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import REPO, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

PLUGIN = REPO / "tests" / "rollout" / "agents" / "agents_plugin.py"
KEPT = (
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


def learned(folder: Path) -> list[list[Any]]:
    rows = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    return [[row[key] for key in KEPT] for row in rows]


def weights(folder: Path) -> bytes:
    return (folder / "checkpoint-4" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("served", [False, True])
def test_a_killed_run_goes_on_with_the_same_episodes(
    runs: Any, tiny_server: Any, tmp_path: Path, served: bool
) -> None:
    progress = tmp_path / "progress"
    data = tmp_path / "rows.jsonl"
    rows = [{"query": f"count from {number}", "progress": str(progress)} for number in range(40)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        "external_plugins": PLUGIN,
        "dataset": data,
        "agent": "counts",
        "reward_funcs": "seen",
        "reward_isolation": "process",
        "max_steps": 4,
        "save_steps": 1,
        "logging_steps": 1,
    }
    if served:
        flags |= {
            "use_vllm": "true",
            "vllm_server_base_url": tiny_server.url,
            "deterministic": "false",
        }
    whole, again, killed = (tmp_path / name for name in ("whole", "again", "killed"))
    for folder in (whole, again):
        assert runs.run(folder, **flags).code == 0
    assert learned(whole) == learned(again) and weights(whole) == weights(again)

    progress.unlink()
    run = runs.start(killed, **flags)
    # In the middle of the third round, of 8 episodes with 2 calls each.
    until(lambda: progress.exists() and progress.stat().st_size >= 2 * 16 + 5, 200)
    below = psutil.Process(run.pid).children(recursive=True)
    assert any("swift_r1.rollout.agents.parent" in " ".join(one.cmdline()) for one in below)
    run.send_signal(signal.SIGKILL)
    assert run.wait(60) == -signal.SIGKILL
    until(
        lambda: (
            not [one for one in below if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        ),
        60,
    )
    assert runs.run(killed, resume_from_checkpoint="last", **flags).code == 0
    assert learned(killed) == learned(whole) and weights(killed) == weights(whole)
