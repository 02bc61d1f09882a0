"""`swift check --agent` and `--agent_command`: an episode is played, and shown as a run would take it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forks
from tests.rollout.agents.conftest import PLUGIN
from tests.rollout.agents.test_results import SAYS, says


def check(tmp_path: Path, row: dict[str, Any], *words: str) -> tuple[int, dict[str, Any]]:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"query": "say 7"} | row) + "\n")
    done = forks.run(
        ["-m", "swift_r1", "check", "--dataset", str(rows), *words, "--json"], timeout=200
    )
    print(done.stdout, done.stderr)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.long
def test_an_episode_of_a_class(tmp_path: Path) -> None:
    flags = ("--external_plugins", str(PLUGIN), "--gold", "77a")
    code, found = check(tmp_path, {}, "--agent", "counts", *flags)
    played = found["agent"]
    assert code == 0 and found["ok"] and played["failure"] is None
    assert (
        played["result"]["reward"] == pytest.approx(4 / 3)
        and len(played["result"]["turn_rewards"]) == 2
    )
    assert (played["calls"], played["rows"], played["kinds"]) == (2, 1, {"new": 1, "extends": 1})
    assert [one["content"] for one in played["messages"]] == ["say 7", "77a", "more", "77a"]
    code, found = check(tmp_path, {"how": "crashes"}, "--agent", "misbehaves", *flags)
    assert code == 2 and "exception: ConnectionError: the shop is closed" in found["faults"][0]


def test_an_episode_of_a_command(tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(SAYS)
    command = ("--agent_command", f"{sys.executable} {program}")
    code, found = check(tmp_path, says("reward: 0.5\n"), *command)
    assert code == 2 and found["agent"]["calls"] == 1
    assert found["faults"][0].startswith(
        "--agent_command: its episode has failed: result: its last line is 'reward: 0.5'"
    )
    code, found = check(tmp_path, says("0.5\n"), *command)
    assert code == 0 and found["agent"]["result"] == {"reward": 0.5} and found["agent"]["rows"] == 1


SPEAKS = """
import os

import anthropic

from swift_r1 import Agent, agents

ADD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


class Speaks(Agent):
    async def run(self, client, row):
        tools = [{"type": "function", "name": "add", "parameters": ADD}]
        asked = {"model": "any", "tools": tools, **row["more"]}
        said = [{"role": "user", "content": row["query"]}]
        answer = await client.responses.create(input=said, **asked)
        while answer.output[0].type == "function_call":
            result = {"type": "function_call_output", "call_id": answer.output[0].call_id, "output": "3"}
            said += [*answer.output, result]
            answer = await client.responses.create(input=said, **asked)
        claude = anthropic.AsyncAnthropic(
            base_url=str(client.base_url).removesuffix("/v1/"), api_key=client.api_key
        )
        asked = {"model": "any", "max_tokens": 9, "messages": [{"role": "user", "content": "b"}]}
        async with claude.messages.stream(**asked) as stream:
            said = [text async for text in stream.text_stream]
        return float(said == [answer.output_text] == ["7"])


agents["speaks"] = Speaks
"""


def test_it_speaks_what_a_run_speaks_and_refuses_what_a_run_refuses(tmp_path: Path) -> None:
    pytest.importorskip("anthropic")
    plugin = tmp_path / "speaks.py"
    plugin.write_text(SPEAKS)
    flags = ("--agent", "speaks", "--external_plugins", str(plugin), "--gold", "7")
    code, found = check(tmp_path, {"more": {}}, *flags)
    played = found["agent"]
    assert code == 0 and played["result"]["reward"] == 1
    assert (played["rows"], played["kinds"]) == (2, {"new": 2, "extends": 5})
    code, found = check(tmp_path, {"more": {"truncation": "auto"}}, *flags)
    assert code == 2 and "exception: BadRequestError: " in found["faults"][0]
    assert "truncation: Input should be 'disabled'" in found["faults"][0]
