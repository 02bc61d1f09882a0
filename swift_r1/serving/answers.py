"""Answers of the server: errors are one plain sentence, in OpenAI's or Anthropic's shape on their paths; and what is
refused before a route sees it."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swift_r1.flags.server import LOOPBACK
from swift_r1.serving.openai_messages import error as openai_error
from swift_r1.serving.sessions.store import SessionStore
from swift_r1.wire import protocol as wire
from swift_r1.wire.protocol import EngineDead, HTTPError, ImagesMissing, Overloaded
from swift_r1.wire.sessions import SESSION_KEY

T = TypeVar("T")
Handler = Callable[[Request], Coroutine[Any, Any, Response]]
MAX_BODY_BYTES = 64 << 20
MAX_HEADER_BYTES = 32 << 10
MAX_OBJECTS = 200_000
"""Of a JSON body; each takes a kilobyte of memory once it is read."""
MAX_NAMES = 10_000
"""Of an object of a JSON body; each may be a fault."""
_SMALL_BODY = 128 << 10  # bytes, with fewer objects and names than matter
_SESSION_PATH = re.compile(r"/v1/sessions/([^/]*)/v1/")
_PORT = re.compile(r":\d*$")
_BUCKET_PATH = "/v1/weights/bucket"  # its bodies have a limit of their own
_OPENAI = re.compile(
    r"(/v1/sessions/[^/]*)?/v1/(chat|completions|models|responses|embeddings)(?=/|$)"
)
_ANTHROPIC = re.compile(r"/v1/sessions/[^/]*/v1/messages(?=/|$)")
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


WHY = {
    400: "the body is not text in UTF-8; on OpenAI's and Anthropic's routes also: the request is not valid, "
    "or asks what the model cannot do",
    401: "the key is missing or wrong",
    403: "a limit of the session is reached",
    404: "there is no such model or session",
    409: "the lease is another trainer's, the call does not fit the server's state, or its id was used for another body",
    410: "the session has expired",
    413: "the body is too large",
    424: "images of the prompt are not here: `missing` names them",
    422: "the request is not valid: the sentence names the first field that is wrong",
    431: "the headers are larger than 32 KiB",
    499: "the client hung up (it does not see this answer)",
    500: "a defect of the server, or a load that failed; the server's log says more",
    502: "the other server did not take the weights",
    503: "not now: loading, updating, asleep, full, or the engine is dead; `Retry-After` says when to ask again",
    507: "neither memory nor disk has room for the weights",
}


def add_errors(app: FastAPI) -> None:
    @app.exception_handler(HTTPError)
    async def refused(request: Request, error: HTTPError) -> Response:
        full = {wire.FULL_HEADER: str(error.retry_after)} if isinstance(error, Overloaded) else None
        return error_answer(
            error.status, error.message, error.retry_after, request.scope["path"], headers=full
        )

    @app.exception_handler(ImagesMissing)
    async def images_missing(request: Request, error: ImagesMissing) -> Response:
        lacking = wire.LackingImages(error=error.message, missing=error.missing)
        return json_answer(lacking, error.status)

    @app.exception_handler(EngineDead)
    async def engine_dead(request: Request, error: EngineDead) -> Response:
        return error_answer(503, str(error), path=request.scope["path"])

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        found = error.errors()
        # of a value that fits no type, the type that it is nearest to
        first = max(found, key=lambda one: len(one["loc"]))
        if first["type"] == "json_invalid":  # its place is a byte
            where = ""
            sentence = f"the body is not JSON: {first['ctx']['error']} at byte {first['loc'][-1]}"
        else:
            where = ".".join(str(part) for part in first["loc"] if part not in ("body", "header"))
            sentence = f"{where or 'body'}: {first['msg']}"
        return error_answer(422, sentence, path=request.scope["path"], param=where or None)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        return error_answer(
            error.status_code, str(error.detail), path=request.scope["path"], headers=error.headers
        )

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        # nobody reads it, and no traceback
        return error_answer(499, "the client hung up", path=request.scope["path"])

    @app.exception_handler(Exception)
    async def defect(request: Request, error: Exception) -> Response:
        sentence = f"a defect of the server, its log has the traceback ({type(error).__name__})"
        return error_answer(500, sentence, path=request.scope["path"])


class _JsonRequest(Request):
    """A request whose JSON is bounded by count before it is validated, and read in a thread where it is large."""

    async def json(self) -> Any:
        """Raises HTTPException (413)."""
        body = await self.body()
        if len(body) <= _SMALL_BODY:
            return json.loads(body)
        objects = 0

        def counted(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            nonlocal objects
            objects += 1
            if len(pairs) > MAX_NAMES:
                raise HTTPException(413, f"an object of the body has more than {MAX_NAMES} names")
            if objects > MAX_OBJECTS:
                raise HTTPException(413, f"the body has more than {MAX_OBJECTS} objects")
            return dict(pairs)

        return await asyncio.to_thread(json.loads, body, object_pairs_hook=counted)


class JsonRoute(APIRoute):
    """A route whose JSON body is bounded by count."""

    def get_route_handler(self) -> Handler:
        by_fastapi = super().get_route_handler()

        async def answer(request: Request) -> Response:
            return await self._answer(_JsonRequest(request.scope, request.receive), by_fastapi)

        return answer

    async def _answer(self, request: Request, by_fastapi: Handler) -> Response:
        return await by_fastapi(request)


class BodyRoute(JsonRoute):
    """A route of path parameters, the request and perhaps a model as `body`, which is read in one step: FastAPI's steps
    take longer than the rest of an agent's call. What is not valid goes through them for their words."""

    async def _answer(self, request: Request, by_fastapi: Handler) -> Response:
        models: list[Any] = [one.field_info.annotation for one in self.dependant.body_params]
        if not models or request.headers.get("content-type") != "application/json":
            return await by_fastapi(request)
        data = await request.body()
        if len(data) > _SMALL_BODY:
            return await by_fastapi(request)
        try:
            body = models[0].model_validate_json(data)
        except ValidationError:
            return await by_fastapi(request)
        response: Response = await self.endpoint(**request.path_params, request=request, body=body)
        return response


def json_answer(body: BaseModel, status: int = 200) -> Response:
    return Response(body.model_dump_json(), status, media_type="application/json")


def error_answer(
    status: int,
    sentence: str,
    retry_after: int | None = None,
    path: str = "",
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """One sentence; in the shape of OpenAI or Anthropic (and with their 400 for what is not valid) where `path` is
    theirs."""
    headers = dict(headers or {}) | (
        {"Retry-After": str(retry_after)} if retry_after is not None else {}
    )
    spoken = _OPENAI.match(path)
    anthropic = _ANTHROPIC.match(path)
    if spoken is None and anthropic is None:
        return JSONResponse({"error": sentence}, status_code=status, headers=headers)
    status = 400 if status == 422 else status
    if spoken is None:
        return JSONResponse(anthropic_error(status, sentence), status_code=status, headers=headers)
    code = "model_not_found" if status == 404 and spoken[1] is None else None
    return JSONResponse(
        openai_error(status, sentence, param, code), status_code=status, headers=headers
    )


def anthropic_error(status: int, sentence: str) -> dict[str, Any]:
    """Anthropic's error object."""
    other = "invalid_request_error" if status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(status, other)
    return {"type": "error", "error": {"type": kind, "message": sentence}}


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client hangs up first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPError(499, "the client hung up")
        return task.result()
    except asyncio.CancelledError:
        # A handler is cancelled only when the server ends and its time to drain is over.
        raise HTTPError(503, "the server is shutting down", 5) from None
    finally:
        gone.cancel()
        task.cancel()


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"")
        if not given and b"x-api-key" in headers:  # Anthropic's clients
            given = b"Bearer " + headers[b"x-api-key"]
        path = scope["path"]
        if path == "/health" or (
            self._expected is not None and hmac.compare_digest(given, self._expected)
        ):
            return None
        if given.startswith(f"Bearer {SESSION_KEY}".encode()):
            own = _SESSION_PATH.match(path)
            if own is None:
                return error_answer(
                    401, "the key of a session opens only its own address", path=path
                )
            expected = f"Bearer {self._sessions.key_of(own[1])}".encode()
            if not hmac.compare_digest(given, expected):
                # the same of sessions that are here and of those that are not
                return error_answer(401, "this is the key of another session", path=path)
        elif self._expected is not None:
            return error_answer(
                401, "this server needs its API key (Authorization: Bearer ...)", path=path
            )
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
        headers = {
            name: value.decode("latin-1")
            for name, value in scope["headers"]
            if name in (b"host", b"origin")
        }
        host = headers.get(b"host")
        origin = headers.get(b"origin")
        path = scope["path"]
        if host is not None and _PORT.sub("", host).strip("[]") not in LOOPBACK:
            return error_answer(
                421, "without --api_key it is 127.0.0.1 and localhost alone", path=path
            )
        if origin is not None and origin.partition("://")[2] != host:
            return error_answer(
                403, "a page of another site may not use a server without --api_key", path=path
            )
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
                # FastAPI lets its own exception through while it reads a body
                raise HTTPException(413, message)
            return part

        answer = self._app
        source = receive
        if scope["type"] == "http":
            path = scope["path"]
            headers = scope["headers"]
            promised = next((value for name, value in headers if name == b"content-length"), b"0")
            if sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
                answer = error_answer(
                    431, f"the headers are larger than {MAX_HEADER_BYTES} bytes", path=path
                )
            elif (
                path != _BUCKET_PATH and promised.isdigit() and int(promised[:20]) > MAX_BODY_BYTES
            ):
                answer = error_answer(413, message, path=path)
            elif path != _BUCKET_PATH:
                source = counted
        await answer(scope, source, send)
