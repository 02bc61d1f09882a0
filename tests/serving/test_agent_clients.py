"""Agents of others at a session's address: each knows an OpenAI address and key, and its calls are one sequence.

What `make test-agents` installs is not there otherwise.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serving.session_engine import CALL, Opened, ScriptedEngine, same_as_logged

HERE = Path(__file__).parent / "clients"
NODE_MODULES = Path(sys.prefix) / "node_modules"


def needs(module: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"{module} is not installed: make test-agents")


@pytest.fixture
def engine(tool_tokenizer: Any) -> ScriptedEngine:
    engine = ScriptedEngine(tool_tokenizer)
    engine.says = [f"I add them.\n{CALL}", "It is 3.", "Bye."]
    return engine


@pytest.fixture
def session(engine: ScriptedEngine, serve_engine: Callable[..., str]) -> Opened:
    return Opened(serve_engine(engine, {}))


def one_sequence(session: Opened, engine: ScriptedEngine, calls: int) -> None:
    record = session.record()
    assert record.kinds == {"new": 1, "extends": calls - 1} and len(record.sequences) == 1
    same_as_logged(record, engine.log)
    shown = engine.prompts.tokenizer.decode(record.sequences[0].token_ids)
    assert "<tool_response>\n3\n</tool_response>" in shown


@needs("mcp")
def test_tools_of_an_mcp_server(session: Opened, engine: ScriptedEngine) -> None:
    """The server is a process of its own, which the agent starts; its tools are listed to the model."""
    from mcp import ClientSession, StdioServerParameters, stdio_client

    async def agent() -> str:
        words = [str(HERE / "adding_server.py")]
        environ = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        talk = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
        program = StdioServerParameters(command=sys.executable, args=words, env=environ)
        async with talk, stdio_client(program) as pipes, ClientSession(*pipes) as mcp:
            await mcp.initialize()
            tools = [
                {
                    "type": "function",
                    "function": {
                        "name": one.name,
                        "description": one.description,
                        "parameters": one.input_schema,
                    },
                }
                for one in (await mcp.list_tools()).tools
            ]
            messages: list[Any] = [{"role": "user", "content": "1 + 2?"}]
            while True:
                asked: Any = {"model": "any", "messages": messages, "tools": tools}
                message = (await talk.chat.completions.create(**asked)).choices[0].message
                messages.append(message)
                if not message.tool_calls:
                    return message.content or ""
                for call in message.tool_calls:
                    found = await mcp.call_tool(
                        call.function.name, json.loads(call.function.arguments)
                    )
                    text = "".join(part.text for part in found.content)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": text})

    assert asyncio.run(asyncio.wait_for(agent(), 60)) == "It is 3."
    one_sequence(session, engine, 2)


@pytest.mark.skipif(
    shutil.which("node") is None or not (NODE_MODULES / "openai").exists(),
    reason="no node with the package openai: make test-agents",
)
def test_the_javascript_client(session: Opened, engine: ScriptedEngine) -> None:
    environ = os.environ | {
        "NODE_PATH": str(NODE_MODULES),
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_KEY": session.api_key,
    }
    words = ["node", str(HERE / "agent.cjs")]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60)
    assert done.stdout == "Bye.\n", done.stderr
    one_sequence(session, engine, 3)


@needs("langchain_openai")
@pytest.mark.parametrize("streaming", [False, True])
def test_langchain(session: Opened, engine: ScriptedEngine, streaming: bool) -> None:
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    asked: Any = {
        "base_url": session.base_url,
        "api_key": session.api_key,
        "model": "any",
        "max_retries": 0,
    }
    model = ChatOpenAI(**asked, streaming=streaming, temperature=1.0).bind_tools([add])
    messages: list[Any] = [SystemMessage("short"), HumanMessage("1 + 2?")]
    said = model.invoke(messages)
    assert [(one["name"], one["args"]) for one in said.tool_calls] == [("add", {"a": 1, "b": 2})]
    for one in said.tool_calls:
        messages += [said, ToolMessage(str(add.invoke(one["args"])), tool_call_id=one["id"])]
    last = model.invoke(messages)
    assert last.content == "It is 3."
    messages += [last, HumanMessage("thanks")]
    assert "".join(str(chunk.content) for chunk in model.stream(messages)) == "Bye."
    one_sequence(session, engine, 3)


@needs("pydantic_ai")
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("thinks", [False, True])
def test_pydantic_ai(session: Opened, engine: ScriptedEngine, thinks: bool, streamed: bool) -> None:
    """It takes the reasoning out of the text, and sends it back with white space of its own."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    if thinks:
        engine.says = [f"<think>\nhm\n</think>\n\n{CALL}", "<think>so</think>It is 3.", "Bye."]
    provider = OpenAIProvider(base_url=session.base_url, api_key=session.api_key)
    agent = Agent(OpenAIChatModel("any", provider=provider), system_prompt="short")

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    async def said(prompt: str, history: Any = None) -> Any:
        if not streamed:
            return await agent.run(prompt, message_history=history)
        async with agent.iter(prompt, message_history=history) as run:
            async for node in run:
                if agent.is_model_request_node(node):
                    async with node.stream(run.ctx) as events:
                        async for _ in events:
                            pass
        return run.result

    async def play() -> str:
        first = await said("1 + 2?")
        assert first.output == "It is 3."
        return str((await said("thanks", first.all_messages())).output)

    assert asyncio.run(asyncio.wait_for(play(), 60)) == "Bye."
    one_sequence(session, engine, 3)


@needs("agents")
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("protocol", ["ChatCompletions", "Responses"])
def test_the_agents_sdk(
    session: Opened, engine: ScriptedEngine, protocol: str, streamed: bool
) -> None:
    import agents

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    async def play() -> str:
        agents.set_tracing_disabled(True)
        talk = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
        model = getattr(agents, f"OpenAI{protocol}Model")(model="any", openai_client=talk)
        agent = agents.Agent(name="adder", instructions="short", model=model, tools=[add])
        if not streamed:
            return str((await agents.Runner.run(agent, "1 + 2?")).final_output)
        running = agents.Runner.run_streamed(agent, "1 + 2?")
        async for _ in running.stream_events():
            pass
        return str(running.final_output)

    assert asyncio.run(asyncio.wait_for(play(), 60)) == "It is 3."
    one_sequence(session, engine, 2)


@needs("minisweagent")
@pytest.mark.parametrize(
    ("model", "how"),
    [
        ("openai/any", "litellm"),
        ("openai/any", "litellm_response"),
        ("anthropic/any", "litellm"),
    ],
)
def test_mini_swe_agent(
    tool_tokenizer: Any,
    serve_engine: Callable[..., str],
    tmp_path: Path,
    model: str,
    how: str,
) -> None:
    """The program as it is: it repairs a file by commands, and hands in. LiteLLM speaks the three protocols for it."""
    engine = ScriptedEngine(tool_tokenizer, 40_000)
    commands = ("echo 3 > sum", "cat sum", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "%s"}}\n</tool_call>'
    engine.says = [f"I do it.\n{call % command}" for command in commands]
    session = Opened(serve_engine(engine, {}))
    environ = os.environ | {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_KEY": session.api_key,
        "ANTHROPIC_BASE_URL": session.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": session.api_key,
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path / "config"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "NO_PROXY": "127.0.0.1",
    }
    words = [sys.executable, "-m", "minisweagent", "-y", "--exit-immediately", "-t", "1 + 2?"]
    words += ["-m", model, "--model-class", how, "-o", str(tmp_path / "episode.json")]
    done = subprocess.run(
        words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    episode = json.loads((tmp_path / "episode.json").read_text())
    assert episode["info"]["exit_status"] == "Submitted"
    assert (tmp_path / "sum").read_text() == "3\n"
    record = session.record()
    assert record.kinds == {"new": 1, "extends": 2} and len(record.sequences) == 1
    same_as_logged(record, engine.log)


@pytest.mark.skipif(
    shutil.which("node") is None or not (NODE_MODULES / "@openai" / "codex").exists(),
    reason="no node with the package @openai/codex: make test-agents",
)
def test_the_codex_cli(
    tool_tokenizer: Any, serve_engine: Callable[..., str], tmp_path: Path
) -> None:
    """Without its tools that are no functions. It speaks Responses, streamed and not stored."""
    engine = ScriptedEngine(tool_tokenizer, 100_000)
    call = '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "%s"}}\n</tool_call>'
    engine.says = [
        f"<think>\nhm\n</think>\nI do it.\n{call % 'echo 3 > sum'}",
        f"<think>so</think>{call % 'cat sum'}",
        "It is 3.",
    ]
    session = Opened(serve_engine(engine, {}))
    provider = f'{{name="swift", base_url="{session.base_url}", env_key="OPENAI_API_KEY"}}'
    settings = ["model_provider=swift", f"model_providers.swift={provider}", "web_search=disabled"]
    words = ["node", str(NODE_MODULES / "@openai" / "codex" / "bin" / "codex.js"), "exec"]
    words += ["--skip-git-repo-check", "-s", "danger-full-access", "-m", "any"]
    words += ["--disable", "multi_agent", *(one for each in settings for one in ("-c", each))]
    (tmp_path / "home").mkdir()
    environ = os.environ | {
        "CODEX_HOME": str(tmp_path / "home"),
        "OPENAI_API_KEY": session.api_key,
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run(
        [*words, "1 + 2?"],
        cwd=tmp_path,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.strip() == "It is 3." and (tmp_path / "sum").read_text() == "3\n"
    record = session.record()
    assert record.kinds == {"new": 1, "extends": 2} and len(record.sequences) == 1
    same_as_logged(record, engine.log)
