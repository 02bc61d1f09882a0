"""A model that follows a script, behind an OpenAI client: an environment is tried with it before there is a model."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any

from swift_r1.plugins.environments.base import Script

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_MOST_CALLS = 5  # turns in which the script calls tools, before it answers
MOST_TURNS = 250  # then it refuses, as a session does whose calls are used up
_WORDS = ("left", "right", "up", "down", "hello", "apple", "42")


class ScriptedModel:
    """Calls a random tool with random arguments in its first turns, where there are tools and it may; else it says what
    the script says. Nothing that it writes depends on anything but the script, `seed` and the requests.

    Attributes:
        requests: the bodies of all requests, in order.
        answers: the messages that it gave to each of them; None for a plain completion.
        messages: of the last request, and the answer.
    """

    def __init__(self, script: Script, seed: int, calls_tools: bool = True) -> None:
        self._script = script
        self._chance = random.Random(seed)
        self._calls_tools = calls_tools
        self.requests: list[dict[str, Any]] = []
        self.answers: list[dict[str, Any] | None] = []
        self.messages: list[dict[str, Any]] = []

    @contextmanager
    def client(self) -> Iterator[AsyncOpenAI]:
        """Yields a client of `serve`."""
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        with self.serve() as url:
            http = DefaultAsyncHttpxClient(trust_env=False)
            yield AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=http)

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Yields the address, on loopback, that is this model's as long as the context lasts."""
        model = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._tell(200, {"object": "list", "data": [{"id": "policy", "object": "model"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path.endswith("/completions"):
                    self._tell(*model.respond(body))
                else:
                    sentence = f"the script speaks chat completions alone, not {self.path}"
                    self._tell(404, {"error": {"message": sentence}})

            def _tell(self, status: int, content: Mapping[str, Any]) -> None:
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None: ...

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            server.daemon_threads = True
            Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            try:
                yield f"http://127.0.0.1:{server.server_port}/v1"
            finally:
                server.shutdown()

    def respond(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Returns the status and the content of a response."""
        if len(self.requests) == MOST_TURNS:
            return 403, {"error": {"message": f"the script's {MOST_TURNS} turns are used up"}}
        return 200, self.answer(body)

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns what a server says to a request for a chat completion, or for a completion."""
        self.requests.append(body)
        turn = len(self.requests)
        said = {"id": f"script-{turn}", "created": 0, "model": "policy"}
        if "prompt" in body:
            text = self._script(self._chance)
            self.messages = [
                {"role": "user", "content": body["prompt"]},
                {"role": "assistant", "content": text},
            ]
            choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": "stop"}
            self.answers.append(None)
            return said | {"object": "text_completion", "choices": [choice]}
        message: dict[str, Any] = {"role": "assistant", "content": None}
        calls = bool(body.get("tools")) and self._calls_tools and turn <= _MOST_CALLS
        if calls:
            function = self._chance.choice(body["tools"])["function"]
            arguments = json.dumps(sample(function.get("parameters") or {}, self._chance))
            call = {"name": function["name"], "arguments": arguments}
            message["tool_calls"] = [
                {"id": f"call{turn:05d}", "type": "function", "function": call}
            ]
        else:
            message["content"] = self._script(self._chance)
        self.messages = [*body["messages"], message]
        self.answers.append(message)
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if calls else "stop",
        }
        return said | {"object": "chat.completion", "choices": [choice]}


def sample(
    schema: Mapping[str, Any], chance: random.Random, root: Mapping[str, Any] | None = None
) -> Any:
    """Returns a random value that a JSON schema allows; `root` has the definitions that it refers to (default:
    itself)."""
    root = schema if root is None else root
    if "$ref" in schema:
        found: Any = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        return sample(found, chance, root)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return chance.choice(schema["enum"])
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return sample(options[0], chance, root)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        properties = schema.get("properties", {})
        required = schema.get("required", ())
        return {
            name: sample(about, chance, root)
            for name, about in properties.items()
            if name in required
        }
    if kind == "array":
        return [sample(schema.get("items") or {}, chance, root)]
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
        return chance.randint(int(low), int(schema.get("maximum", low + 9)))
    return {"boolean": chance.random() < 0.5, "null": None}.get(kind, chance.choice(_WORDS))
