"""`swift rlhf --agent` and `--agent_command` as a user runs them, with both engines."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyarrow.parquet import read_table

from tests.conftest import REPO, until
from tests.e2e.live_run import train_to_the_end, what_was_learned, words_of

PLUGIN = REPO / "tests" / "rollout" / "agents" / "agents_plugin.py"
LOGP_NOISE = 2e-3


def write_rows(path: Path, count: int = 40, **more: Any) -> Path:
    rows = [{"query": f"count from {number}", "start": number} | more for number in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def train(rlhf: Callable[..., Any], tiny_model: Path, tmp_path: Path) -> Callable[..., Any]:
    def run(more: dict[str, Any] | None = None, processes: int = 1, **flags: Any) -> Any:
        data = write_rows(tmp_path / "rows.jsonl", **(more or {}))
        own = {
            "external_plugins": PLUGIN,
            "dataset": data,
            "reward_funcs": "seen",
            "max_completion_length": 8,
        }
        return rlhf(tiny_model, processes, **own | flags)

    return run


def test_embedded(train: Callable[..., Any]) -> None:
    more = {
        "eval_steps": 2,
        "eval_limit": 2,
        "split_dataset_ratio": 0.1,
        "advantage_per": "turn",
        "log_tokens": "all",
    }
    run = train(agent="counts", max_steps=2, learning_rate=1e-2, **more)
    assert run.code == 0
    rows = run.lines("completions.jsonl")
    assert len(rows) == 16 and all(row["turns"] == 2 and "sequences" not in row for row in rows)
    for row in rows:
        assert [one["role"] for one in row["messages"]] == [
            "user",
            "assistant",
            "user",
            "assistant",
        ]
        assert row["messages"][2]["content"] == "more" and row["tool_calls"] == []
        assert row["reward"] == pytest.approx(row["rewards/agent_reward"] + 0.02)
        assert [one["kind"] for one in row["calls"]] == ["new", "extends"]
        assert [one["place"] for one in row["calls"]] == [1, 3]
        assert sum(row["turn_rewards"]) == pytest.approx(row["rewards/agent_reward"])
        sizes = [one["tokens"] for one in row["calls"]]
        weighted = [a * size for a, size in zip(row["turn_advantages"], sizes, strict=True)]
        assert row["advantage"] == pytest.approx(sum(weighted) / sum(sizes), abs=1e-5)
    assert any(one["turn_advantages"][0] != one["turn_advantages"][1] for one in rows)
    times = run.lines("episode_times.jsonl")
    assert [one["request_id"] for one in times] == [row["request_id"] for row in rows]
    assert all(len(one["calls"]) == 2 and one["own"] > 0 for one in times)
    for line in run.steps:
        assert (
            line["rollout/logp_diff"] < LOGP_NOISE
            and line["agent/failed"] == 0
            and line["agent/calls/new"] == 8
        )
        assert line["multi_turn/mean_turns"] == 2 and 0 < line["multi_turn/trained_tokens"] < 1
        recorded = read_table(run.folder / "tokens" / f"step-{line['step']:06}.parquet").to_pylist()
        for one in recorded:
            assert [value != 0 for value in one["rollout_logps"]] == one["written"]
            assert all(
                written or not value
                for written, value in zip(one["written"], one["advantages"], strict=True)
            )
        per_turn = [{value for value in one["advantages"] if value} for one in recorded]
        assert max(map(len, per_turn)) == 2
    assert all(row["turns"] == 2 for row in run.lines("eval_completions.jsonl"))


@pytest.mark.long
def test_two_ranks_with_episodes_of_several_sequences(train: Callable[..., Any]) -> None:
    parallel = {
        "deepspeed": "zero3",
        "per_device_train_batch_size": 4,
        "kl_in_reward": "true",
        "beta": 0.1,
    }
    run = train(
        agent="branches", max_steps=1, processes=2, log_entropy="true", log_tokens="all", **parallel
    )
    assert run.code == 0
    rows, [line] = run.lines("completions.jsonl"), run.steps
    assert len(rows) == 8 and all(
        row["sequences"] == row["turns"] == 3 and row["entropy"] > 0 for row in rows
    )
    assert (
        line["rollout/logp_diff"] < LOGP_NOISE
        and line["agent/sequences"] == 3
        and line["kl_penalty"] == 0
    )
    for row in rows:
        assert {one[0]["content"] for one in row["other_messages"]} == {"left", "right"}
        assert row["messages"][0]["content"] == "both"
    recorded = read_table(run.folder / "tokens" / "step-000001.parquet").to_pylist()
    assert (
        Counter((one["request_id"], one["number"], one["sequence"]) for one in recorded).total()
        == 24
    )
    advantages = {(row["request_id"], row["number"]): row["advantage"] for row in rows}
    for one in recorded:
        wanted = advantages[one["request_id"], one["number"]]
        assert all(value == pytest.approx(wanted) for value in one["advantages"])


@pytest.mark.long
def test_a_round_of_failed_episodes_ends_the_run(train: Callable[..., Any]) -> None:
    command = f"""{sys.executable} -c 'import json, sys; json.loads(sys.stdin.readline()); sys.exit("no shop")'"""
    run = train(agent_command=command, max_steps=1, reward_funcs=[])
    assert run.code == 5
    assert (
        "all 8 episodes of the round failed, the first one: exit: exit code 1 (no shop)"
        in run.errors
    )


@pytest.mark.long
def test_failed_episodes_are_counted_and_have_no_part(train: Callable[..., Any]) -> None:
    """Nor do they count as invalid rewards, of which there may be none."""
    run = train(
        {"how": "mixed"},
        agent="misbehaves",
        max_steps=2,
        reward_funcs="digits",
        max_invalid_reward_ratio=0,
    )
    assert run.code == 0
    for row in run.lines("completions.jsonl"):
        kind = ["exception", "silent", None, None][row["number"]]
        if kind is None:
            assert (
                row["reward"] == pytest.approx(row["rewards/digits"] + 0.5) and "failure" not in row
            )
        else:
            assert row["failure"].startswith(f"{kind}:") and row["rewards/digits"] is None
            assert row["reward"] is None and row["advantage"] is None
            assert row.get("sequences", 1) == (kind == "exception")
    for line in run.steps:
        assert line["agent/failed"] == 4 and line["agent/exception"] == line["agent/silent"] == 2
        assert line["rewards/digits/invalid"] == 0
    assert (
        "2 of 8 episodes have no reward: exception: ConnectionError: the shop is closed"
        in run.errors
    )


KILLED = [pytest.param(4, 4), pytest.param(50, 4, marks=pytest.mark.long)]


@pytest.mark.parametrize(("prompts", "group"), KILLED)
def test_a_killed_server_loses_no_episode(
    tiny_model: Path, tiny_server: Any, tmp_path: Path, prompts: int, group: int
) -> None:
    """In the middle of a round. Seeds are an episode's own, and nothing of it is on a server."""

    def play(name: str) -> Path:
        progress, data = tmp_path / f"{name}.progress", tmp_path / f"data of {name}" / "rows.jsonl"
        data.parent.mkdir()
        # prompts, and so seeds, are named after the file
        write_rows(data, prompts, progress=str(progress))
        flags = {
            "external_plugins": PLUGIN,
            "dataset": data,
            "agent": "counts",
            "reward_funcs": "seen",
            "num_generations": group,
            "per_device_train_batch_size": prompts * group,
            "max_steps": 2,
            "max_completion_length": 8,
            "use_vllm": "true",
            "vllm_server_base_url": tiny_server.url,
            "learning_rate": 1e-3,
        }

        def kill() -> None:
            # Of the second round, half of the calls are answered.
            until(lambda: progress.exists() and progress.stat().st_size >= prompts * group * 3, 200)
            tiny_server.kill()
            tiny_server.start()

        killer = threading.Thread(target=kill)
        if name == "killed":
            killer.start()
        said = train_to_the_end(words_of(tiny_model, tmp_path / name, **flags), within_s=280)
        if name == "killed":
            killer.join()
            assert "was started again" in said
        return tmp_path / name

    folder = play("killed")
    rows = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    places = Counter((*row["request_id"].split("/")[1:], row["number"]) for row in rows)
    assert places == {
        (str(n), str(p), i): 1 for n in range(2) for p in range(prompts) for i in range(group)
    }
    assert all(row["turns"] == 2 and "failure" not in row for row in rows)
    steps = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
    assert max(line["rollout/logp_diff"] for line in steps if "loss" in line) < LOGP_NOISE
    if prompts > 4:
        assert what_was_learned(folder) == what_was_learned(play("calm"))


@pytest.mark.long
def test_ahead_of_the_trainer(train: Callable[..., Any], tiny_server: Any) -> None:
    server = {"use_vllm": "true", "vllm_server_base_url": tiny_server.url, "async_generate": "true"}
    run = train(agent="counts", max_steps=4, max_staleness=2, reward_funcs="slow", **server)
    assert run.code == 0
    rows, steps = run.lines("completions.jsonl"), run.steps
    assert len(rows) == 32 and len({row["request_id"] for row in rows}) == 8
    ages = [line["rollout/staleness/max"] for line in steps]
    assert max(ages) <= 2 and max(ages) > 0
    first = min(row["weight_version"] for row in rows)
    for row in rows:  # versions are counted from the first push
        assert row["weight_version"] - first >= row["step"] - 1 - 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ({"agent": "count"}, "--agent: there is no agent count: did you mean"),
        (
            {"agent_command": "no-such-program x"},
            "--agent_command: there is no program no-such-program that can be run",
        ),
        (
            {"agent_command": PLUGIN},
            "agents_plugin.py is not executable: chmod +x, or name what runs it",
        ),
        ({"agent_command": "python 'x"}, "--agent_command No closing quotation"),
        (
            {"agent": "counts", "agent_command": "true"},
            "give either --agent_command or --agent, not both",
        ),
        (
            {"agent": "counts", "multi_turn_scheduler": "math_tip_trick"},
            "--multi_turn_scheduler does not go with --agent",
        ),
        ({"agent": "counts", "num_generations": 1}, "--num_generations 1 makes every advantage 0"),
        (
            {"agent_timeout": 3},
            "--agent_timeout has no effect without --agent, --agent_command or --env",
        ),
    ],
)
def test_what_cannot_work_is_said_at_the_start(
    train: Callable[..., Any], flags: dict[str, Any], fault: str
) -> None:
    run = train(max_steps=1, **flags)
    assert run.code == 2 and fault in run.errors


@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [
        {"completion_length_limit_scope": "total", "max_turns": 1},
        {
            "agent": "branches",
            "use_vllm": "true",
            "deepspeed": "zero3",
            "per_device_train_batch_size": 4,
        },
        {
            "agent": "branches",
            "share_prompt": "true",
            "num_iterations": 2,
            "steps_per_generation": 2,
            "save_steps": 1,
        },
    ],
    ids=["limits", "vllm-two-ranks", "several-updates"],
)
def test_other_ways_to_run_agents(
    train: Callable[..., Any],
    rollout_server: Callable[..., str],
    tiny_model: Path,
    flags: dict[str, Any],
) -> None:
    if "use_vllm" in flags:
        flags = flags | {"vllm_server_base_url": rollout_server(tiny_model, torch_dtype="float32")}
    run = train(
        max_steps=3, processes=2 if "deepspeed" in flags else 1, **{"agent": "counts"} | flags
    )
    assert run.code == 0 and len(run.steps) == 3
    assert all(line["rollout/logp_diff"] < LOGP_NOISE for line in run.steps)
    assert all(line["agent/failed"] == 0 for line in run.steps)
    rows = run.lines("completions.jsonl")
    if "max_turns" in flags:
        assert all(row["turns"] == 1 and row["finish_reason"] == "length" for row in rows)
        assert all(row["rewards/agent_reward"] == 0 for row in rows)
