"""`/v1/sessions`: opening, reading and ending a session; its own address is among OpenAI's routes."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from swift_r1.serving.answers import json_answer
from swift_r1.serving.described import refusals
from swift_r1.serving.sessions.gateway import Gateway
from swift_r1.wire import sessions as wire


def add_sessions(app: FastAPI, gateway: Gateway) -> None:
    gone = (404, 410)

    @app.post(
        "/v1/sessions",
        response_model=wire.Session,
        responses=refusals((409, "the id was opened with another body"), 503),
    )
    async def open_session(request: Request, body: wire.SessionRequest) -> Response:
        """Opens a session. An address and a key for an agent, whose calls are recorded; the same id and body again give
        the same session."""
        state = gateway.store.open(body)
        # As the caller has reached the server, so that an agent beside it does too.
        address = f"{str(request.base_url).rstrip('/')}/v1/sessions/{state.name}/v1"
        return json_answer(
            wire.Session(id=state.name, base_url=address, api_key=state.key, timeout=gateway.store.timeout)
        )

    @app.get("/v1/sessions/{session}", response_model=wire.SessionRecord, responses=refusals(*gone))
    async def record(session: str) -> Response:
        """What was recorded so far. Calls, and the token sequences that they make."""
        return json_answer(gateway.store.get(session).record())

    @app.delete("/v1/sessions/{session}", responses=refusals(*gone))
    async def delete(session: str) -> Response:
        """Stops what runs in a session, and forgets it."""
        gateway.delete(session)
        return JSONResponse({})
