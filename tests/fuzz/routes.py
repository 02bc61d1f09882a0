"""`python -m tests.fuzz.routes --cases 10000`: every route of the OpenAPI documents, with values that they allow and
with such that they do not, and half of the requests of sessions in one that is open.

The application is called in this process, without a network, over an engine that answers at once and breaks where it is
given what the server should not have let through. No answer may be a 500 or another 5xx that is not documented, none
may take longer than half a minute, and each refusal is one sentence. A line for each route says how memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import psutil
import requests
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from swift_r1.flags.server import RolloutArguments
from swift_r1.rollout.agents.gateway import AgentModel, agent_app
from swift_r1.serving.openai_messages import ToolCalls
from swift_r1.serving.routes import create_app
from swift_r1.serving.service import Lifecycle
from swift_r1.serving.sessions.gateway import Gateway
from swift_r1.serving.sessions.store import SessionStore
from swift_r1.sync.update import UpdateMachine
from swift_r1.wire import protocol as wire
from swift_r1.wire.protocol import Completion, RolloutRequest
from swift_r1.wire.sessions import SessionRequest
from tests.serving.test_malformed import EXPECTED, LENGTH, VOCABULARY, QuickEngine

HANG_S = 30.0
SESSION = "fuzz"
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
# a query and a body that nobody asked for, where the others give too few cases
UNDECLARED = "UNDECLARED"
NOT_NOW = (503, 507)
# Another server would be asked, at an address that nobody has chosen; and what takes the lease itself.
LEASELESS = ("/v1/weights/relay", "/v1/weights/lease")
BATCH = 250  # cases that Hypothesis draws together; its memory of them grows


class Fault(Exception):
    """The server did what it must not."""


@dataclass
class Served:
    """An application, and the key that opens it."""

    app: FastAPI
    gateway: Gateway
    loop: asyncio.AbstractEventLoop
    key: str | None = None
    machine: UpdateMachine | None = None
    slowest: float = 0.0

    def open(self) -> None:
        self.gateway.store.open(SessionRequest(id=SESSION))

    def lease(self) -> str:
        """The token of the lease in force, which may be somebody else's by now."""
        machine, token = self.machine, "f" * 32
        assert machine is not None
        if not machine.holds(token):
            machine._lease = None
        return machine.take_lease("fuzz", 600.0, token)

    def call(self, prepared: requests.PreparedRequest) -> tuple[int, bytes]:
        """As an HTTP server would call the application."""
        parts = urlsplit(str(prepared.url))
        body = prepared.body or b""
        content = body.encode() if isinstance(body, str) else body
        headers = [
            (name.lower().encode("latin-1", "replace"), _raw(value))
            for name, value in prepared.headers.items()
            if name.lower() not in ("authorization",) or self.key is None
        ]
        if self.key is not None:
            headers.append((b"authorization", f"Bearer {self.key}".encode()))
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": str(prepared.method).upper(),
            "scheme": "http",
            "path": unquote(parts.path),
            "raw_path": parts.path.encode(),
            "query_string": parts.query.encode(),
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        answer = self.loop.run_until_complete(
            asyncio.wait_for(_called(self.app, scope, content), HANG_S)
        )
        return answer


async def _called(app: FastAPI, scope: dict[str, Any], content: bytes) -> tuple[int, bytes]:
    incoming = [{"type": "http.request", "body": content, "more_body": False}]
    over = asyncio.Event()
    status, parts = 0, []

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await over.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    finally:
        over.set()
    return status, b"".join(parts)


def _raw(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")


@contextlib.contextmanager
def rollout_server() -> Iterator[Served]:
    loop = asyncio.new_event_loop()
    lifecycle = Lifecycle(
        RolloutArguments(
            model="none",
            update_timeout=0.05,
            client_grace=0.01,
            max_sessions=64,
            session_memory=0.01,
        ),
        lambda: (QuickEngine(), EXPECTED),  # type: ignore[arg-type, return-value]
    )
    life = loop.create_task(lifecycle.run())
    while lifecycle.service is None:
        loop.run_until_complete(asyncio.sleep(0.01))
    try:
        yield Served(
            create_app(lifecycle, None), lifecycle.gateway, loop, machine=lifecycle.service.machine
        )
    finally:
        life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(life)
        lifecycle.close()
        loop.close()


@contextlib.contextmanager
def agents_gateway() -> Iterator[Served]:
    loop = asyncio.new_event_loop()
    store = SessionStore(sys.maxsize, sys.maxsize, float("inf"))
    gateway = Gateway(store)
    engine: Any = QuickEngine()
    engine.tokenizer = _Letters()

    def ask(request: RolloutRequest) -> asyncio.Future[Completion]:
        future: asyncio.Future[Completion] = loop.create_future()
        future.set_result(
            Completion(token_ids=(1,), logprobs=(-0.5,), finish_reason="length", weight_version=1)
        )
        return future

    model = AgentModel(engine, ToolCalls(None, None), LENGTH, VOCABULARY, (0,), forces_calls=False)
    model.conversations[SESSION] = cast(Any, SimpleNamespace(ask=ask))
    try:
        yield Served(agent_app(model, gateway, "key"), gateway, loop, "key")
    finally:
        loop.close()


class _Letters:
    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "a" * len(ids)


SERVERS = {"rollout": rollout_server, "gateway": agents_gateway}


def fuzz(
    name: str, cases: int, seed: int = 1, only: str | None = None, out: Path | None = None
) -> dict[str, Counter[int]]:
    """So many cases for each operation, half of them of each kind. Returns the statuses by operation. Raises Fault."""
    found: dict[str, Counter[int]] = {}
    with SERVERS[name]() as served:
        document = schemathesis.openapi.from_dict(served.app.openapi())
        document.config.base_url = "http://127.0.0.1:8000"
        operations = [one.ok() for one in document.get_all_operations()]
        for operation in operations:
            label = operation.label
            if only is not None and only not in label:
                continue
            started, before = time.monotonic(), memory()
            statuses = found[label] = Counter()
            for kind, drawn in _kinds(operation).items():
                wanted = cases - sum(statuses.values()) if kind == UNDECLARED else cases // 2
                for start in range(0, wanted, BATCH):
                    own = zlib.crc32(f"{seed}/{label}/{kind}/{start}".encode())
                    _batch(served, operation, drawn, min(BATCH, wanted - start), own, statuses)
            gc.collect()
            grown = memory() - before
            line = {
                "server": name,
                "route": label,
                "cases": sum(statuses.values()),
                "seconds": round(time.monotonic() - started, 1),
                "slowest": round(served.slowest, 2),
                "MiB": [before >> 20, grown >> 20],
                "statuses": {str(status): count for status, count in sorted(statuses.items())},
            }
            print(json.dumps(line), flush=True)
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    return found


def memory() -> int:
    return psutil.Process().memory_info().rss


def _kinds(operation: Any) -> dict[str, st.SearchStrategy[Any]]:
    """Cases, each with what else the request has."""
    kinds = {
        mode.name: st.tuples(operation.as_strategy(generation_mode=mode), st.none())
        for mode in MODES
    }
    more = st.tuples(st.dictionaries(st.text(), st.text(), max_size=3), st.binary(max_size=500))
    return kinds | {
        UNDECLARED: st.tuples(operation.as_strategy(generation_mode=GenerationMode.POSITIVE), more)
    }


def _batch(
    served: Served,
    operation: Any,
    drawn: st.SearchStrategy[Any],
    count: int,
    seed: int,
    statuses: Counter[int],
) -> None:
    turn = 0

    def examine(found: tuple[Any, tuple[dict[str, str], bytes] | None]) -> None:
        nonlocal turn
        turn += 1
        case, more = found
        if "session" in (case.path_parameters or {}) and turn % 2:
            # Else nearly all would end at the session's name.
            served.open()
            case.path_parameters["session"] = SESSION
        if "/v1/weights/" in case.path and case.path not in LEASELESS and turn % 2:
            case.headers = {**(case.headers or {}), wire.LEASE_HEADER: served.lease()}
        if (
            isinstance(case.body, dict)
            and turn % 3 == 0
            and isinstance(case.body.get("model"), str)
        ):
            case.body["model"] = "none"
        try:
            request = requests.Request(**case.as_transport_kwargs())
            if more is not None:
                request.params, request.data = {**dict(request.params or {}), **more[0]}, more[1]
                request.json = None
            prepared = request.prepare()
        except (requests.exceptions.RequestException, UnicodeError, ValueError):
            return  # not to be said in HTTP
        started = time.monotonic()
        try:
            status, body = served.call(prepared)
        except TimeoutError as error:
            raise Fault(
                f"{operation.label} was not answered in {HANG_S:g} s: {_shown(prepared)}"
            ) from error
        served.slowest = max(served.slowest, time.monotonic() - started)
        statuses[status] += 1
        if status >= 500 and status not in NOT_NOW:
            raise Fault(f"{operation.label}: {status} {body[:500]!r} for {_shown(prepared)}")
        if status >= 400 and status != 405 and not json.loads(body).get("error"):
            raise Fault(f"{operation.label}: no sentence says what is wrong: {body[:500]!r}")

    quiet = settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=[*HealthCheck]
    )
    with contextlib.suppress(Unsatisfiable):  # what has no parameters cannot be given wrongly
        seeded(seed)(quiet(given(drawn)(examine)))()


def _shown(prepared: requests.PreparedRequest) -> str:
    return f"{prepared.method} {prepared.url} {dict(prepared.headers)} {str(prepared.body)[:2000]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000, help="for each route")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--server", choices=list(SERVERS), action="append")
    parser.add_argument("--only", help="routes that contain this")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for name in args.server or list(SERVERS):
        fuzz(name, args.cases, args.seed, args.only, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
