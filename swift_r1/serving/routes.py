"""HTTP: each route is one call of `RolloutService` or its `WeightUpdates`; errors are one plain sentence."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Header, Path, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from swift_r1.serving.answers import (
    WHY,
    JsonRoute,
    LimitSizes,
    RefuseOtherSites,
    RequireKey,
    add_errors,
    error_answer,
    json_answer,
    unless_gone,
)
from swift_r1.serving.metrics import CountAnswers
from swift_r1.serving.openai_routes import add_openai
from swift_r1.serving.protocols.messages import add_messages
from swift_r1.serving.protocols.responses import add_responses
from swift_r1.serving.service import Lifecycle
from swift_r1.serving.sessions.gateway import Gateway
from swift_r1.sync.server import WeightUpdates
from swift_r1.wire import protocol as wire
from swift_r1.wire import sessions

LeaseToken = Annotated[str | None, Header(alias=wire.LEASE_HEADER)]


def create_app(lifecycle: Lifecycle, api_key: str | None) -> FastAPI:
    """The server's ASGI application."""
    app = FastAPI(title="swift rollout", docs_url=None, redoc_url=None)
    app.router.route_class = JsonRoute
    add_errors(app)
    _add_state(app, lifecycle)
    _add_generation(app, lifecycle)
    _add_weights(app, lifecycle)
    add_openai(app, lifecycle.loaded, lifecycle.gateway)
    add_messages(app, lifecycle.loaded, lifecycle.gateway)
    add_responses(app, lifecycle.loaded, lifecycle.gateway)
    _add_sessions(app, lifecycle.gateway)
    _describe(app, api_key is not None)
    # The last one added is the first to see a request.
    app.add_middleware(LimitSizes)
    app.add_middleware(CountAnswers, metrics=lifecycle.metrics)
    app.add_middleware(RequireKey, api_key=api_key, sessions=lifecycle.gateway.store)
    if api_key is None:
        app.add_middleware(RefuseOtherSites)
    return app


def _add_state(app: FastAPI, lifecycle: Lifecycle) -> None:
    @app.get("/health")
    async def health() -> Response:
        """Whether process and engine live. It needs no key, and answers while the model loads."""
        if lifecycle.dead is not None:
            return error_answer(503, lifecycle.dead)
        if lifecycle.service is None:
            return JSONResponse({"status": "loading the model"})
        return JSONResponse(
            {"status": "asleep" if lifecycle.service.updates.sleeping.level else "ok"}
        )

    @app.get("/ready")
    async def ready() -> Response:
        """Whether rollouts are served now. Not while the model loads, in an update, asleep, or with broken weights."""
        why = lifecycle.why_not_ready
        return JSONResponse({"status": "ready"}) if why is None else error_answer(503, why, 1)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Counters and gauges for Prometheus. Each says what it is."""
        return Response(lifecycle.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/info", response_model=wire.ServerInfo)
    async def info() -> Response:
        """The model, its limits and the version of its weights."""
        return json_answer(lifecycle.loaded().info())


def _add_generation(app: FastAPI, lifecycle: Lifecycle) -> None:
    @app.post(
        "/v1/rollouts",
        response_model=wire.RolloutResponse,
    )
    async def rollouts(
        request: Request, batch: wire.RolloutBatch, lease: LeaseToken = None
    ) -> Response:
        """Completions as token ids. With log-probs, finish reason and weight version; a request that is repeated with
        its `request_id` is answered from memory. With the lease a weight update waits for it."""
        return json_answer(await unless_gone(request, lifecycle.loaded().rollouts(batch, lease)))

    @app.put(
        "/v1/images/{sha256}",
        response_model=wire.StoredImage,
        openapi_extra={
            "requestBody": {"content": {"application/octet-stream": {}}, "required": True}
        },
    )
    async def image(
        request: Request, sha256: Annotated[str, Path(pattern="^[0-9a-f]{64}$")]
    ) -> Response:
        """Takes an image that rollouts name by its hash. The body is its file: JPEG, PNG or WebP. It is kept until
        those that came later need the room."""
        service = lifecycle.loaded()
        return json_answer(await service.store_image(sha256, await request.body()))

    @app.post("/v1/score", response_model=wire.ScoreResponse)
    async def score(
        request: Request, body: wire.ScoreRequest, lease: LeaseToken = None
    ) -> Response:
        """Log-probs of given tokens. By the weights that are served."""
        return json_answer(await unless_gone(request, lifecycle.loaded().score(body, lease)))


def _add_weights(app: FastAPI, lifecycle: Lifecycle) -> None:
    def updates() -> WeightUpdates:
        return lifecycle.loaded().updates

    @app.post(
        "/v1/weights/lease",
        response_model=wire.Lease,
    )
    async def take_lease(body: wire.LeaseRequest) -> Response:
        """Takes or renews the lease. Only its holder may change weights; every call under it renews it."""
        return json_answer(await updates().take_lease(body))

    @app.delete("/v1/weights/lease", response_model=wire.UpdateStatus)
    async def release_lease(lease: LeaseToken = None) -> Response:
        """Gives the lease back. An open update is dropped."""
        return json_answer(await updates().release_lease(lease))

    @app.post("/v1/weights/begin", response_model=wire.UpdateStatus)
    async def begin(body: wire.UpdateBegin, lease: LeaseToken = None) -> Response:
        """Opens an update. The served version stays until the commit."""
        return json_answer(await updates().begin(lease, body))

    @app.put(
        "/v1/weights/bucket",
        response_model=wire.UpdateStatus,
        openapi_extra={
            "requestBody": {"content": {"application/octet-stream": {}}, "required": True}
        },
    )
    async def bucket(
        request: Request,
        version: Annotated[int, Header(alias=wire.VERSION_HEADER, ge=1, lt=2**53)],
        index: Annotated[int, Header(alias=wire.BUCKET_HEADER, ge=0)],
        digest: Annotated[
            str | None, Header(alias=wire.DIGEST_HEADER, pattern="^[0-9a-f]{32}$")
        ] = None,
        base: Annotated[
            str | None, Header(alias=wire.BASE_HEADER, pattern="^[0-9a-f]{32}$")
        ] = None,
        lease: LeaseToken = None,
    ) -> Response:
        """Takes a bucket of weights. The body is a safetensors file, or with a base hash only what changed in it."""
        length = request.headers.get("content-length", "")
        size = int(length) if length.isdigit() else 0
        return json_answer(
            await updates().bucket(lease, version, index, digest, request.stream(), base, size)
        )

    @app.post("/v1/weights/file", response_model=wire.UpdateStatus)
    async def file(body: wire.BucketFile, lease: LeaseToken = None) -> Response:
        """Takes a bucket from shared memory. The client has put it into the folder that `begin` named."""
        return json_answer(await updates().file(lease, body))

    @app.post("/v1/weights/channel", response_model=wire.UpdateStatus)
    async def channel(body: wire.ChannelRequest, lease: LeaseToken = None) -> Response:
        """Joins an NCCL group. Its rank 0 is the client."""
        return json_answer(await updates().channel(lease, body))

    @app.post("/v1/weights/stream", response_model=wire.UpdateStatus)
    async def stream(body: wire.StreamedBucket, lease: LeaseToken = None) -> Response:
        """Takes a bucket over NCCL or from GPU memory. It is loaded at once."""
        return json_answer(await updates().stream(lease, body))

    @app.post("/v1/weights/relay", response_model=wire.RelayStatus)
    async def relay(body: wire.RelayRequest, lease: LeaseToken = None) -> Response:
        """Passes what arrives here on to another server. Under the leases of both."""
        return json_answer(await updates().relay(lease, body))

    @app.get("/v1/weights/update", response_model=wire.UpdateStatus)
    async def update() -> Response:
        """How far the open update is. Needs no lease."""
        return json_answer(updates().status())

    @app.post("/v1/weights/commit", response_model=wire.UpdateStatus)
    async def commit(body: wire.UpdateCommit, lease: LeaseToken = None) -> Response:
        """Loads the buckets and serves the new version. Where some are missing, or the hash differs, the old stays."""
        return json_answer(await updates().commit(lease, body))

    @app.post("/v1/weights/abort", response_model=wire.UpdateStatus)
    async def abort(body: wire.UpdateAbort, lease: LeaseToken = None) -> Response:
        """Drops the open update. The served version stays."""
        return json_answer(await updates().abort(lease, body))

    @app.post("/v1/sleep", response_model=wire.SleepStatus)
    async def sleep(body: wire.SleepRequest, lease: LeaseToken = None) -> Response:
        """The engine gives its GPU memory back. It waits for rollouts as a weight update does."""
        return json_answer(await updates().sleeping.sleep(lease, body))

    @app.post("/v1/wake", response_model=wire.SleepStatus)
    async def wake(lease: LeaseToken = None) -> Response:
        """The engine takes its memory again."""
        return json_answer(await updates().sleeping.wake(lease))


def _add_sessions(app: FastAPI, gateway: Gateway) -> None:
    @app.post(
        "/v1/sessions",
        response_model=sessions.Session,
    )
    async def open_session(request: Request, body: sessions.SessionRequest) -> Response:
        """Opens a session. An address and a key for an agent, whose calls are recorded; the same id and body again give
        the same session."""
        state = gateway.store.open(body)
        # As the caller has reached the server, so that an agent beside it does too.
        address = f"{str(request.base_url).rstrip('/')}/v1/sessions/{state.name}/v1"
        return json_answer(
            sessions.Session(
                id=state.name, base_url=address, api_key=state.key, timeout=gateway.store.timeout
            )
        )

    @app.get("/v1/sessions/{session}", response_model=sessions.SessionRecord)
    async def record(session: str) -> Response:
        """What was recorded so far. Calls, and the token sequences that they make."""
        return json_answer(gateway.store.get(session).record())

    @app.delete("/v1/sessions/{session}")
    async def delete(session: str) -> Response:
        """Stops what runs in a session, and forgets it."""
        gateway.delete(session)
        return JSONResponse({})


def _describe(app: FastAPI, needs_key: bool) -> None:
    """Completes the document that the app makes of its routes."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = made()
            _complete(document, needs_key)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(document: dict[str, Any], needs_key: bool) -> None:
    shapes = document["components"]["schemas"]
    # FastAPI's own, which is not what is answered
    for unused in ("HTTPValidationError", "ValidationError"):
        shapes.pop(unused, None)
    document["components"]["securitySchemes"] = {
        "server": {"type": "http", "scheme": "bearer", "description": "the server's --api_key"},
        "session": {
            "type": "http",
            "scheme": "bearer",
            "description": "the key of the session, for its address alone",
        },
    }
    refusals = {str(status): {"description": why} for status, why in WHY.items()}
    for path, operations in document["paths"].items():
        inside = path.startswith("/v1/sessions/{session}/v1")
        for operation in operations.values():
            _summarize(operation)
            operation["responses"] = {"200": operation["responses"]["200"]} | refusals
            if needs_key and path != "/health":
                operation["security"] = [{"server": []}, *([{"session": []}] if inside else [])]


def _summarize(operation: dict[str, Any]) -> None:
    """The first sentence of a route's docstring is its summary."""
    summary, dot, more = " ".join(operation.pop("description", "").split()).partition(". ")
    operation["summary"] = summary.rstrip(".") or operation["summary"]
    if dot:
        operation["description"] = more
