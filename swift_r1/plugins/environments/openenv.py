"""`openenv:URL`: an environment that an OpenEnv server plays, over the server's WebSocket.

OpenEnv itself is needed where the server runs, in a Python of its own, and not here. `--env_args`: `reset` (arguments
of the environment's reset), `reply` (the field of an action that is the model's whole answer: no tool is called then),
`timeout` (seconds for each answer of the server, 60).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from swift_r1.errors import UsageError, one_line
from swift_r1.plugins.agents import AgentResult
from swift_r1.plugins.environments.base import EnvironmentAgent, Row, seed_of, seed_rows
from swift_r1.plugins.environments.chat import Chat, EnvironmentGone, with_text

_ARGS = ("reset", "reply", "timeout")
_LARGEST = 100 * 2**20  # bytes of an observation, as in OpenEnv's own client
_ACT = "act"


class OpenEnvAgent(EnvironmentAgent):
    """The tools of an environment that has MCP tools are the model's; of others one tool makes an action. An episode
    ends as the environment says, or with an answer without a call. Its reward is the sum of its steps'."""

    @classmethod
    def prepare(cls) -> None:
        import httpx  # noqa: F401
        import websockets.asyncio.client  # noqa: F401

    @classmethod
    def rows(cls, split: str, count: int | None) -> Iterator[Row]:
        about = asyncio.run(cls._get("metadata"))
        parts = (about.get("name"), about.get("description"))
        text = f"You are in this environment: {': '.join(part for part in parts if part) or 'it has no name'}"
        yield from seed_rows(text, split, count)

    async def play(self, client: Any, row: Row, own: Row) -> AgentResult:
        schema = (await self._get("schema"))["action"]
        reply = self.args.get("reply")
        if reply is not None and reply not in schema.get("properties", {}):
            known = ", ".join(schema.get("properties", {})) or "none"
            raise UsageError(
                f"--env openenv:{self.name}: an action has no field {reply}; there are {known}"
            )
        async with self._connected() as server:
            first = await server.ask(
                "reset", {"seed": seed_of(row)} | dict(self.args.get("reset", {})) | own
            )
            has_tools = (
                reply is None and {"tool_name", "arguments"} <= schema.get("properties", {}).keys()
            )
            tools = (
                []
                if reply is not None
                else await server.tools()
                if has_tools
                else [_tool_of(schema)]
            )
            chat = Chat(client, with_text(row["messages"], _text(first)), tools)
            rewards: list[float] = []
            last = first

            async def act(name: str, arguments: Mapping[str, Any]) -> str:
                nonlocal last
                action = (
                    {"type": "call_tool", "tool_name": name, "arguments": arguments}
                    if has_tools
                    else arguments
                )
                if last.get("done"):
                    raise ValueError("the episode is over")
                last = await server.ask("step", action)
                rewards[-1] += float(last.get("reward") or 0.0)
                return _text(last) or "done"

            failed = 0
            while not last.get("done") and chat.ended is None:
                message = await chat.turn()
                if message is None:
                    break
                rewards.append(0.0)
                if reply is not None:
                    try:
                        text = await act("", {reply: message["content"]})
                    except RuntimeError as error:  # as a call of a tool that fails
                        failed = failed + 1
                        text = f"Error: {error}"
                    chat.messages.append({"role": "user", "content": text})
                elif message.get("tool_calls") and chat.ended is None:
                    failed += await chat.call(message, act)
                else:
                    break
        return {
            "reward": sum(rewards) + float(first.get("reward") or 0.0),
            "turn_rewards": rewards,
            "last_reward": float(last.get("reward") or 0.0),
            "done": float(bool(last.get("done"))),
            "tool_calls_failed": float(failed),
        }

    @classmethod
    async def _get(cls, path: str) -> dict[str, Any]:
        """Returns what the server says about its environment."""
        import httpx

        unknown = sorted(set(cls.args).difference(_ARGS))
        if unknown:
            raise UsageError(
                f"--env_args of openenv: unknown {unknown[0]}; there are {', '.join(_ARGS)}"
            )
        try:
            async with httpx.AsyncClient(timeout=cls._timeout(), trust_env=False) as http:
                answer = await http.get(f"{_url(cls.name)}/{path}")
                found: dict[str, Any] = answer.raise_for_status().json()
                return found
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise UsageError(
                f"--env openenv:{cls.name}: no OpenEnv server answers there ({one_line(error, 120)})"
            ) from error

    @classmethod
    def _timeout(cls) -> float:
        return float(cls.args.get("timeout", 60.0))

    @classmethod
    @asynccontextmanager
    async def _connected(cls) -> Any:
        from websockets.asyncio.client import connect

        address = _url(cls.name).replace("http", "ws", 1) + "/ws"
        async with connect(
            address, max_size=_LARGEST, proxy=None, open_timeout=cls._timeout(), ping_interval=None
        ) as socket:
            yield _Server(socket, cls._timeout())


class _Server:
    """One session of the server: an environment of its own, which ends with the connection."""

    def __init__(self, socket: Any, timeout: float) -> None:
        self._socket = socket
        self._timeout = timeout

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer to `reset` or `step`: `observation`, `reward`, `done`. Raises RuntimeError with what the
        server says where it refuses."""
        from websockets.exceptions import ConnectionClosed

        try:
            async with asyncio.timeout(self._timeout):
                await self._socket.send(json.dumps({"type": kind, "data": data}))
                answer = json.loads(await self._socket.recv())
        except (TimeoutError, ConnectionClosed, OSError) as error:
            raise EnvironmentGone(
                f"the OpenEnv server does not answer: {one_line(error)}"
            ) from error
        data = answer.get("data", {})
        if answer.get("type") == "error":
            faults = "; ".join(
                f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in data.get("errors", ())
            )
            raise RuntimeError(faults or data.get("message") or "the server gives no reason")
        return dict(data)

    async def tools(self) -> list[dict[str, Any]]:
        """Returns the environment's MCP tools, as OpenAI describes tools."""
        listed = await self.ask("step", {"type": "list_tools"})
        return [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description") or "",
                    "parameters": tool["input_schema"],
                },
            }
            for tool in listed["observation"]["tools"]
        ]


def _url(name: str) -> str:
    return (name if name.startswith(("http://", "https://")) else f"http://{name}").rstrip("/")


def _tool_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tool that makes an action, from the action's JSON schema; `metadata` is the program's."""
    properties = {
        name: about for name, about in schema.get("properties", {}).items() if name != "metadata"
    }
    parameters = {**schema, "properties": properties, "required": [*schema.get("required", ())]}
    text = schema.get("description") or "Acts in the environment."
    return {
        "type": "function",
        "function": {"name": _ACT, "description": text, "parameters": parameters},
    }


def _text(answer: Mapping[str, Any]) -> str:
    """Returns an observation as the model reads it: what is set in it; a single text as it is, anything else as JSON.
    Raises RuntimeError for a tool that failed."""
    observation = answer.get("observation") or {}
    error = observation.get("error")
    if error:
        raise RuntimeError(error.get("message") if isinstance(error, dict) else str(error))
    hidden = ("metadata", "done", "reward", "tool_name", "error")
    shown = {
        name: value
        for name, value in observation.items()
        if name not in hidden and value not in (None, [], {})
    }
    if not shown:
        message = (observation.get("metadata") or {}).get("message")
        return message if isinstance(message, str) else ""
    result = shown.get("result")
    parts = result.get("content") if isinstance(result, dict) else None
    if isinstance(result, dict) and isinstance(parts, list):  # of an MCP tool
        text = "\n".join(part.get("text", "") for part in parts if isinstance(part, dict))
        if result.get("is_error"):
            raise RuntimeError(text)
        return text
    [first, *rest] = shown.values()
    alone = first if not rest else shown
    return alone if isinstance(alone, str) else json.dumps(alone, ensure_ascii=False)
