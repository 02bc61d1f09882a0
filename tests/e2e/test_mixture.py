"""`swift rlhf --mixture`: several tasks in one run, each with rows, rewards, turns and metrics of its own."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from swift_r1.record.glossary import unknown

HERE = Path(__file__).parent
PLUGINS = [HERE / f"{name}_plugin.py" for name in ("digits", "turns", "mixture")]
PLAIN = {"dataset": "counting#40", "reward_funcs": "digits"}


@pytest.fixture
def train(rlhf: Callable[..., Any], tiny_model: Path, tmp_path: Path) -> Callable[..., Any]:
    def run(tasks: Any, processes: int = 1, model: Path = tiny_model, **flags: Any) -> Any:
        file = tmp_path / "mixture.yaml"
        file.write_text(tasks if isinstance(tasks, str) else yaml.safe_dump(tasks, sort_keys=False))
        own = {"external_plugins": PLUGINS, "dataset": [], "reward_funcs": [], "mixture": file}
        return rlhf(model, processes, **own | {"max_steps": 2} | flags)

    return run


def groups_of(run: Any) -> dict[int, list[str]]:
    """Returns the task of each group that a round trained on, by the round's first step."""
    found: dict[int, dict[str, str]] = {}
    for row in run.lines("completions.jsonl"):
        if "dropped" not in row:
            found.setdefault(row["step"], {})[row["request_id"]] = row["task"]
    return {step: list(one.values()) for step, one in found.items()}


def test_a_task_whose_episodes_all_fail_ends_no_mixture(train: Callable[..., Any]) -> None:
    """The other task is trained; what failed has no advantage."""
    agent = {"dataset": "starts#10", "agent_command": f"{sys.executable} -c 'raise SystemExit(3)'"}
    run = train({"plain": PLAIN, "agent": agent}, per_device_train_batch_size=8)
    assert run.code == 0, run.errors
    for row in run.lines("completions.jsonl"):
        failed = row["task"] == "agent"
        assert ("failure" in row) is (row["reward"] is None) is (row["advantage"] is None) is failed
    assert all(0 < line["agent/failed"] == line["agent/exit"] for line in run.steps)


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.long), 2])
def test_all_kinds_side_by_side(train: Callable[..., Any], processes: int) -> None:
    """A plain task, a scheduler's, two kinds of environments and an agent: each as in a run of its own."""
    tasks = {
        "plain": PLAIN | {"system": "Say digits.", "max_completion_length": 5},
        "turns": {
            "dataset": "starts#30",
            "reward_funcs": "seen",
            "reward_weights": 0.5,
            "multi_turn_scheduler": "again",
            "max_turns": 4,
        },
        "gym": {"dataset": "starts#20", "gym_env": "count_digits", "max_turns": 3},
        "agent": {"dataset": "starts#10", "agent": "asks_twice", "split_dataset_ratio": 0.2},
    }
    run = train(
        {name: {"prompts": 1, "max_completion_length": 6} | own for name, own in tasks.items()},
        processes,
        per_device_train_batch_size=16 // processes,
        max_completion_length=[],
        eval_steps=2,
        eval_limit=2,
        learning_rate=1e-2,
    )
    assert run.code == 0
    rows = run.lines("completions.jsonl")
    assert [sorted(groups) for groups in groups_of(run).values()] == [sorted(tasks)] * 2
    for row in rows:
        task = row["task"]
        assert row["prompt_id"].startswith(f"{task}/")
        assert ("Say digits." in row["prompt"]) == (task == "plain")
        assert row.get("turns") == {"turns": 4, "gym": 2, "agent": 2}.get(task)
        rewards = {name for name in row if name.startswith("rewards/")}
        own = {"plain": "digits", "turns": "seen", "gym": "gym_reward", "agent": "agent_reward"}
        assert rewards == {f"rewards/{own[task]}"}
        weight = 0.5 if task == "turns" else 1.0
        assert row["reward"] == pytest.approx(weight * row[f"rewards/{own[task]}"])
        assert task != "plain" or row["tokens"] <= 5
    for line in run.steps:
        assert line["rollout/logp_diff"] < 2e-3 and line["agent/failed"] == 0
        assert line["multi_turn/mean_turns"] == pytest.approx((4 + 2 + 2) / 3)
        for task in tasks:
            mine = [row for row in rows if row["step"] == line["step"] and row["task"] == task]
            assert line[f"tasks/{task}/prompts"] == 1
            mean = sum(row["reward"] for row in mine) / 4
            assert line[f"tasks/{task}/reward"] == pytest.approx(mean)
            lengths = sum(row["tokens"] for row in mine) / 4
            assert line[f"tasks/{task}/completions/mean_length"] == lengths
        inner = {name.split("/", 2)[2] for name in line if name.startswith("tasks/")}
        assert not unknown(inner - {"prompts"})
    evaluated = Counter(row["task"] for row in run.lines("eval_completions.jsonl"))
    assert evaluated == dict.fromkeys(tasks, 8)
    last = json.loads((run.folder / "summary.json").read_text())["last_evaluation"]
    assert {f"eval/{task}/reward" for task in tasks} <= last.keys()


@pytest.mark.long
def test_quotas_hold_in_every_step_whatever_is_sampled_again(train: Callable[..., Any]) -> None:
    """Prompts without signal are replaced by prompts of their own task, in steps as in rounds."""
    tasks = {
        "many": PLAIN | {"prompts": 6},
        "few": PLAIN | {"prompts": 2, "max_completion_length": 3},
    }
    run = train(
        tasks,
        max_completion_length=[],
        max_steps=6,
        per_device_train_batch_size=16,
        steps_per_generation=2,
        dynamic_sample="true",
    )
    assert run.code == 0
    of_rounds = groups_of(run)
    assert list(of_rounds) == [1, 3, 5]
    for groups in of_rounds.values():
        assert Counter(groups[:4]) == Counter(groups[4:]) == {"many": 3, "few": 1}
    assert any("dropped" in row for row in run.lines("completions.jsonl"))


@pytest.mark.long
def test_rounds_ahead_of_the_trainer(train: Callable[..., Any], tiny_server: Any) -> None:
    """By a server, two rounds ahead, on two ranks, from rows that are read as they come: an agent beside a plain task,
    whose weights no round of two prompts has exactly."""
    tasks = {
        "plain": PLAIN | {"weight": 1.5},
        "agent": {"dataset": "starts#10", "agent": "asks_twice", "weight": 2.5},
    }
    run = train(
        tasks,
        processes=2,
        max_steps=4,
        per_device_train_batch_size=4,
        max_completion_length=6,
        use_vllm="true",
        vllm_server_base_url=tiny_server.url,
        async_generate="true",
        max_staleness=2,
        streaming="true",
    )
    assert run.code == 0
    rounds = [Counter(groups) for groups in groups_of(run).values()]
    assert sum(rounds, Counter()) == {"plain": 3, "agent": 5} and len(rounds) == 4
    assert max(line["rollout/staleness/max"] for line in run.steps) <= 2
