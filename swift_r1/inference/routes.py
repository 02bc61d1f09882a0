"""HTTP: each route is one call of `RolloutService` or its `WeightUpdates`; errors are one plain sentence."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Coroutine, Mapping
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swift_r1.inference.metrics import CountAnswers
from swift_r1.inference.openai_messages import error as openai_error
from swift_r1.inference.openai_routes import PATHS as OPENAI_PATHS
from swift_r1.inference.openai_routes import add_openai
from swift_r1.inference.service import Lifecycle
from swift_r1.inference.updates import WeightUpdates
from swift_r1.wire import protocol as wire
from swift_r1.wire.protocol import EngineDead, HTTPError, Overloaded

T = TypeVar("T")
MAX_BODY_BYTES = 64 << 20
MAX_HEADER_BYTES = 32 << 10
_BUCKET_PATH = "/v1/weights/bucket"  # its bodies have a limit of their own
LeaseToken = Annotated[str | None, Header(alias=wire.LEASE_HEADER)]


def create_app(lifecycle: Lifecycle, api_key: str | None) -> FastAPI:
    """The server's ASGI application."""
    app = FastAPI(title="swift rollout", docs_url=None, redoc_url=None)
    _add_errors(app)
    _add_state(app, lifecycle)
    _add_generation(app, lifecycle)
    _add_weights(app, lifecycle)
    add_openai(app, lifecycle, _unless_gone)
    # The last one added is the first to see a request.
    app.add_middleware(_LimitSizes)
    app.add_middleware(CountAnswers, metrics=lifecycle.metrics)
    if api_key is not None:
        app.add_middleware(_RequireKey, api_key=api_key)
    return app


def _add_state(app: FastAPI, lifecycle: Lifecycle) -> None:
    @app.get("/health")
    async def health() -> Response:
        if lifecycle.dead is not None:
            return _error(503, lifecycle.dead)
        if lifecycle.service is None:
            return JSONResponse({"status": "loading the model"})
        return JSONResponse({"status": "asleep" if lifecycle.service.updates.sleeping.level else "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        why = lifecycle.why_not_ready
        return JSONResponse({"status": "ready"}) if why is None else _error(503, why, 1)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(lifecycle.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/info", response_model=wire.ServerInfo)
    async def info() -> Response:
        return _json(lifecycle.loaded().info())


def _add_generation(app: FastAPI, lifecycle: Lifecycle) -> None:
    @app.post("/v1/rollouts", response_model=wire.RolloutResponse)
    async def rollouts(request: Request, batch: wire.RolloutBatch, lease: LeaseToken = None) -> Response:
        return _json(await _unless_gone(request, lifecycle.loaded().rollouts(batch, lease)))

    @app.post("/v1/score", response_model=wire.ScoreResponse)
    async def score(request: Request, body: wire.ScoreRequest, lease: LeaseToken = None) -> Response:
        return _json(await _unless_gone(request, lifecycle.loaded().score(body, lease)))


def _add_weights(app: FastAPI, lifecycle: Lifecycle) -> None:
    def updates() -> WeightUpdates:
        return lifecycle.loaded().updates

    @app.post("/v1/weights/lease", response_model=wire.Lease)
    async def take_lease(body: wire.LeaseRequest) -> Response:
        return _json(await updates().take_lease(body))

    @app.delete("/v1/weights/lease", response_model=wire.UpdateStatus)
    async def release_lease(lease: LeaseToken = None) -> Response:
        return _json(await updates().release_lease(lease))

    @app.post("/v1/weights/begin", response_model=wire.UpdateStatus)
    async def begin(body: wire.UpdateBegin, lease: LeaseToken = None) -> Response:
        return _json(await updates().begin(lease, body))

    @app.put("/v1/weights/bucket", response_model=wire.UpdateStatus)
    async def bucket(
        request: Request,
        version: Annotated[int, Header(alias=wire.VERSION_HEADER, ge=1)],
        index: Annotated[int, Header(alias=wire.BUCKET_HEADER, ge=0)],
        digest: Annotated[str | None, Header(alias=wire.DIGEST_HEADER, pattern="^[0-9a-f]{32}$")] = None,
        base: Annotated[str | None, Header(alias=wire.BASE_HEADER, pattern="^[0-9a-f]{32}$")] = None,
        lease: LeaseToken = None,
    ) -> Response:
        length = request.headers.get("content-length", "")
        size = int(length) if length.isdigit() else 0
        return _json(await updates().bucket(lease, version, index, digest, request.stream(), base, size))

    @app.post("/v1/weights/file", response_model=wire.UpdateStatus)
    async def file(body: wire.BucketFile, lease: LeaseToken = None) -> Response:
        return _json(await updates().file(lease, body))

    @app.post("/v1/weights/channel", response_model=wire.UpdateStatus)
    async def channel(body: wire.ChannelRequest, lease: LeaseToken = None) -> Response:
        return _json(await updates().channel(lease, body))

    @app.post("/v1/weights/stream", response_model=wire.UpdateStatus)
    async def stream(body: wire.StreamedBucket, lease: LeaseToken = None) -> Response:
        return _json(await updates().stream(lease, body))

    @app.post("/v1/weights/relay", response_model=wire.RelayStatus)
    async def relay(body: wire.RelayRequest, lease: LeaseToken = None) -> Response:
        return _json(await updates().relays.relay(lease, body))

    @app.get("/v1/weights/update", response_model=wire.UpdateStatus)
    async def update() -> Response:
        return _json(updates().status())

    @app.post("/v1/weights/commit", response_model=wire.UpdateStatus)
    async def commit(body: wire.UpdateCommit, lease: LeaseToken = None) -> Response:
        return _json(await updates().commit(lease, body))

    @app.post("/v1/weights/abort", response_model=wire.UpdateStatus)
    async def abort(body: wire.UpdateAbort, lease: LeaseToken = None) -> Response:
        return _json(await updates().abort(lease, body))

    @app.post("/v1/sleep", response_model=wire.SleepStatus)
    async def sleep(body: wire.SleepRequest, lease: LeaseToken = None) -> Response:
        return _json(await updates().sleeping.sleep(lease, body))

    @app.post("/v1/wake", response_model=wire.SleepStatus)
    async def wake(lease: LeaseToken = None) -> Response:
        return _json(await updates().sleeping.wake(lease))


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(HTTPError)
    async def refused(request: Request, error: HTTPError) -> Response:
        full = {wire.FULL_HEADER: str(error.retry_after)} if isinstance(error, Overloaded) else None
        return _error(error.status, error.message, error.retry_after, request.scope["path"], headers=full)

    @app.exception_handler(EngineDead)
    async def engine_dead(request: Request, error: EngineDead) -> Response:
        return _error(503, str(error), path=request.scope["path"])

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first, *others = error.errors()
        # "body", 12 is pydantic's way to say: no JSON at byte 12.
        where = ".".join(str(part) for part in first["loc"] if part not in ("body", "header"))
        more = f" (and {len(others)} more)" if others else ""
        return _error(422, f"{where or 'body'}: {first['msg']}{more}", path=request.scope["path"], param=where or None)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        return _error(error.status_code, str(error.detail), path=request.scope["path"], headers=error.headers)

    @app.exception_handler(Exception)
    async def defect(request: Request, error: Exception) -> Response:
        sentence = f"a defect of the server, its log has the traceback ({type(error).__name__})"
        return _error(500, sentence, path=request.scope["path"])


def _json(body: BaseModel) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")


def _error(
    status: int,
    sentence: str,
    retry_after: int | None = None,
    path: str = "",
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """One sentence; in OpenAI's shape (and with its 400 for what is not valid) where `path` is OpenAI's."""
    headers = dict(headers or {}) | ({"Retry-After": str(retry_after)} if retry_after is not None else {})
    if not path.startswith(OPENAI_PATHS):
        return JSONResponse({"error": sentence}, status_code=status, headers=headers)
    status = 400 if status == 422 else status
    code = "model_not_found" if status == 404 else None
    return JSONResponse(openai_error(status, sentence, param, code), status_code=status, headers=headers)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
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


class _RequireKey:
    """Refuses requests without the key before their body is read; `/health` is free."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = self._app
        if scope["type"] == "http" and scope["path"] != "/health":
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(given, self._expected):
                answer = _error(401, "this server needs its API key (Authorization: Bearer ...)", path=scope["path"])
        await answer(scope, receive, send)


class _LimitSizes:
    """Refuses large headers (431) and bodies (413) before they are read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message, read = f"the body is larger than {MAX_BODY_BYTES} bytes", 0

        async def counted() -> Message:
            nonlocal read
            part = await receive()
            read += len(part.get("body", b""))
            if read > MAX_BODY_BYTES:
                raise HTTPException(413, message)  # FastAPI lets its own exception through while it reads a body
            return part

        answer, source = self._app, receive
        if scope["type"] == "http":
            path, headers = scope["path"], scope["headers"]
            promised = next((value for name, value in headers if name == b"content-length"), b"0")
            if sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
                answer = _error(431, f"the headers are larger than {MAX_HEADER_BYTES} bytes", path=path)
            elif path != _BUCKET_PATH and promised.isdigit() and int(promised[:20]) > MAX_BODY_BYTES:
                answer = _error(413, message, path=path)
            elif path != _BUCKET_PATH:
                source = counted
        await answer(scope, source, send)
