"""What agents may say in the end: nothing of it ends a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swift_r1.record.lines import read_rows
from swift_r1.record.metrics import JsonLines, read_json_lines
from swift_r1.rollout.scoring import agent_metrics, completion_row
from tests.rollout.agents.conftest import Stage

SAYS = """
import json, os, sys, urllib.request
row = json.loads(sys.stdin.readline())
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
body = json.dumps({"model": "any", "messages": row["messages"]}).encode()
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)).read()
sys.stdout.buffer.write(row["start"].encode() * row["times"] + row["end"].encode() + bytes(row["raw"]))
"""
NO_NUMBER = "result: the reward is '1000"


def says(end: str, start: str = "", times: int = 0, raw: tuple[int, ...] = ()) -> dict[str, Any]:
    return {"start": start, "times": times, "end": end, "raw": list(raw)}


def test_the_last_line_of_a_command_may_be_anything(stages: Callable[..., Stage]) -> None:
    rows = {
        "nested too deep": says("", "[", 100_000),
        "an object nested too deep": says("", '{"a":', 100_000),
        "bytes": says("", raw=(0xFF, 0x00, 0xFE)),
        "longer than what is kept": says("1", "a", 3 << 20),
        "too great for a float": says("1" + "0" * 400),
        "a reward too great for a float": says('{"reward": 1' + "0" * 400 + "}"),
        "turns too great for a float": says('{"turn_rewards": [1' + "0" * 400 + "]}"),
    }
    found = [
        one for [one] in stages(command=[sys.executable, "-c", SAYS]).play(list(rows.values()), n=1)
    ]
    assert [one.failure for one in found[:4]] == [None] * 4
    assert all((one.infos or {})["reward"] is None for one in found[:4])
    assert [(one.failure or "")[: len(NO_NUMBER)] for one in found[4:6]] == [NO_NUMBER] * 2
    assert found[6].failure == "result: turn_rewards is not a list of finite numbers"


@pytest.mark.parametrize("sign", ["\u2028", "\u2029", "\x85", "\x1c", "\x0b"])
def test_lines_end_with_newlines_alone(
    stages: Callable[..., Stage], tmp_path: Path, sign: str
) -> None:
    """JSON may have what Python takes for the end of a line, in what a command says and in our own files."""
    row = {"reward": 0.5, "note": f"a{sign}b"}
    end = "\nfirst\n" + json.dumps(row, ensure_ascii=sign < " ") + "\n"
    [[found]] = stages(command=[sys.executable, "-c", SAYS]).play([says(end)], n=1)
    assert (found.failure, (found.infos or {})["reward"]) == (None, 0.5)
    with JsonLines(tmp_path / "rows.jsonl") as file:
        file.write(row)
    assert read_json_lines(tmp_path / "rows.jsonl") == [row]
    assert read_rows(tmp_path / "rows.jsonl") == ([row], [])


def test_what_else_a_command_returns_is_recorded_as_far_as_a_line_can_say_it(
    stages: Callable[..., Stage], tmp_path: Path
) -> None:
    said = {
        "reward": 1,
        "why": "no\ud800",
        "\ud800": 2,
        "great": 10**400,
        "parts": [1],
        "won": True,
    }
    [[one]] = stages(command=[sys.executable, "-c", SAYS]).play(
        [says(json.dumps(said | {"long": "a" * 2000}))], n=1
    )
    with JsonLines(tmp_path / "completions.jsonl") as lines:
        lines.write(completion_row(one, 1))
    [row] = read_json_lines(lines.path)
    kept = {"why": "no?", "?": 2.0, "great": None, "won": 1.0, "long": "a" * 1000}
    assert row["returned"] == kept
    with JsonLines(tmp_path / "logging.jsonl") as lines:
        lines.write(agent_metrics([one]))
    [metrics] = read_json_lines(lines.path)
    assert metrics["agent/returned/?"] == 2 and metrics["agent/returned/great"] is None


def test_a_class_may_return_more_than_is_kept(stages: Callable[..., Stage]) -> None:
    """The process that all episodes are forked from lives on."""
    stage = stages("misbehaves")
    parent = stage.processes.pid
    [[one], [other], [bad]] = stage.play(
        [{"how": "says much"}, {}, {"how": "raises half a character"}], n=1
    )
    assert (
        one.failure == "exception: what run returned is longer than 16 MiB"
        and other.failure is None
    )
    assert stage.processes.pid == parent
    # it can be written to a file
    assert bad.failure is not None and b"ValueError: ?" in bad.failure.encode()


@pytest.mark.parametrize("how", ["class", "command"])
def test_an_episode_whose_first_call_is_too_long_is_no_cut_off_one(
    stages: Callable[..., Stage], how: str
) -> None:
    """There is nothing of the policy to train, so it has no reward of 0 either."""
    stage = stages("misbehaves") if how == "class" else stages(command=[sys.executable, "-c", SAYS])
    messages = [{"role": "user", "content": "x y " * 2000}]
    [[one]] = stage.play([{"messages": messages}], n=1)
    assert one.failure is not None and one.failure.startswith(
        "exception" if how == "class" else "exit"
    )
    assert one.sequences == [] and json.dumps(one.infos)


def test_an_episode_that_nothing_judges_has_failed(stages: Callable[..., Stage]) -> None:
    """Without a reward function beside the agent's own, an episode without a reward is no episode."""
    rows = [
        says("reward: 0.5\n"),
        says("0.5\nDone.\n"),
        says('{"score": 1}\n'),
        says(""),
        says("0.5\n"),
    ]
    command = stages(command=[sys.executable, "-c", SAYS])
    failures = [one.failure for [one] in command.play(rows, n=1, needs_reward=True)]
    said = ["'reward: 0.5'", "'Done.'", "'{\"score\": 1}'", "''"]
    why = "which is not a number and no JSON object with a reward, and no other reward function judges"
    assert failures == [*(f"result: its last line is {one}, {why}" for one in said), None]
    [[one]] = stages("misbehaves").play([{"how": "returns nothing"}], n=1, needs_reward=True)
    assert one.failure == f"result: it returned 'null', {why}"
    [[one]] = stages("misbehaves").play([{"how": "returns nothing"}], n=1)
    assert one.failure is None  # another function judges
