"""`swift rlhf --agent` and `--agent_command` as a user runs them, with both engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPO

PLUGIN = REPO / "tests" / "agents" / "agents_plugin.py"


@pytest.fixture
def train(rlhf: Callable[..., Any], tiny_model: Path, tmp_path: Path) -> Callable[..., Any]:
    def run(rows: list[dict[str, Any]] | None = None, **flags: Any) -> Any:
        path = tmp_path / "rows.jsonl"
        rows = rows or [{"start": number} for number in range(40)]
        path.write_text("".join(json.dumps({"query": f"count from {i}"} | row) + "\n" for i, row in enumerate(rows)))
        own = {"external_plugins": PLUGIN, "dataset": path, "reward_funcs": "seen", "max_completion_length": 8}
        return rlhf(tiny_model, **own | flags)

    return run


def test_embedded(train: Callable[..., Any]) -> None:
    run = train(agent="counts", max_steps=2, learning_rate=1e-2, eval_steps=2, eval_limit=2, split_dataset_ratio=0.1)
    assert run.code == 0
    rows = run.lines("completions.jsonl")
    assert len(rows) == 16 and all(row["turns"] == 2 and "sequences" not in row for row in rows)
    for row in rows:
        assert [one["role"] for one in row["messages"]] == ["user", "assistant", "user", "assistant"]
        assert row["messages"][2]["content"] == "more" and row["tool_calls"] == []
        assert row["reward"] == pytest.approx(row["rewards/agent_reward"] + 0.02)
    for line in run.steps:
        assert line["rollout/logp_diff"] < 2e-3 and line["agent/failed"] == 0 and line["agent/calls/new"] == 8
        assert line["multi_turn/mean_turns"] == 2 and 0 < line["multi_turn/trained_tokens"] < 1
    assert all(row["turns"] == 2 for row in run.lines("eval_completions.jsonl"))
