"""`/v1/chat/completions`, `/v1/completions` and `/v1/models`: any OpenAI client can talk to the model as it learns."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import Request
from starlette.responses import Response

from swift_r1.inference import openai_messages as messages
from swift_r1.inference.admission import check_request
from swift_r1.inference.engines.base import Piece
from swift_r1.inference.openai_messages import ChatRequest, CompletionRequest
from swift_r1.inference.service import Lifecycle, RolloutService
from swift_r1.inference.tool_calls import CallReader
from swift_r1.tool_use.parsing import ToolCallParser
from swift_r1.wire.protocol import EngineDead, HTTPError, RolloutRequest

_SEEDS = 2**63
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models")

Work = Callable[[Request, Any], Any]


def add_openai(app: FastAPI, lifecycle: Lifecycle, unless_gone: Work) -> None:
    """Adds the routes; `unless_gone(request, coroutine)` cancels work whose client has hung up."""

    def serving(name: str) -> RolloutService:
        service = lifecycle.loaded()
        if name != service.model_name:
            raise HTTPError(404, f"there is no model {name[:200]!r} here, only {service.model_name!r}")
        return service

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(lifecycle.loaded())]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return JSONResponse(_model(serving(name)))

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        service = serving(body.model)
        prompts, longest = service.engine.prompts, service.engine.info.max_model_len
        if body.top_logprobs is not None and not body.logprobs:
            raise HTTPError(400, "top_logprobs needs logprobs to be true")
        tools = body.template_tools
        prompt = prompts.render(body.template_messages, tools)
        calls = tag = None
        if body.finds_calls:
            parser = await service.tool_calls.parser()
            calls = CallReader(parser, tools, prompt, body.parallel_tool_calls is not False)
            tag = _forced(parser, tools, body.forces_call)
        if len(prompt) >= longest:
            raise HTTPError(400, f"the messages are {len(prompt)} tokens, the model takes {longest}")
        wanted = body.max_completion_tokens or body.max_tokens or longest - len(prompt)
        top = (body.top_logprobs or 0) if body.logprobs else None
        asked = body.request(prompt, wanted, prompts.turn_end, tag)
        pieces = Pieces(service, [asked], body.seed, top, special_tokens=calls is not None)

        def delta(number: int, piece: Piece, first: bool, _offset: int) -> dict[str, Any]:
            parsed = calls.piece(number, piece) if calls else None
            return messages.chat_delta(number, piece, first, body.logprobs, parsed)

        if body.stream:
            return await _streamed(pieces, "chatcmpl", "chat.completion.chunk", delta, body.wants_usage)
        choices = await unless_gone(request, pieces.collected())
        parsed = [calls.whole(one) if calls else None for one in choices]
        shown = [messages.chat_choice(i, one, body.logprobs, parsed[i]) for i, one in enumerate(choices)]
        return _whole(pieces, "chatcmpl", "chat.completion", shown, choices)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        service = serving(body.model)
        prompts = [service.engine.prompts.encode(one) if isinstance(one, str) else one for one in body.prompts]
        logprobs = body.logprobs is not None
        pieces = Pieces(service, [body.request(one, body.max_tokens) for one in prompts], body.seed, body.logprobs)

        def delta(number: int, piece: Piece, _first: bool, offset: int) -> dict[str, Any]:
            return messages.completion_choice(number, piece, logprobs, offset)

        if body.stream:
            return await _streamed(pieces, "cmpl", "text_completion", delta, body.wants_usage)
        choices = await unless_gone(request, pieces.collected())
        shown = [messages.completion_choice(i, one, logprobs) for i, one in enumerate(choices)]
        return _whole(pieces, "cmpl", "text_completion", shown, choices)


def _forced(parser: ToolCallParser, tools: Sequence[dict[str, Any]], choice: Any) -> str | None:
    if choice is None:
        return None
    if (tag := parser.forced(tools, choice)) is None:
        raise HTTPError(400, f"vLLM cannot force calls of the format {parser.name}: leave tool_choice at auto")
    return tag


class Pieces:
    """The pieces of all completions of some requests, in the order in which they come; with `top_logprobs` (0 or more)
    each token's log-prob, and the likeliest ones. They wait in memory: no slow reader holds up the engine. The text has
    special tokens where these are asked for.

    Attributes:
        version: of the weights that write the first token, set by `start`.
        prompt_tokens: of all prompts, each counted once.

    Raises:
        HTTPError: 422 for a request that the model cannot take.
    """

    def __init__(
        self,
        service: RolloutService,
        requests: Sequence[RolloutRequest],
        seed: int | None,
        top_logprobs: int | None,
        special_tokens: bool = False,
    ) -> None:
        for one in requests:
            check_request(one, service.engine.info, service.max_n)
        self.service, self._seed, self._top_logprobs = service, seed, top_logprobs
        self._special_tokens = special_tokens
        self._completions = [(one, index) for one in requests for index in range(one.n)]
        self._queue: asyncio.Queue[tuple[int, Piece] | BaseException | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self.version = 0
        self.prompt_tokens = sum(len(one.prompt_token_ids) for one in requests)

    async def start(self) -> None:
        """Waits to be admitted, before a byte of the answer is sent. Raises HTTPError as `Admission`."""
        admission = self.service.admission
        async with AsyncExitStack() as stack:
            stack.enter_context(admission.room_for(len(self._completions)))
            await stack.enter_async_context(admission.admitted())
            self.version = self.service.machine.version
            self._task = asyncio.create_task(self._produce(stack.pop_all()))

    async def collected(self) -> list[Piece]:
        """Each completion as one piece. Raises as `start` and the iteration do."""
        await self.start()
        parts: list[list[Piece]] = [[] for _ in self._completions]
        async for number, piece in self:
            parts[number].append(piece)
        return [messages.joined(one) for one in parts]

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece]]:
        """Number of the completion (`n` to a prompt) and its next piece. A reader that goes ends the engine's work.
        Raises HTTPError where an update stopped the generation, and EngineDead."""
        assert self._task is not None
        try:
            while (item := await self._queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self._task.cancel()

    async def _produce(self, admitted: AsyncExitStack) -> None:
        try:
            async with admitted:
                numbers = range(len(self._completions))
                await self.service.admission.stoppable([self._one(number) for number in numbers])
            self._queue.put_nowait(None)
        except asyncio.CancelledError:
            self._queue.put_nowait(HTTPError(503, "the generation was stopped", 1))
            raise
        except Exception as error:  # noqa: BLE001 - handed to the reader, who raises it
            self._queue.put_nowait(error)

    async def _one(self, number: int) -> None:
        request, index = self._completions[number]
        seed = None if self._seed is None else (self._seed + index) % _SEEDS
        stream = self.service.engine.stream(
            request.prompt_token_ids, request.sampling, seed, self._top_logprobs, self._special_tokens
        )
        async for piece in stream:
            self._queue.put_nowait((number, piece))


def _whole(pieces: Pieces, kind: str, name: str, shown: list[dict[str, Any]], choices: Sequence[Piece]) -> JSONResponse:
    usage = messages.usage(pieces.prompt_tokens, sum(len(one.token_ids) for one in choices))
    return JSONResponse(_head(pieces, kind, name) | {"choices": shown, "usage": usage})


async def _streamed(
    pieces: Pieces, kind: str, name: str, delta: Callable[[int, Piece, bool, int], dict[str, Any]], with_usage: bool
) -> Response:
    """Server-sent events; an error on the way is the last event, since the status has been sent."""
    await pieces.start()
    head = _head(pieces, kind, name)

    async def events() -> AsyncIterator[str]:
        written = 0
        offsets: dict[int, int] = {}
        try:
            async for number, piece in pieces:
                first, offset = number not in offsets, offsets.get(number, 0)
                yield _event(head | {"choices": [delta(number, piece, first, offset)]})
                offsets[number] = offset + len(piece.text)
                written += len(piece.token_ids)
        except (HTTPError, EngineDead) as error:
            yield _event(messages.error(error.status if isinstance(error, HTTPError) else 503, str(error)))
            return
        if with_usage:
            yield _event(head | {"choices": [], "usage": messages.usage(pieces.prompt_tokens, written)})
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


def _head(pieces: Pieces, kind: str, name: str) -> dict[str, Any]:
    return {
        "id": f"{kind}-{uuid.uuid4().hex}",
        "object": name,
        "created": int(time.time()),
        "model": pieces.service.model_name,
        "system_fingerprint": f"weights-{pieces.version}",  # OpenAI's name for the backend that answers
        "weight_version": pieces.version,
    }


def _model(service: RolloutService) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.started,
        "owned_by": "swift-r1",
        "max_model_len": service.engine.info.max_model_len,
        "weight_version": service.machine.version,
    }


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
