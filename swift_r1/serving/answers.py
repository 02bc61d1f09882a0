"""Answers of the server: errors are one plain sentence, in OpenAI's shape on OpenAI's paths."""

from __future__ import annotations

import asyncio
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

from swift_r1.serving.openai_messages import error as openai_error
from swift_r1.wire import protocol as wire
from swift_r1.wire.protocol import EngineDead, HTTPError, Overloaded

T = TypeVar("T")
_OPENAI = re.compile(r"(/v1/sessions/[^/]*)?/v1/(chat|completions|models|responses|embeddings)(?=/|$)")


def add_errors(app: FastAPI) -> None:
    @app.exception_handler(HTTPError)
    async def refused(request: Request, error: HTTPError) -> Response:
        full = {wire.FULL_HEADER: str(error.retry_after)} if isinstance(error, Overloaded) else None
        return error_answer(error.status, error.message, error.retry_after, request.scope["path"], headers=full)

    @app.exception_handler(EngineDead)
    async def engine_dead(request: Request, error: EngineDead) -> Response:
        return error_answer(503, str(error), path=request.scope["path"])

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        found = error.errors()
        first = max(
            found, key=lambda one: len(one["loc"])
        )  # of a value that fits no type, the type that it is nearest to
        if first["type"] == "json_invalid":  # its place is a byte
            where = ""
            sentence = f"the body is no JSON: {first['ctx']['error']} at byte {first['loc'][-1]}"
        else:
            where = ".".join(str(part) for part in first["loc"] if part not in ("body", "header"))
            sentence = f"{where or 'body'}: {first['msg']}" + (f" (and {len(found) - 1} more)" if found[1:] else "")
        return error_answer(422, sentence, path=request.scope["path"], param=where or None)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        return error_answer(error.status_code, str(error.detail), path=request.scope["path"], headers=error.headers)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return error_answer(499, "the client hung up", path=request.scope["path"])  # nobody reads it, and no traceback

    @app.exception_handler(Exception)
    async def defect(request: Request, error: Exception) -> Response:
        sentence = f"a defect of the server, its log has the traceback ({type(error).__name__})"
        return error_answer(500, sentence, path=request.scope["path"])


class BodyRoute(APIRoute):
    """A route of path parameters, the request and perhaps a model as `body`, which is read in one step: FastAPI's steps
    take longer than the rest of an agent's call. What is not valid goes through them for their words."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        by_fastapi = super().get_route_handler()
        models: list[Any] = [one.field_info.annotation for one in self.dependant.body_params]
        if not models:
            return by_fastapi

        async def answer(request: Request) -> Response:
            if request.headers.get("content-type") != "application/json":
                return await by_fastapi(request)
            try:
                body = models[0].model_validate_json(await request.body())
            except ValidationError:
                return await by_fastapi(request)
            response: Response = await self.endpoint(**request.path_params, request=request, body=body)
            return response

        return answer


def json_answer(body: BaseModel) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")


def error_answer(
    status: int,
    sentence: str,
    retry_after: int | None = None,
    path: str = "",
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """One sentence; in OpenAI's shape (and with its 400 for what is not valid) where `path` is OpenAI's."""
    headers = dict(headers or {}) | ({"Retry-After": str(retry_after)} if retry_after is not None else {})
    spoken = _OPENAI.match(path)
    if spoken is None:
        return JSONResponse({"error": sentence}, status_code=status, headers=headers)
    status = 400 if status == 422 else status
    code = "model_not_found" if status == 404 and spoken[1] is None else None
    return JSONResponse(openai_error(status, sentence, param, code), status_code=status, headers=headers)


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
