"""Who may see the page."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from swift_r1.lab.view.access import Guard


def client(api_key: str | None, host: str = "127.0.0.1:7860", loopback: bool = True) -> TestClient:
    async def socket(connection: WebSocket) -> None:
        await connection.accept()
        await connection.close()

    async def page(_request: Any) -> PlainTextResponse:
        return PlainTextResponse("the page")

    routes = [
        Route("/health", page),
        Route("/{path:path}", page),
        WebSocketRoute("/_socket", socket),
    ]
    guard = Guard(Starlette(routes=routes), 7860, api_key, loopback=loopback)
    return TestClient(guard, base_url=f"http://{host}", follow_redirects=False)


@pytest.mark.parametrize("host", ["127.0.0.1:7860", "localhost:7860", "localhost", "[::1]:1234"])
def test_loopback_is_open_under_its_own_names(host: str) -> None:
    assert client(None, host).get("/").status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7860", "127.0.0.1.evil.example", "[::1"]
)
def test_a_name_that_points_here_gives_no_access(host: str) -> None:
    answer = client(None).get("/", headers={"host": host})
    assert answer.status_code == 421
    assert answer.text == f"this page is at 127.0.0.1 and localhost, not at {host!r}\n"


def test_another_sites_page_may_not_ask() -> None:
    own = client(None)
    assert own.get("/", headers={"origin": "http://evil.example"}).status_code == 403
    assert own.get("/", headers={"origin": "null"}).status_code == 403
    assert own.get("/", headers={"origin": "http://127.0.0.1:7860"}).status_code == 200
    with (
        pytest.raises(WebSocketDisconnect),
        own.websocket_connect("/_socket", headers={"origin": "http://evil.example"}),
    ):
        pass


def test_the_key_is_shown_once_and_then_a_cookie() -> None:
    browser = client("secret", "gpu7:7860", loopback=False)
    for path in ("/", "/?key=wrong", "/?key="):
        refused = browser.get(path)
        assert (refused.status_code, "secret" in refused.text) == (401, False)
    with pytest.raises(WebSocketDisconnect), browser.websocket_connect("/_socket"):
        pass
    assert browser.get("/health").status_code == 200
    first = browser.get("/completions?run=a%26b&key=secret&step=3")
    assert (first.status_code, first.headers["location"]) == (303, "/completions?run=a%26b&step=3")
    cookie = first.headers["set-cookie"]
    assert "secret" not in cookie
    assert all(part in cookie for part in ("HttpOnly", "SameSite=strict"))
    assert browser.get("/completions").status_code == 200  # the client has kept the cookie
    with browser.websocket_connect("ws://gpu7:7860/_socket"):
        pass


def test_the_key_as_a_header_and_no_way_out_through_the_first_visit() -> None:
    other = client("secret", "gpu7", loopback=False)
    assert other.get("/", headers={"authorization": "Bearer secret"}).status_code == 200
    assert other.get("/", headers={"authorization": "Bearer secre"}).status_code == 401
    assert other.get("/%2Fevil.example/?key=secret").headers["location"] == "/evil.example/"


def test_a_page_may_load_nothing_from_elsewhere() -> None:
    headers = client(None).get("/").headers
    assert headers["content-security-policy"].startswith("default-src 'self'")
    assert "http" not in headers["content-security-policy"]
    assert headers["referrer-policy"] == "no-referrer"
