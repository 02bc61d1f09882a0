"""`/v1/chat/completions`, `/v1/completions` and `/v1/models`: any OpenAI client can talk to the model as it learns."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import Request
from starlette.responses import Response

from swift_r1.inference.engines.base import Piece
from swift_r1.inference.lifecycle import Lifecycle
from swift_r1.inference.openai import answers
from swift_r1.inference.openai.generation import Ask, Pieces
from swift_r1.inference.openai.requests import ChatRequest, CompletionRequest
from swift_r1.inference.service import RolloutService
from swift_r1.wire.http_errors import EngineDead, HTTPError

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models")

Work = Callable[[Request, Any], Any]


def add_openai(app: FastAPI, lifecycle: Lifecycle, unless_gone: Work) -> None:
    """Adds the routes; `unless_gone(request, coroutine)` cancels work whose client has hung up."""

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(lifecycle.loaded())]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service = lifecycle.loaded()
        _check_model(service, name)
        return JSONResponse(_model(service))

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        service = lifecycle.loaded()
        _check_model(service, body.model)
        if body.top_logprobs is not None and not body.logprobs:
            raise HTTPError(400, "top_logprobs needs logprobs to be true")
        prompt = service.engine.render([{"role": one.role, "content": one.text} for one in body.messages])
        room = service.engine.info.max_model_len - len(prompt)
        wanted = body.max_completion_tokens or body.max_tokens or room
        if room < 1:
            raise HTTPError(
                400, f"the messages are {len(prompt)} tokens, the model takes {service.engine.info.max_model_len}"
            )
        top = (body.top_logprobs or 0) if body.logprobs else None
        sampling = body.sampling(wanted)
        if (end := service.engine.turn_end) is not None:
            sampling = sampling.model_copy(update={"stop_token_ids": (*sampling.stop_token_ids, end)})
        ask = Ask(prompt, body.n, body.seed, sampling, top)

        def delta(number: int, piece: Piece, first: bool, _offset: int) -> dict[str, Any]:
            return answers.chat_delta(number, piece, first, body.logprobs)

        pieces = Pieces(service, [ask])
        if body.stream:
            head = _head(service, "chatcmpl", "chat.completion.chunk")
            return await _streamed(pieces, head, delta, len(prompt), _wants_usage(body))
        choices = await unless_gone(request, _collected(pieces, body.n))
        return JSONResponse(
            _head(service, "chatcmpl", "chat.completion", pieces.version)
            | {
                "choices": [answers.chat_choice(i, one, body.logprobs) for i, one in enumerate(choices)],
                "usage": answers.usage(len(prompt), sum(one.tokens for one in choices)),
            }
        )

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        service = lifecycle.loaded()
        _check_model(service, body.model)
        prompts = [service.engine.encode(one) if isinstance(one, str) else one for one in body.prompts]
        asks = [Ask(one, body.n, body.seed, body.sampling(body.max_tokens), body.logprobs) for one in prompts]
        logprobs, read = body.logprobs is not None, sum(len(one) for one in prompts)

        def delta(number: int, piece: Piece, _first: bool, offset: int) -> dict[str, Any]:
            return answers.completion_choice(number, piece, logprobs, offset)

        pieces = Pieces(service, asks)
        if body.stream:
            return await _streamed(pieces, _head(service, "cmpl", "text_completion"), delta, read, _wants_usage(body))
        choices = await unless_gone(request, _collected(pieces, body.n * len(asks)))
        return JSONResponse(
            _head(service, "cmpl", "text_completion", pieces.version)
            | {
                "choices": [answers.completion_choice(i, one, logprobs) for i, one in enumerate(choices)],
                "usage": answers.usage(read, sum(one.tokens for one in choices)),
            }
        )


async def _collected(pieces: Pieces, count: int) -> list[answers.Choice]:
    await pieces.start()
    choices = [answers.Choice() for _ in range(count)]
    async for number, piece in pieces:
        choices[number].add(piece)
    return choices


async def _streamed(
    pieces: Pieces,
    head: dict[str, Any],
    delta: Callable[[int, Piece, bool, int], dict[str, Any]],
    prompt_tokens: int,
    with_usage: bool,
) -> Response:
    """Server-sent events; an error on the way is the last event, since the status has gone out."""
    await pieces.start()
    head = head | _version(pieces.version)

    async def events() -> AsyncIterator[str]:
        written, offsets = 0, {}
        try:
            async for number, piece in pieces:
                first, offset = number not in offsets, offsets.get(number, 0)
                yield _event(head | {"choices": [delta(number, piece, first, offset)]})
                offsets[number] = offset + len(piece.text)
                written += len(piece.token_ids)
        except HTTPError as refusal:
            yield _event(answers.error(refusal.status, refusal.message))
            return
        except EngineDead as death:
            yield _event(answers.error(503, str(death)))
            return
        if with_usage:
            yield _event(head | {"choices": [], "usage": answers.usage(prompt_tokens, written)})
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


def _head(service: RolloutService, kind: str, name: str, version: int | None = None) -> dict[str, Any]:
    head = {
        "id": f"{kind}-{uuid.uuid4().hex}",
        "object": name,
        "created": int(time.time()),
        "model": service.model_name,
    }
    return head if version is None else head | _version(version)


def _version(version: int) -> dict[str, Any]:
    """OpenAI's fingerprint says which backend an answer comes from; here that is the weights' version."""
    return {"system_fingerprint": f"weights-{version}", "weight_version": version}


def _model(service: RolloutService) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.started,
        "owned_by": "swift-r1",
        "max_model_len": service.engine.info.max_model_len,
        "weight_version": service.updates.version,
    }


def _check_model(service: RolloutService, name: str) -> None:
    if name != service.model_name:
        raise HTTPError(404, f"there is no model {name[:200]!r} here, only {service.model_name!r}")


def _wants_usage(body: ChatRequest | CompletionRequest) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
