"""What is refused before a route sees it: requests without their key, and those that are too large."""

from __future__ import annotations

import hmac
import re

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swift_r1.flags.server import LOOPBACK
from swift_r1.serving.answers import error_answer
from swift_r1.serving.sessions.store import SessionStore
from swift_r1.wire.protocol import HTTPError
from swift_r1.wire.sessions import SESSION_KEY

MAX_BODY_BYTES = 64 << 20
MAX_HEADER_BYTES = 32 << 10
_SESSION_PATH = re.compile(r"/v1/sessions/([^/]*)/v1/")
_PORT = re.compile(r":\d*$")
_BUCKET_PATH = "/v1/weights/bucket"  # its bodies have a limit of their own


class RequireKey:
    """Refuses requests without the key before their body is read; `/health` is free. Behind the address of a session
    its own key is enough, which opens nothing else; it is the only one there where the server has none.

    Args:
        api_key: the server's, None where everybody may speak to it.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, sessions: SessionStore) -> None:
        self._app = app
        self._sessions = sessions
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._refusal(scope) if scope["type"] == "http" else None
        await (refused or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        path = scope["path"]
        if path == "/health" or (self._expected is not None and hmac.compare_digest(given, self._expected)):
            return None
        if given.startswith(f"Bearer {SESSION_KEY}".encode()):
            own = _SESSION_PATH.match(path)
            if own is None:
                return error_answer(401, "the key of a session opens only its own address", path=path)
            try:
                expected = self._sessions.get(own[1]).key
            except HTTPError as error:
                return error_answer(error.status, error.message, error.retry_after, path)
            if not hmac.compare_digest(given, f"Bearer {expected}".encode()):
                return error_answer(401, "this is the key of another session", path=path)
        elif self._expected is not None:
            return error_answer(401, "this server needs its API key (Authorization: Bearer ...)", path=path)
        return None


class RefuseOtherSites:
    """Refuses what a page in a browser of this machine sends: without a key nothing else keeps it from a server on
    loopback. A name that somebody's DNS points here is no name of it (DNS rebinding, 421), and a page of another site
    says so by its Origin (403)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._refusal(scope) if scope["type"] == "http" else None
        await (refused or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"] if name in (b"host", b"origin")}
        host = headers.get(b"host")
        origin = headers.get(b"origin")
        path = scope["path"]
        if host is not None and _PORT.sub("", host).strip("[]") not in LOOPBACK:
            return error_answer(421, "without --api_key it is 127.0.0.1 and localhost alone", path=path)
        if origin is not None and origin.partition("://")[2] != host:
            return error_answer(403, "a page of another site may not use a server without --api_key", path=path)
        return None


class LimitSizes:
    """Refuses large headers (431) and bodies (413) before they are read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"the body is larger than {MAX_BODY_BYTES} bytes"
        read = 0

        async def counted() -> Message:
            nonlocal read
            part = await receive()
            read += len(part.get("body", b""))
            if read > MAX_BODY_BYTES:
                raise HTTPException(413, message)  # FastAPI lets its own exception through while it reads a body
            return part

        answer = self._app
        source = receive
        if scope["type"] == "http":
            path = scope["path"]
            headers = scope["headers"]
            promised = next((value for name, value in headers if name == b"content-length"), b"0")
            if sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
                answer = error_answer(431, f"the headers are larger than {MAX_HEADER_BYTES} bytes", path=path)
            elif path != _BUCKET_PATH and promised.isdigit() and int(promised[:20]) > MAX_BODY_BYTES:
                answer = error_answer(413, message, path=path)
            elif path != _BUCKET_PATH:
                source = counted
        await answer(scope, source, send)
