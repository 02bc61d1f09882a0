"""`swift rlhf --env` as a user runs it: whole runs of each kind, with the kind's package where it is installed."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.e2e.conftest import rlhf  # noqa: F401  the fixture
from tests.plugins.environments.conftest import FILES
from tests.plugins.harbor.suites import write_task
from tests.tool_templates import HERMES


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny one, with a template that renders tools."""
    folder = tmp_path_factory.mktemp("models") / "tools"
    shutil.copytree(tiny_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = HERMES
    tokenizer.save_pretrained(folder)
    return folder


KINDS = {
    "trl": (f"trl:{FILES / 'counter_script.py'}", {"argv": ["--most", 4]}, "CounterEnv", "wanted"),
    "gymnasium": ("gymnasium:Blackjack-v1", {}, "invalid_actions", "seed"),
    "harbor": ("harbor:suite", {"reply": "command", "eval": "suite"}, "commands", "task"),
    "verifiers": ("verifiers:reversing", {"how": "several"}, "exact", "answer"),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_run(
    rlhf: Callable[..., Any],  # noqa: F811
    model: Path,
    kind: str,
    tmp_path: Path,
) -> None:
    if kind not in ("trl", "harbor") and importlib.util.find_spec(kind) is None:
        pytest.skip(f"needs the extra {kind}")
    spec, args, part, column = KINDS[kind]
    shutil.copy(FILES / "reversing.py", tmp_path)  # the run's current folder
    write_task(tmp_path / "suite" / "one")
    own = {"external_plugins": [], "reward_funcs": [], "dataset": [], "env": spec, "env_args": args}
    run = rlhf(model, **own, max_steps=1, max_turns=3, max_completion_length=8)
    assert run.code == 0
    rows = run.lines("completions.jsonl")
    assert len(rows) == 8 and all(column in row["env_row"] for row in rows)
    assert all(
        row["prompt_id"].startswith("env:") and "rewards/agent_reward" in row for row in rows
    )
    for line in run.steps:
        assert line["agent/failed"] == 0 and f"agent/returned/{part}" in line
        assert line["rollout/logp_diff"] < 2e-3 and line["rewards/agent_reward/invalid"] == 0
