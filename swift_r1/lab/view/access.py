"""Who may see the page (on loopback under its own names alone; with a key who has shown it), and what it may load."""

from __future__ import annotations

import hmac
import re
import secrets
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from swift_r1.flags.server import LOOPBACK

_PORT = re.compile(r":\d*$")
_REFUSED = 1008  # the code of a WebSocket that is closed for a policy
_HEADERS = {
    # Completions are a model's text: nothing in them may load or send anything, even where they became markup.
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; frame-ancestors 'none'; "
    "form-action 'none'; base-uri 'none'; object-src 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Guard:
    """ASGI middleware around the whole page, its files and its WebSocket; `/health` alone is free.

    A browser shows the key once, as `?key=`, and gets a cookie that ends with this process; other clients send
    `Authorization: Bearer KEY`. On loopback a request must name it as its host: a name that an attacker's DNS points
    here gives no access (DNS rebinding). A request that another site's page makes is refused by its Origin.
    """

    def __init__(
        self,
        app: ASGIApp,
        port: int,
        api_key: str | None,
        *,
        loopback: bool,
    ) -> None:
        self._app = app
        self._key = api_key
        self._loopback = loopback
        self._cookie = f"swift_view_{port}"
        self._session = secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] == "/health":
            await self._app(scope, receive, send)
            return
        request = HTTPConnection(scope)
        answer: ASGIApp | None = self._refusal(request) or self._first_visit(request)
        if answer is None:
            await self._app(scope, receive, _with_headers(send))
        elif scope["type"] == "http":
            await answer(scope, receive, send)
        else:
            await WebSocketClose(_REFUSED)(scope, receive, send)

    def _refusal(self, request: HTTPConnection) -> ASGIApp | None:
        host = request.headers.get("host", "")
        if self._loopback and _PORT.sub("", host).strip("[]") not in LOOPBACK:
            return PlainTextResponse(
                f"this page is at 127.0.0.1 and localhost, not at {host!r}\n", 421
            )
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return PlainTextResponse("another site's page may not read this one\n", 403)
        if self._key is None or self._is_known(request):
            return None
        return PlainTextResponse(
            "this page needs its key: ?key=..., or Authorization: Bearer ...\n", 401
        )

    def _is_known(self, request: HTTPConnection) -> bool:
        given = request.headers.get("authorization", "")
        return (
            _same(request.cookies.get(self._cookie, ""), self._session)
            or _same(given, f"Bearer {self._key}")
            or _same(request.query_params.get("key", ""), str(self._key))
        )

    def _first_visit(self, request: HTTPConnection) -> ASGIApp | None:
        """Sends a browser that shows the key in the address on without it there."""
        if (
            self._key is None
            or "key" not in request.query_params
            or request.scope["type"] != "http"
        ):
            return None
        address = "/" + request.url.path.lstrip("/")
        others = [
            (name, value) for name, value in parse_qsl(request.url.query, True) if name != "key"
        ]
        if others:
            address += f"?{urlencode(others)}"
        answer = RedirectResponse(address, 303)
        if _same(request.query_params["key"], self._key):
            answer.set_cookie(self._cookie, self._session, httponly=True, samesite="strict")
        return answer


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(_HEADERS)
        await send(message)

    return sending
