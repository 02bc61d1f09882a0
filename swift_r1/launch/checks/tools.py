"""What `swift check` does with tools: each is described as a model sees it, and called once with made-up arguments."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from swift_r1.data.prompts import PromptEncoder
from swift_r1.data.tool_registry import described, sandbox_tools, server_tools
from swift_r1.errors import UsageError
from swift_r1.flags.run import RunFlags
from swift_r1.plugins import load_plugins
from swift_r1.plugins.tools.parsing import ToolCall, chosen_parser
from swift_r1.plugins.tools.pool import ToolLimits, ToolPool
from swift_r1.plugins.tools.scheduler import check_tool_answers
from swift_r1.plugins.tools.shell import ShellTools

_MADE_UP = {
    "string": "text",
    "integer": 1,
    "number": 1.0,
    "boolean": True,
    "object": {},
    "array": [],
}


@dataclass(frozen=True, slots=True)
class ToolReport:
    """How one tool did.

    Attributes:
        function: its name, description and parameters, as the model sees them.
        arguments: what it was called with (JSON).
        content: what the model would read.
        outcome: answer, error or timeout. None of them breaks a run, and made-up arguments may be wrong ones. Tools of
            MCP servers are "not called": a call may change something.
    """

    name: str
    function: Mapping[str, Any]
    arguments: str
    content: str
    outcome: str


def try_tools(args: RunFlags, names: Sequence[str]) -> list[ToolReport]:
    """Calls each function, all at once, in worker processes, and describes the tools of MCP servers. Runs a command in a
    sandbox for `shell`. Raises as `ToolPool.wait_ready`, and UsageError: there can be no sandbox."""
    remote = server_tools()
    boxed = [name for name in names if name in sandbox_tools()]
    functions = [described(name)["function"] for name in names if name not in (*remote, *boxed)]
    calls = [
        ToolCall("", one["name"], json.dumps(_made_up(one["parameters"]))) for one in functions
    ]
    answers = []
    if calls:
        limits = ToolLimits(args.tool_timeout, args.max_tool_response_length)
        with ToolPool(args, limits, partial(load_plugins, args.external_plugins)) as pool:
            pool.wait_ready(names)
            answers = asyncio.run(pool.call(calls, names))
    tried = [
        ToolReport(one["name"], one, call.arguments, answer.content, answer.outcome)
        for one, call, answer in zip(functions, calls, answers, strict=True)
    ]
    for name in boxed:
        tried.append(_tried_shell(args, name))
    return tried + [
        ToolReport(name, described(name)["function"], "", "", "not called") for name in remote
    ]


def check_sandboxes(args: RunFlags) -> None:
    """Raises UsageError: the run has the tool `shell`, and there can be no sandbox for it."""
    if any(name in sandbox_tools() for name in args.tools):
        with _shells(args) as shells:
            shells.check()


def _tried_shell(args: RunFlags, name: str) -> ToolReport:
    arguments = json.dumps({"command": "uname -sr"})
    with _shells(args) as shells:
        shells.check()
        answer = asyncio.run(shells.episode().call(name, arguments))
    return ToolReport(name, described(name)["function"], arguments, answer.content, answer.outcome)


def _shells(args: RunFlags) -> ShellTools:
    limits = ToolLimits(args.tool_timeout, args.max_tool_response_length)
    return ShellTools(args.sandbox_provider, args.sandbox_spec, limits)


def template_faults(args: RunFlags, encoder: PromptEncoder) -> list[str]:
    """Says why the model's calls could not be read, or answers not be shown to it."""
    try:
        check_tool_answers(encoder)
    except UsageError as error:
        return list(error.faults)
    name, why = chosen_parser(args.tool_call_parser, encoder.template)
    return (
        []
        if name
        else [
            f"tool calls cannot be read: {why}; --tool_call_parser names vLLM's parser of this model"
        ]
    )


def _made_up(schema: Mapping[str, Any]) -> Any:
    """Returns a value that the schema allows; of an object only what it must have."""
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return _made_up(schema["anyOf"][0])
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return {name: _made_up(schema["properties"][name]) for name in schema.get("required", ())}
    return _MADE_UP.get(kind)
