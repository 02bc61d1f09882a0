"""The reward over HTTP, against a real server: what it sends, what it makes of every kind of answer."""

from __future__ import annotations

import importlib.util
import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swift_r1.errors import UsageError
from swift_r1.rewards.orm import build_reward
from swift_r1.rewards.pool import RewardPool
from swift_r1.rewards.types import RewardBatch, RewardColumn


class Server(ThreadingHTTPServer):
    """Answers by what the path says; keeps what it was sent. `release` ends the answers that never come."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[dict[str, Any], str]] = []
        self.connections: set[int] = set()
        self.release = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"  # connections stay

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.connections.add(self.client_address[1])
        self.server.seen.append((body, self.headers.get("Authorization", "")))
        lengths = [float(len(text)) for text in body["completions"]]
        code, answer = {
            "/good": (200, {"rewards": lengths}),
            "/none": (200, {"rewards": [None] * len(lengths)}),
            "/short": (200, {"rewards": lengths[1:]}),
            "/number": (200, {"rewards": 1.0}),
            "/list": (200, lengths),
            "/nan": (200, {"rewards": [math.nan] * len(lengths)}),
            "/refused": (401, {"detail": "wrong token"}),
            "/flaky": (503 if len(self.server.seen) < 3 else 200, {"rewards": lengths}),
            "/text": (200, None),
            "/never": (200, {"rewards": lengths}),
        }[self.path]
        if self.path == "/never":
            self.server.release.wait(60)
        data = b"<html>" if answer is None else json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.release.set()
        running.shutdown()
        thread.join()


def ask(url: str, timeout: float = 5.0, times: int = 1) -> RewardColumn:
    args = SimpleNamespace(reward_api=url, reward_timeout=timeout, reward_num_workers=1)
    args.reward_memory_limit, args.reward_env = 2.0, []
    batch = RewardBatch(
        ["a", "b\ud800b"], {"solution": ["1", 2], "messages": [[], []]}, 2, {"global_step": 3}
    )
    with RewardPool(args, ["api"]) as pool:
        return [pool.score(batch)[0] for _ in range(times)][-1]


def test_what_is_sent_and_taken(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFT_REWARD_API_TOKEN", "secret")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert ask(f"{server.url}/good").values == (1.0, 3.0)
    ((body, authorization),) = server.seen
    assert authorization == "Bearer secret"
    assert body["completions"] == ["a", "b\ud800b"] and body["columns"]["solution"] == ["1", 2]
    assert body["trainer_state"] == {"global_step": 3}
    assert ask(f"{server.url}/none").values == (None, None)


def test_calls_share_a_connection(server: Server) -> None:
    assert ask(f"{server.url}/good", times=3).values == (1.0, 3.0)
    assert len(server.seen) == 3 and len(server.connections) == 1


def test_a_busy_server_is_asked_again(server: Server) -> None:
    assert ask(f"{server.url}/flaky").values == (1.0, 3.0)
    assert len(server.seen) == 3


@pytest.mark.parametrize(
    ("path", "cause", "kind"),
    [
        ("/short", "returned 1 values for 2 completions", "shape"),
        ("/number", "a list of rewards", "exception"),
        ("/list", "a list of rewards", "exception"),
        ("/nan", "nan is not a finite number", "value"),
        ("/text", "not JSON", "exception"),
        ("/refused", "answered 401", "exception"),
        ("/never", "no answer within", "timeout"),
    ],
)
def test_bad_answers_are_invalid(server: Server, path: str, cause: str, kind: str) -> None:
    column = ask(server.url + path, timeout=1.0)
    assert [bad.index for bad in column.invalid] == [0, 1]
    assert all(cause in bad.cause and bad.kind == kind for bad in column.invalid), column.invalid
    if path == "/refused":  # not asked again: once for the group, once for each completion
        assert len(server.seen) == 3


def test_nobody_there(server: Server) -> None:
    free = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    url = f"http://127.0.0.1:{free.server_address[1]}/good"
    free.server_close()
    column = ask(url)
    assert all("ConnectError" in bad.cause for bad in column.invalid) and len(column.invalid) == 2


def test_the_flag_is_needed() -> None:
    with pytest.raises(UsageError, match="needs --reward_api"):
        build_reward("api", SimpleNamespace(reward_api=None))


def test_the_example_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi.testclient import TestClient

    monkeypatch.setenv("SWIFT_REWARD_API_TOKEN", "secret")
    path = Path(__file__).parents[2] / "examples" / "reward_server" / "server.py"
    spec = importlib.util.spec_from_file_location("reward_server", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "reward_server", module)
    spec.loader.exec_module(module)
    client = TestClient(module.app)
    body = {"completions": ["so 5", "so 6"], "columns": {"solution": ["5", "5"]}}
    assert client.post("/rewards", json=body).status_code == 401
    answer = client.post("/rewards", json=body, headers={"Authorization": "Bearer secret"})
    assert answer.json() == {"rewards": [1.0, 0.0]}
