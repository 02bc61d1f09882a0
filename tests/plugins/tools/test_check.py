"""`swift check` of tools: what the model would see of each, what a call gives, and which ones are refused."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

from swift_r1.launch.checks.run import CheckReport, show
from swift_r1.launch.checks.tools import ToolReport
from swift_r1.runtime.terminal import Terminal
from tests import forks
from tests.plugins.tools import mcp_program
from tests.plugins.tools.test_pool import PLUGIN


def check(*words: str) -> tuple[int, str]:
    done = forks.run(["-m", "swift_r1", "check", "--external_plugins", *words], timeout=200)
    print(done.stderr)
    return done.returncode, done.stdout


def test_each_tool_is_shown_and_called_once() -> None:
    code, said = check(
        str(PLUGIN), "--tools", "add", "echo", "fails", "--reward_funcs", "format", "--json"
    )
    found = json.loads(said)
    assert code == 0, said
    add, echo, fails = found["tools"]
    assert (
        add["function"]["parameters"]["required"] == ["a", "b"] and add["function"]["name"] == "add"
    )
    assert (add["arguments"], add["content"]) == ('{"a": 1.0, "b": 1.0}', "2.0")
    assert (echo["arguments"], echo["content"]) == ('{"text": "text"}', "text")
    assert fails["outcome"] == "error" and fails["content"].startswith(
        "Error: ConnectionError: the search engine"
    )
    out = io.StringIO()
    show(CheckReport(tools=[ToolReport(**add)]), Terminal(file=out, width=400))
    assert (
        'add({"a": 1.0, "b": 1.0}) -> 2.0' in out.getvalue()
        and '"description": "Adds two numbers."' in out.getvalue()
    )


def test_tools_of_servers_are_shown_and_not_called(tmp_path: Path) -> None:
    program = {"command": sys.executable, "args": [mcp_program.__file__], "tools": ["dies"]}
    file = tmp_path / "servers.json"
    file.write_text(json.dumps({"mcpServers": {"one": program}}))
    words = ["--mcp_servers", str(file), "--reward_funcs", "format"]
    code, said = check(str(PLUGIN), *words, "--json")
    found = json.loads(said)["tools"]
    assert code == 0 and found[-1]["function"]["description"] == "The tool dies."
    assert (found[-1]["name"], found[-1]["outcome"]) == ("dies", "not called")
    file.write_text(json.dumps({"mcpServers": {"one": program | {"tools": ["add"]}}}))
    code, said = check(str(PLUGIN), *words)
    assert code != 0 and "MCP server one has no tool add; it has count, dies" in said


def test_a_model_whose_calls_nothing_reads_is_refused(tiny_model: Path) -> None:
    code, said = check(str(PLUGIN), "--tools", "add", "--model", str(tiny_model))
    assert code != 0 and "the chat template has no place for these" in said
