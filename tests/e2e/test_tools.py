"""A run whose model calls tools, through a server: the log, the completions, and the same again after a resume."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests import forks
from tests.conftest import REPO, ServerProcess, free_port, wait_until_serving
from tests.plugins.tools import mcp_program
from tests.tool_templates import HERMES

PLUGIN = REPO / "tests" / "plugins" / "tools" / "tools_plugin.py"
TOOLS = ["add", "echo", "fails"]
SERVERS = {"own": {"command": sys.executable, "args": [mcp_program.__file__], "tools": ["count"]}}


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny one, with a template that renders tools."""
    folder = tmp_path_factory.mktemp("models") / "tools"
    shutil.copytree(tiny_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = HERMES
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[str]:
    port, log = free_port(), tmp_path / "server.log"
    words = [
        "-m",
        "tests.plugins.tools.scripted_server",
        str(model),
        str(port),
        json.dumps({"max_model_len": 4096}),
    ]
    with log.open("ab") as out:
        process = forks.start(words, cwd=REPO, stdout=out, stderr=forks.STDOUT)
    wait_until_serving(ServerProcess(f"http://127.0.0.1:{port}", port, process, log))
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait(20)


@pytest.fixture
def train(rlhf: Callable[..., Any], model: Path, server: str, tmp_path: Path) -> Callable[..., Any]:
    rows = tmp_path / "sums.jsonl"
    sums = [
        {"query": f"What is {a} + {a + 1}?", "total": f"It is {2.0 * a + 1}"} for a in range(20)
    ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in sums))

    servers = tmp_path / "servers.json"
    servers.write_text(json.dumps({"mcpServers": SERVERS}))

    def run(**flags: Any) -> Any:
        own = {
            "external_plugins": PLUGIN,
            "dataset": rows,
            "reward_funcs": "right",
            "tools": TOOLS,
            "mcp_servers": servers,
            "max_tool_response_length": 20,
            "use_vllm": "true",
            "vllm_server_base_url": server,
            "max_completion_length": 200,
            "learning_rate": 1e-3,
        }
        return rlhf(model, **own | flags)

    return run


def test_a_run_with_tools(train: Callable[..., Any]) -> None:
    run = train(max_steps=2, eval_steps=2, split_dataset_ratio=0.2, eval_limit=1)
    assert run.code == 0
    assert (
        "tool calls are read by vLLM's parser hermes (the chat template has <tool_call>)"
        in run.errors
    )
    rows = run.lines("completions.jsonl")
    made = [call for row in rows for call in row["tool_calls"]]
    assert {call["outcome"] for call in made if call["name"] == "fails"} == {"error"}
    assert {call["content"] for call in made if call["name"] == "count"} == {"1"}  # each its own
    for row in rows:
        asked = [
            call["function"]["name"]
            for one in row["messages"]
            for call in one.get("tool_calls", ())
        ]
        assert asked == [call["name"] for call in row["tool_calls"]] and row["turns"] == 1 + bool(
            asked
        )
        assert "<tools>" in row["prompt"] and row["completion"] == row["messages"][-1]["content"]
        assert row["reward"] == float(row["completion"] == row["total"]) + len(asked) / 10
    assert {row["reward"] for row in rows} == {0.0, 0.1, 1.1, 1.2}
    for line in run.steps:
        assert line["rollout/logp_diff"] < 2e-3 and 0 < line["multi_turn/trained_tokens"] < 1
        names = [*TOOLS, "count"]
        counts = [line[f"tools/{name}/calls"] for name in names]
        step = [
            call["name"]
            for row in rows
            if row["step"] == line["step"]
            for call in row["tool_calls"]
        ]
        assert counts == [step.count(name) for name in names]
        assert line["tools/fails/errors"] == line["tools/fails/calls"]
        assert line["tools/echo/cut"] == line["tools/echo/calls"]
    assert all(row["tool_calls"] is not None for row in run.lines("eval_completions.jsonl"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ({"tools": ["ad"]}, "--tools: there is no tool ad: did you mean add?"),
        (
            {"agent_template": "react_en"},
            "--agent_template has no effect with --tools or tool_scheduler",
        ),
        ({"tool_call_parser": "hermse"}, "--tool_call_parser hermse: vLLM has no such parser"),
        ({"prompt_template": "r1"}, "the chat template has no place for these"),
    ],
)
def test_what_cannot_work_is_said_at_the_start(
    train: Callable[..., Any], flags: dict[str, Any], fault: str
) -> None:
    run = train(max_steps=1, **flags)
    assert run.code == 2 and fault in run.errors
