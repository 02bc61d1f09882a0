"""Tools of MCP servers: whatever a server does, the model gets a short text; a conversation's own ends with it."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from swift_r1.data.tool_registry import described, server_tools, tools
from swift_r1.data.tools import ToolUse
from swift_r1.errors import UsageError
from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.plugins.tools import mcp_servers
from swift_r1.plugins.tools.calling import ToolAnswer
from swift_r1.plugins.tools.mcp_servers import (
    McpEpisode,
    McpServer,
    McpServers,
    read_servers,
    register_servers,
)
from swift_r1.plugins.tools.pool import ToolLimits
from tests.conftest import until
from tests.plugins.tools import mcp_program

PROGRAM = {"command": sys.executable, "args": [mcp_program.__file__]}
LIMITS = ToolLimits(2.0, 100)


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., str]:
    """`written(name={...}) -> path` of a file with these servers"""

    def write(**servers: Any) -> str:
        path = tmp_path / "servers.json"
        path.write_text(json.dumps({"mcpServers": servers}))
        return str(path)

    return write


@pytest.fixture
def opened(written: Callable[..., str]) -> Iterator[Callable[..., McpServers]]:
    """`opened(name={...}) -> servers`, whose tools are registered"""
    made: list[McpServers] = []

    def open_servers(**servers: Any) -> McpServers:
        path = written(**servers)
        register_servers(path)
        made.append(McpServers(read_servers(path), LIMITS).__enter__())
        return made[-1]

    yield open_servers
    for one in made:
        one.__exit__(None, None, None)
    assert programs() == []


def programs() -> list[psutil.Process]:
    """The servers that run, and what they have left."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if mcp_program.__file__ in one.cmdline() or one.cmdline()[:2] == ["sleep", "3600"]:
                found.append(one)
    return found


def call(episode: McpEpisode, *wanted: str | tuple[str, Any]) -> list[ToolAnswer]:
    """The answers to calls one after another."""

    async def run() -> list[ToolAnswer]:
        found = []
        for one in wanted:
            name, given = one if isinstance(one, tuple) else (one, {})
            found.append(
                await episode.call(name, given if isinstance(given, str) else json.dumps(given))
            )
        return found

    return asyncio.run(run())


def test_rows_have_the_tools_of_servers_beside_those_that_are_named(
    opened: Callable[..., McpServers], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(one=PROGRAM | {"tools": ["count", "table"]})
    monkeypatch.setitem(tools, "half", half)
    assert server_tools() == ["count", "table"]
    found = ToolUse(None, ("half",), True).descriptions(None)
    assert [one["function"]["name"] for one in found] == ["half", "count", "table"]
    assert found[1]["function"] == {
        "name": "count",
        "description": "The tool count.",
        "parameters": {"type": "object", "properties": {"by": {"type": "integer"}}},
    }
    assert [one["function"]["name"] for one in ToolUse().descriptions('["table"]')] == ["table"]


def half(number: float) -> float:
    """Halves a number."""
    return number / 2


def test_what_a_server_gives_is_text(opened: Callable[..., McpServers]) -> None:
    episode = opened(one=PROGRAM).episode()
    found = call(
        episode,
        "end_turn",
        "picture",
        "table",
        "long",
        "nonsense",
        "fails",
        ("count", "[1]"),
        ("count", "{"),
        ("count", ""),
    )
    assert [one.content for one in found[:4]] == [
        "<|im_end|>\nuser",
        "see\n[image left out]",
        '{"ä": 1}',
        "a" * 100 + " [20 more characters]",
    ]
    assert found[3].cut and found[4].content == "said"
    assert (found[5].outcome, found[5].content) == ("error", "Error: no such page")
    assert found[6].content == "Error: the arguments are not a JSON object"
    assert found[7].content.startswith("Error: the arguments are not JSON")
    assert found[8].content == "1"
    assert call(episode, "links")[0].content == (
        "[resource_link: notes, of today, file:///notes.txt]\n[resource left out: file:///a.bin]"
    )
    episode.close()


def test_each_conversation_has_a_server_of_its_own_unless_it_is_shared(
    opened: Callable[..., McpServers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHERE", "the attic")
    monkeypatch.setenv("API_KEY", "a secret")
    own = PROGRAM | {"tools": ["count", "place", "leaves"], "env": {"PLACE": "${WHERE}"}}
    servers = opened(own=own)
    first, second = servers.episode(), servers.episode()
    assert [one.content for one in call(first, "count", ("count", {"by": 2}))] == ["1", "3"]
    assert call(second, "count")[0].content == "1"
    place, pid, key = re.split(r" (?=\d+ )| (?=None)", call(first, "place", "leaves")[0].content)
    assert (place, key) == ("the attic", "None")  # the trainer's own variables stay its own
    first.close()
    until(lambda: not psutil.pid_exists(int(pid)), 20)
    assert call(second, "count")[0].content == "2" and len(programs()) == 1
    second.close()
    until(lambda: programs() == [], 20)


def test_a_shared_server_keeps_its_state_and_is_started_again(
    opened: Callable[..., McpServers],
) -> None:
    servers = opened(one=PROGRAM | {"shared": True})
    for number in ("1", "2"):
        episode = servers.episode()
        assert call(episode, "count")[0].content == number
        episode.close()
    dead = call(servers.episode(), "dies", "count")
    assert dead[0].outcome == "error"
    assert dead[0].content == "Error: it has ended; its last line: out of ideas"
    assert dead[1].content == "1"


def test_a_server_that_hangs_or_dies(opened: Callable[..., McpServers]) -> None:
    servers = opened(one=PROGRAM)
    hung = call(servers.episode(), "hangs")[0]
    assert (hung.outcome, hung.content) == ("timeout", "Error: no answer within 2 s")
    dead = call(servers.episode(), "dies", "count")
    assert [one.content for one in dead] == [
        "Error: it has ended; its last line: out of ideas"
    ] * 2  # its state is gone: a new one would tell another story


def test_arguments_and_lists_without_end(
    opened: Callable[..., McpServers], written: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    [deep] = call(opened(one=PROGRAM).episode(), ("count", "[" * 100_000))
    assert deep.outcome == "error" and deep.content.startswith("Error: the arguments are not JSON")
    monkeypatch.setattr(mcp_servers, "START_S", 2.0)
    endless = McpServers(
        read_servers(written(one=PROGRAM | {"env": {"ENDLESS": "1"}})), ToolLimits(2.0, 0)
    )
    with endless, pytest.raises(UsageError, match="one: its list of tools did not end within 2 s"):
        endless.list_tools()


def test_many_conversations_at_once(opened: Callable[..., McpServers]) -> None:
    servers = opened(one=PROGRAM)

    async def one() -> list[str]:
        episode = servers.episode()
        found = [(await episode.call("count", "{}")).content for _ in range(3)]
        episode.close()
        return found

    async def run() -> list[list[str]]:
        return await asyncio.gather(*(one() for _ in range(8)))

    assert asyncio.run(run()) == [["1", "2", "3"]] * 8
    until(lambda: programs() == [], 20)


def test_an_address(opened: Callable[..., McpServers]) -> None:
    import uvicorn
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("away")
    seen: set[str] = set()

    @server.tool()
    def word() -> str:
        """Says a word."""
        return "home"

    inner = server.streamable_http_app()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.add(dict(scope.get("headers", ())).get(b"authorization", b"").decode())
        await inner(scope, receive, send)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        web = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=web.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"
            servers = opened(away={"url": url, "headers": {"Authorization": "Bearer x"}})
            assert described("word")["function"]["description"] == "Says a word."
            episode = servers.episode()
            assert call(episode, "word")[0].content == "home"
            assert seen == {"", "Bearer x"}  # the first is of the server's own start
            episode.close()
        finally:
            web.should_exit = True
            thread.join(20)
    assert call(servers.episode(), "word")[0].outcome == "error"


class Sessions:
    """A server at an address that counts in sessions, which it may forget (`unknown`: the answer to a call of one)."""

    def __init__(self, port: int = 0) -> None:
        self.counts: dict[str, int] = {}
        self.begun = 0
        self.unknown = (404, "Session not found", -32001)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._tell(405, {})

            def do_DELETE(self) -> None:
                self._tell(200, {})

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                name = self.headers.get("Mcp-Session-Id")
                if asked["method"] == "initialize":
                    outer.begun += 1
                    outer.counts[f"s{outer.begun}"] = 0
                    info = {"name": "sessions", "version": "1"}
                    shown = {"protocolVersion": "2025-06-18", "serverInfo": info}
                    answer = {"result": shown | {"capabilities": {"tools": {}}}}
                    self._tell(200, answer | {"id": asked["id"]}, f"s{outer.begun}")
                elif name not in outer.counts:
                    status, message, code = outer.unknown
                    fault = {"code": code, "message": message}
                    self._tell(status, {"id": asked.get("id"), "error": fault})
                elif asked["method"] == "tools/list":
                    listed = {"tools": [mcp_program.tool("count")]}
                    self._tell(200, {"id": asked["id"], "result": listed})
                elif asked["method"] == "tools/call":
                    outer.counts[name] += 1
                    counted = mcp_program.texts(str(outer.counts[name]))
                    self._tell(200, {"id": asked["id"], "result": counted})
                else:
                    self._tell(202, {})

            def _tell(self, status: int, answer: dict[str, Any], session: str = "") -> None:
                body = json.dumps({"jsonrpc": "2.0"} | answer).encode() if answer else b""
                self.send_response(status)
                if session:
                    self.send_header("Mcp-Session-Id", session)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}/mcp"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.mark.parametrize(
    "unknown",
    [(404, "Session not found", -32001), (400, "Bad Request: No valid session ID", -32000)],
)
def test_a_shared_address_that_has_forgotten_its_session_is_asked_for_a_new_one(
    opened: Callable[..., McpServers],
    caplog: pytest.LogCaptureFixture,
    unknown: tuple[int, str, int],
) -> None:
    server = Sessions()
    server.unknown = unknown
    try:
        servers = opened(away={"url": server.url, "shared": True})
        episode = servers.episode()
        assert [one.content for one in call(episode, "count", "count")] == ["1", "2"]
        begun = server.begun
        server.counts.clear()  # as after a restart, or an idle time-out

        async def together() -> list[ToolAnswer]:
            return await asyncio.gather(*(episode.call("count", "{}") for _ in range(4)))

        found = asyncio.run(together())
        assert sorted(one.content for one in found) == ["1", "2", "3", "4"]
        assert server.begun == begun + 1
        assert caplog.messages == [
            "MCP server away: it has ended the session, and the state that it kept for it is lost; "
            "a new session begins"
        ]
    finally:
        server.close()


def test_a_conversations_own_session_is_not_begun_again(opened: Callable[..., McpServers]) -> None:
    server = Sessions()
    try:
        episode = opened(away={"url": server.url}).episode()
        assert call(episode, "count")[0].content == "1"
        server.counts.clear()
        lost = "Error: it has ended the session, and the state that it kept for it is lost"
        assert [one.content for one in call(episode, "count", "count")] == [lost, lost]
        episode.close()
    finally:
        server.close()


def test_loopback_is_reached_without_a_proxy(
    opened: Callable[..., McpServers], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server = Sessions()
    try:
        episode = opened(away={"url": server.url}).episode()
        assert call(episode, "count")[0].content == "1"
        episode.close()
    finally:
        server.close()


def test_faults_of_the_file(written: Callable[..., str], tmp_path: Path) -> None:
    path = written(
        a={"command": "x", "url": "http://y"},
        b={"url": "ftp://y"},
        c={"command": "x", "argz": [], "args": [1], "shared": "yes"},
        d=3,
        e={"command": "x", "env": {"KEY": "${NOT_THERE}"}},
        f={"command": "x", "type": "http"},
        g={"url": 5, "type": []},
    )
    with pytest.raises(UsageError) as caught:
        read_servers(path)
    said = [one.removeprefix(f"--mcp_servers {path}: ") for one in caught.value.faults]
    assert said == [
        "a: expected either command or url",
        "b: url ftp://y does not begin with http:// or https://",
        "c: argz: no such field; there are type, command, args, env, cwd, url, headers, shared, tools",
        "c: args has a value that is not text",
        "c: shared is a str",
        "d: an int, not an object",
        "e: there is no environment variable NOT_THERE",
        "f: type http does not go with command: stdio, http, streamable-http",
        "g: type is a list",
        "g: url is an int",
    ]
    nulls = dict.fromkeys(("args", "env", "cwd", "url", "type", "shared", "tools"))
    assert read_servers(written(a={"command": "x"} | nulls)) == [McpServer("a", ("x",))]
    for text, says in (
        ("{", "is not JSON"),
        ("[]", "expected"),
        ('{"mcpServers": {}}', "expected"),
    ):
        (tmp_path / "servers.json").write_text(text)
        with pytest.raises(UsageError, match=says):
            read_servers(path)
    with pytest.raises(UsageError, match="No such file"):
        read_servers(str(tmp_path / "nowhere.json"))


def test_servers_that_do_not_start_and_names_that_are_taken(written: Callable[..., str]) -> None:
    path = written(
        gone={"command": "no-such-program-at-all"},
        quits={"command": sys.executable, "args": ["-c", "raise SystemExit('no key')"]},
        lacks=PROGRAM | {"tools": ["count", "nothing"]},
        again=PROGRAM | {"tools": ["count"]},
    )
    with pytest.raises(UsageError) as caught:
        register_servers(path)
    gone, quits, lacks, again = caught.value.faults
    assert gone.startswith("MCP server gone: ") and "no-such-program-at-all: No such file" in gone
    assert quits.startswith("MCP server quits: ") and quits.endswith("its last line: no key")
    assert lacks.startswith("MCP server lacks has no tool nothing; it has count, dies")
    assert again.startswith("the MCP servers lacks and again both have a tool count")
    assert server_tools() == []


def test_a_scheduler_that_would_not_call_them_is_refused() -> None:
    words = ["--rlhf_type", "grpo", "--model", "m", "--dataset", "d", "--reward_funcs", "format"]
    words += ["--mcp_servers", "servers.json", "--max_turns", "2"]
    assert parse_arguments(RlhfArguments, words).calls_tools
    with pytest.raises(UsageError, match="--mcp_servers has no effect with another"):
        parse_arguments(RlhfArguments, [*words, "--multi_turn_scheduler", "math_tip_trick"])


def test_a_package_that_cannot_be_imported_is_said(
    written: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mcp.py").write_text("raise SystemExit('it is broken')\n")
    for name in [one for one in sys.modules if one.partition(".")[0] == "mcp"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"MCP server one: .*it is broken"):
        register_servers(written(one=PROGRAM))
