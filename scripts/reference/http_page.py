"""docs/http.md: the routes of `swift rollout`, from its OpenAPI document."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from http_examples import ANSWERS, BODIES, TOKEN
from messages import BY_NAME, message, typed
from text import MADE, table

from swift_r1.flags.server import RolloutArguments
from swift_r1.serving.answers import WHY
from swift_r1.serving.routes import create_app
from swift_r1.serving.service import Lifecycle
from swift_r1.wire import protocol

_INTRODUCTION = f"""{MADE}
# HTTP API

The routes of `swift rollout`. A running server has them as an OpenAPI document at `GET /openapi.json`;
[server.md](server.md) says what they guarantee. Examples are for a server on this machine without a key:

```text
swift rollout --model models/smollm2-135m --port 8000
```

- **Keys.** A server with `--api_key` (or `SWIFT_API_KEY`) wants it with every request but `GET /health`:
  `-H "Authorization: Bearer $SWIFT_API_KEY"`. The key of a session opens the address of that session alone. Anthropic's
  clients send it as `x-api-key`.
- **Bodies** are JSON in UTF-8, at most 64 MiB. A field that is not listed is refused. `null` may stand for a field that
  OpenAI's routes have and a request does not need.
- **Answers** are JSON. A refusal is `{{"error": "one plain sentence"}}`; on OpenAI's and Anthropic's routes it is
  their error object, and what is not valid is 400 there, not 422.
- **Try again** where the status is 503, after the seconds of its header `Retry-After` if there is one. A 503 of a full
  server has `X-Swift-Full` too. The others will not go away by themselves.
"""
_SECTIONS = {
    "State": ("/health", "/ready", "/info", "/metrics"),
    "OpenAI": ("/v1/models", "/v1/models/{name}", "/v1/chat/completions", "/v1/completions"),
    "Generation for a trainer": ("/v1/rollouts", "/v1/images", "/v1/score"),
    "Sessions": ("/v1/sessions",),
    "Weights": ("/v1/weights",),
    "Sleep": ("/v1/sleep", "/v1/wake"),
}
_ABOUT = {
    "OpenAI": "Any OpenAI client works: its base URL is `http://127.0.0.1:8000/v1`. The agents of a training are given "
    "such an address too, as `OPENAI_BASE_URL`: that of a session, here or in the trainer ([agents.md](agents.md)).",
    "Generation for a trainer": "Token ids in, token ids out. `swift rlhf` and `swift eval` speak it; "
    "`swift_r1/wire/client.py` is a client in Python.",
    "Sessions": "An address of its own for an agent, where every call is recorded ([agents.md](agents.md)).",
    "Weights": "A trainer's. `swift_r1/sync/writer.py` is the client, and `swift rlhf` its user; what a "
    "version is and when it is served is in [server.md](server.md).",
    "Sleep": "For an engine on the trainer's own GPU ([scaling.md](scaling.md#taking-turns-on-a-gpu)).",
}
_OTHERS = """## Other addresses

`swift view` has pages for people, no API: `/`, `/completions`, `/group`, `/tokens`, `/prompt` and
`/time`, each with what its controls say in the address, and `GET /health`
([seeing-a-run.md](seeing-a-run.md)). With a key a browser shows it once, as `?key=`; other clients send
`Authorization: Bearer KEY`.
"""
_PATHS = {"{session}": "task-17", "{name}": "models/smollm2-135m"}
_NO_LEASE = (("post", "/v1/weights/lease"), ("get", "/v1/weights/update"))
_NO_EXAMPLE = ("/v1/sleep", "/v1/wake")  # they need a GPU


def page() -> str:
    document = create_app(Lifecycle(RolloutArguments(), lambda: None), "key").openapi()  # type: ignore[arg-type, return-value]
    paths: Mapping[str, Mapping[str, Any]] = document["paths"]
    parts, used, texts = [_INTRODUCTION], set[str](), dict[str, str]()
    rows = [
        (f"[`{m.upper()} {path}`](#{_slug(m, path)})", one["summary"])
        for m, path, one in _all(paths)
    ]
    parts += [table(("route", "what it does"), rows), "", "## Statuses", ""]
    parts += [table(("status", "why"), ((str(status), why) for status, why in WHY.items())), ""]
    for title in _SECTIONS:
        parts += [f"## {title}", ""] + ([_ABOUT[title], ""] if title in _ABOUT else [])
        if title == "Weights":
            parts += ["```text", _protocol(), "```", ""]
        for method, path, operation in _all(paths):
            if _section(path) == title:
                parts += _route(method, path, operation, used)
    parts += ["## Messages", ""]
    shown: set[str] = set()
    while left := sorted(used - shown):
        shown.add(left[0])
        text, held = message(BY_NAME[left[0]])
        used |= held
        texts[left[0]] = text
    parts += [part for name in sorted(texts) for part in (texts[name], "")]
    return "\n".join([*parts, _OTHERS])


def _all(paths: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Every operation, by sections, and so that the examples work one after another."""
    order, last = [*_SECTIONS], ("/v1/sessions/{session}", "/v1/weights/lease")
    found = [
        (method, path, operation)
        for path, own in paths.items()
        for method, operation in own.items()
    ]

    def place(one: tuple[str, str, object]) -> tuple[int, int]:
        method, path, _ = one
        when = 0 if path == "/v1/sessions" else 1 if path not in last or method == "post" else 2
        return order.index(_section(path)), 3 if method == "delete" else when

    yield from sorted(found, key=place)


def _section(path: str) -> str:
    """The one that names the path, or the longest beginning of it."""
    fits = [
        (len(one), title)
        for title, known in _SECTIONS.items()
        for one in known
        if path.startswith(one)
    ]
    return max(fits)[1]


def _slug(method: str, path: str) -> str:
    return re.sub(r"[^\w-]", "", f"{method} {path}".replace(" ", "-")).lower()


def _route(method: str, path: str, operation: Mapping[str, Any], used: set[str]) -> list[str]:
    about = f"{operation['summary']}. {operation.get('description', '')}".strip()
    keys = [name for one in operation.get("security", ()) for name in one]
    key = {0: "none needed", 1: "the server's", 2: "the server's or the session's"}[len(keys)]
    facts = [f"- key: {key}"]
    body = operation.get("requestBody", {}).get("content", {})
    for kind, content in body.items():
        facts.append(f"- body: {typed(content['schema'], used) if 'schema' in content else kind}")
    for one in operation.get("parameters", ()):
        where = f"{one['in']} `{one['name']}`: {typed(one['schema'], used)}"
        facts.append(f"- {where}{'' if one.get('required') else ' (optional)'}")
    answers = operation["responses"]
    for kind, content in answers["200"].get("content", {}).items():
        schema = content.get("schema", {})
        facts.append(f"- answer: {typed(schema, used) if '$ref' in schema else kind}")
    parts = [f"### {method.upper()} {path}", "", about, "", *facts, ""]
    if path not in _NO_EXAMPLE and (method in ("get", "delete") or path in BODIES):
        parts += ["```bash", _example(method, path), "```", ""]
    if path in ANSWERS:
        parts += ["```json", json.dumps(ANSWERS[path], indent=2), "```", ""]
    return parts


def _example(method: str, path: str) -> str:
    address = path
    for name, value in _PATHS.items():
        address = address.replace(name, value)
    words = (
        ["curl -s"]
        + ([f"-X {method.upper()}"] if method == "delete" else [])
        + [f"localhost:8000{address}"]
    )
    if path.startswith("/v1/weights") and (method, path) not in _NO_LEASE:
        words.append(f"-H '{protocol.LEASE_HEADER}: {TOKEN}'")
    text = " ".join(words)
    if method == "post":
        text += f" -H 'Content-Type: application/json' \\\n  -d '{json.dumps(BODIES[path])}'"
    return text


def _protocol() -> str:
    """The sequence of calls of an update, as the module of the protocol draws it."""
    drawn = (protocol.__doc__ or "").partition("::\n\n")[2].partition("\n\nEvery call")[0]
    return "\n".join(line.removeprefix("    ") for line in drawn.splitlines())
