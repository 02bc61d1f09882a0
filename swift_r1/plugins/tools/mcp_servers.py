"""Tools of MCP servers (modelcontextprotocol.io), through the package `mcp`: programs on this machine, or addresses.

    file.json --read_servers--> McpServer --McpServers.list_tools--> tools[name] = ServerTool
    a conversation --McpServers.episode--> McpEpisode --call--> a server of its own, or the shared one

The package is imported where the first server is opened, which takes a second.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from swift_r1.data.tool_registry import ServerTool, server_tools, tools
from swift_r1.errors import UsageError, a_kind, one_line
from swift_r1.plugins.tools.calling import ToolAnswer, within
from swift_r1.plugins.tools.pool import ToolLimits
from swift_r1.runtime.tether import tethered
from swift_r1.wire.urls import is_loopback

_logger = logging.getLogger("swift_r1.tools")

START_S = 60.0
"""For a server to answer; a program may be downloaded first."""
_CLOSE_S = 15.0  # the package asks, terminates and kills within 6 s
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_KINDS = {"stdio": "command", "http": "url", "streamable-http": "url"}


@dataclass(frozen=True, slots=True)
class McpServer:
    """One entry of `--mcp_servers`.

    Attributes:
        name: its key in the file.
        words: the command that starts it; empty where it has an address.
        env: variables of that command, beside PATH, HOME and the like.
        cwd: its folder; None: that of this process.
        url: its address; None where it has a command.
        headers: of each request to the address.
        shared: one process (or session) for all conversations, else one for each.
        tools: those that the model gets; empty for all.
    """

    name: str
    words: tuple[str, ...] = ()
    env: Mapping[str, str] | None = None
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] | None = None
    shared: bool = False
    tools: tuple[str, ...] = ()


def read_servers(path: str) -> list[McpServer]:
    """Returns the servers of a file in the form that MCP's clients share: `{"mcpServers": {name: {"command", "args",
    "env", "cwd"} or {"url", "headers"}}}`, with `shared` and `tools` beside. `${NAME}` in a value is a variable of the
    environment. Raises UsageError with every fault."""
    try:
        content = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--mcp_servers {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--mcp_servers {path} is not JSON: {error}") from error
    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise UsageError(f'--mcp_servers {path}: expected {{"mcpServers": {{name: ...}}}}')
    faults: list[str] = []
    found = []
    for name, entry in servers.items():
        where = f"--mcp_servers {path}: {name}"
        if isinstance(entry, dict):
            entry = {key: value for key, value in entry.items() if value is not None}
        why = _entry_faults(entry)
        faults += [f"{where}: {one}" for one in why]
        if not why:
            try:
                found.append(_server(name, _filled(entry)))
            except KeyError as error:
                faults.append(f"{where}: there is no environment variable {error.args[0]}")
    if faults:
        raise UsageError(*faults)
    return found


_FIELDS: Mapping[str, type] = {
    "type": str,
    "command": str,
    "args": list,
    "env": dict,
    "cwd": str,
    "url": str,
    "headers": dict,
    "shared": bool,
    "tools": list,
}


def _entry_faults(entry: Any) -> list[str]:
    if not isinstance(entry, dict):
        return [f"{a_kind(entry)}, not an object"]
    faults = [
        f"{key}: no such field; there are {', '.join(_FIELDS)}"
        for key in entry
        if key not in _FIELDS
    ]
    for key, kind in _FIELDS.items():
        value = entry.get(key)
        texts = list(value) if kind is list and isinstance(value, list) else []
        texts = list(value.values()) if kind is dict and isinstance(value, dict) else texts
        if key in entry and not isinstance(value, kind):
            faults.append(f"{key} is {a_kind(value)}")
        elif not all(isinstance(one, str) for one in texts):
            faults.append(f"{key} has a value that is not text")
    if faults:
        return faults
    given = [key for key in ("command", "url") if entry.get(key)]
    if len(given) != 1:
        faults.append("expected either command or url")
    elif _KINDS.get(entry.get("type", "stdio" if given == ["command"] else "http")) != given[0]:
        faults.append(f"type {entry['type']} does not go with {given[0]}: {', '.join(_KINDS)}")
    elif given == ["url"] and not re.match("https?://", entry["url"]):
        faults.append(f"url {entry['url']} does not begin with http:// or https://")
    return faults


def _filled(value: Any) -> Any:
    """Returns a value with its variables. Raises KeyError: one that is not set."""
    if isinstance(value, str):
        return _VARIABLE.sub(lambda found: os.environ[found[1]], value)
    if isinstance(value, list):
        return [_filled(one) for one in value]
    if isinstance(value, dict):
        return {key: _filled(one) for key, one in value.items()}
    return value


def _server(name: str, entry: Mapping[str, Any]) -> McpServer:
    command = [entry["command"], *entry.get("args", ())] if entry.get("command") else []
    return McpServer(
        name,
        tuple(command),
        entry.get("env"),
        entry.get("cwd"),
        entry.get("url"),
        entry.get("headers"),
        entry.get("shared", False),
        tuple(entry.get("tools", ())),
    )


_REGISTERED: dict[str, list[str]] = {}
"""File -> the names of its tools, in this process."""


def register_servers(path: str | None) -> None:
    """Asks the servers of a file, once in this process, for their tools, and registers them. Raises UsageError as
    `read_servers` and `McpServers.list_tools`, or where a name is taken."""
    if path is None or path in _REGISTERED:
        return
    entries = read_servers(path)
    if find_spec("mcp") is None:
        raise UsageError("--mcp_servers needs the package mcp: pip install 'swift-r1[agents]'")
    with McpServers(entries, ToolLimits(START_S, 0)) as servers:
        found = servers.list_tools()
    taken = [name for name in found if name in tools]
    if taken:
        raise UsageError(
            f"--mcp_servers {path}: a plugin has registered {', '.join(taken)} too; `tools` of a server in the file "
            "chooses among its tools"
        )
    tools.update(found)
    _REGISTERED[path] = list(found)


class McpServers:
    """The servers of a run, in the event loop of a thread of their own; a context manager, which ends all that are open.
    A program also ends when this process does, however that ends."""

    def __init__(self, servers: Sequence[McpServer], limits: ToolLimits) -> None:
        self.servers = {server.name: server for server in servers}
        self.limits = limits
        self.shared: dict[str, _Connection] = {}
        self.open: set[_Connection] = set()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="mcp", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self._close(), self.loop).result(_CLOSE_S + 1)
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(_CLOSE_S)

    async def _close(self) -> None:
        tasks = [connection.end() for connection in self.open]
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=_CLOSE_S)
            if left:
                _logger.warning("%d MCP servers have not ended within %g s", len(left), _CLOSE_S)

    def list_tools(self) -> dict[str, ServerTool]:
        """Returns the tools of all servers, which are started for it. Raises UsageError with a line for each server that
        does not answer, lacks a tool that the file names, or has one by the name of another's."""
        return asyncio.run_coroutine_threadsafe(self._list(), self.loop).result()

    async def _list(self) -> dict[str, ServerTool]:
        episode = McpEpisode(self)
        listed = await asyncio.gather(
            *(episode.tools_of(server) for server in self.servers.values()), return_exceptions=True
        )
        faults: list[str] = []
        found: dict[str, ServerTool] = {}
        for server, answer in zip(self.servers.values(), listed, strict=True):
            if isinstance(answer, BaseException):
                faults.append(f"MCP server {server.name}: {one_line(answer)}")
                continue
            offered = {tool.name: tool for tool in answer}
            faults += [
                f"MCP server {server.name} has no tool {name}; it has {', '.join(offered)}"
                for name in server.tools
                if name not in offered
            ]
            for name in server.tools or offered:
                if name in found:
                    faults.append(
                        f"the MCP servers {found[name].server} and {server.name} both have a tool {name}: `tools` in "
                        "the file chooses among them"
                    )
                elif name in offered:
                    found[name] = ServerTool(server.name, _described(offered[name]))
        if faults:
            raise UsageError(*faults)
        return found

    def episode(self) -> McpEpisode:
        """Returns what calls tools for one conversation; it must be closed."""
        return McpEpisode(self)


def _described(tool: Any) -> dict[str, Any]:
    """Returns OpenAI's description of a tool of MCP."""
    function = {
        "name": tool.name,
        "description": tool.description or tool.title or "",
        "parameters": dict(tool.input_schema),
    }
    return {"type": "function", "function": function}


class McpEpisode:
    """The servers that one conversation has called."""

    def __init__(self, owner: McpServers) -> None:
        self._owner = owner
        self._own: dict[str, _Connection] = {}

    def names(self) -> Collection[str]:
        """Returns the tools that are called here."""
        return server_tools()

    async def call(self, name: str, arguments: str) -> ToolAnswer:
        """Returns what the tool `name` gives for arguments in JSON, whatever its server does. From any event loop."""
        answer = asyncio.run_coroutine_threadsafe(self._call(name, arguments), self._owner.loop)
        return await asyncio.wrap_future(answer)

    def close(self) -> None:
        """Ends the servers that are this conversation's own, without waiting for it. From any thread."""
        self._owner.loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        for connection in self._own.values():
            connection.end()

    async def tools_of(self, server: McpServer) -> list[Any]:
        """Returns what a server offers. Raises whatever keeps it from that."""
        connection = self._connection(server)
        client = await connection.client()
        listed = []
        cursor = None
        try:
            async with asyncio.timeout(START_S):
                while cursor != "":
                    page = await client.list_tools(cursor=cursor)
                    listed += page.tools
                    cursor = page.next_cursor or ""
        except TimeoutError:
            raise RuntimeError(f"its list of tools did not end within {START_S:g} s") from None
        if not server.shared:
            connection.end()
        return listed

    def _connection(self, server: McpServer) -> _Connection:
        """Returns the one that is open, else a new one; a shared server that has ended is started again."""
        known = self._owner.shared if server.shared else self._own
        connection = known.get(server.name)
        if connection is not None and connection.ended and server.shared:
            again = "it is started again" if server.url is None else "a new session begins"
            _logger.warning("MCP server %s: %s; %s", server.name, connection.why(), again)
            connection.end()
            connection = None
        if connection is None:
            connection = known[server.name] = _Connection(server, self._owner.open)
        return connection

    async def _call(self, name: str, arguments: str) -> ToolAnswer:
        tool = tools[name]
        assert isinstance(tool, ServerTool)
        started = time.perf_counter()
        outcome, content, cause = await self._asked(tool, name, arguments)
        content, cut = within(content, self._owner.limits.characters)
        return ToolAnswer(content, outcome, time.perf_counter() - started, cut, cause)

    async def _asked(
        self, tool: ServerTool, name: str, arguments: str
    ) -> tuple[Any, str, str | None]:
        """Returns outcome, text and cause."""
        try:
            given = json.loads(arguments.strip() or "{}")
        except (ValueError, RecursionError) as error:
            return "error", f"Error: the arguments are not JSON: {error}", f"{name}: {error}"
        if not isinstance(given, dict):
            text = "the arguments are not a JSON object"
            return "error", f"Error: {text}", f"{name}: {text}"
        server = self._owner.servers[tool.server]
        seconds = self._owner.limits.seconds
        for again in (server.shared, False):
            connection = self._connection(server)
            try:
                client = await connection.client()
                result = await asyncio.wait_for(client.call_tool(name, given), seconds)
                break
            except asyncio.CancelledError:
                raise
            except TimeoutError:
                text = f"no answer within {seconds:g} s"
                return "timeout", f"Error: {text}", f"MCP server {tool.server}: {text}"
            except Exception as error:  # noqa: BLE001  the package's own, of the network, of what a server says
                connection.note(error)
                if connection.lost and again:
                    continue  # the server has not looked at the call
                why = connection.why() if connection.ended else one_line(error)
                return "error", f"Error: {why}", f"MCP server {tool.server}: {why}"
        text = text_of_result(result)
        if result.is_error:
            return "error", f"Error: {text}", f"MCP server {tool.server}: {text[:300]}"
        return "answer", text, None


class _Connection:
    """A server as one client of it, among those that are `open` until it has ended. The package's contexts are entered
    and left in a task of their own.

    Attributes:
        ended: no call is answered any more.
        lost: because the server, at an address, no longer knows the session.
    """

    def __init__(self, server: McpServer, open_ones: set[_Connection]) -> None:
        self._server = server
        self._ending = False
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  as long as the task
        self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold())
        self.ended = self.lost = False
        open_ones.add(self)
        self._task.add_done_callback(lambda _: open_ones.discard(self))

    def end(self) -> asyncio.Task[None]:
        """Begins to end the server; returns the task that does it. Only the first call cancels it: a second one would
        cut the package's own waits short, and leave the program running."""
        if not self._ending:
            self._ending = True
            self._task.cancel()
        return self._task

    async def client(self) -> Any:
        """Returns the package's client once the server answers. Raises OSError, RuntimeError, TimeoutError of it."""
        return await asyncio.shield(self._client)

    def note(self, error: Exception) -> None:
        """Looks whether a call has failed because the server is gone."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        gone = isinstance(error, MCPError) and error.code == CONNECTION_CLOSED
        self.ended = self.ended or self.lost or gone or self._task.done()

    def why(self) -> str:
        """Returns a line about a server that has ended."""
        if self.lost:
            return "it has ended the session, and the state that it kept for it is lost"
        return f"it has ended{self._last_line()}"

    def _last_line(self) -> str:
        """Returns the last line that a program has written to its standard error, behind a semicolon."""
        if self._errors.closed:
            return ""
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return f"; its last line: {lines[-1][:300]}" if lines else ""

    async def _hold(self) -> None:
        try:
            from mcp import Client

            # what a server says wrongly is told to the model, or does not matter
            for name in ("mcp", "client"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
            async with AsyncExitStack() as stack:
                transport = await self._transport(stack)
                try:
                    async with asyncio.timeout(START_S):
                        client = await stack.enter_async_context(Client(transport))
                except TimeoutError:
                    raise RuntimeError(f"no answer within {START_S:g} s") from None
                self._client.set_result(client)
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not self._client.done():
                self._client.cancel()
        except BaseException as error:  # noqa: BLE001  the package's own, in groups, or what keeps it from being imported
            self.ended = True
            if not self._client.done():
                self._client.set_exception(RuntimeError(f"{_first(error)}{self._last_line()}"))
                self._client.exception()  # a conversation that was closed does not ask for it
        finally:
            self._errors.close()

    async def _transport(self, stack: AsyncExitStack) -> Any:
        from mcp import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        server = self._server
        if server.url is not None:
            from httpx2 import AsyncClient, Timeout

            # a server may hold an answer open; calls have limits of their own
            http = AsyncClient(
                headers=dict(server.headers or {}),
                timeout=Timeout(30, read=None),
                trust_env=not is_loopback(server.url),
                event_hooks={"response": [self._look]},
            )
            return streamable_http_client(
                server.url, http_client=await stack.enter_async_context(http)
            )
        words = tethered(server.words)
        return stdio_client(
            StdioServerParameters(
                command=words[0],
                args=words[1:],
                env=dict(server.env or {}),
                cwd=server.cwd,
                encoding_error_handler="replace",
            ),
            self._errors,
        )

    async def _look(self, response: Any) -> None:
        """Looks whether the server no longer knows the session: that is status 404, and of some servers 400."""
        if response.request.method == "POST" and "mcp-session-id" in response.request.headers:
            status = response.status_code
            if status == 404 or (status == 400 and b"session" in (await response.aread()).lower()):
                self.lost = True


def _first(error: BaseException) -> str:
    """Returns the line of an error, of a group its first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return one_line(error)


def text_of_result(result: Any) -> str:
    """Returns what a model reads of a result: its texts; the name and address of a resource that is only linked; for a
    picture or a sound a word that it is left out; the JSON of its structured content where it has nothing else."""
    parts = []
    for block in result.content:
        resource = getattr(block, "resource", block)
        text = getattr(resource, "text", None)
        if text is None:
            known = (getattr(resource, name, None) for name in ("name", "description", "uri"))
            about = ", ".join(str(one) for one in known if one)
            left = "" if block.type == "resource_link" else " left out"
            text = f"[{block.type}{left}{': ' * bool(about)}{about}]"
        parts.append(text)
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)
