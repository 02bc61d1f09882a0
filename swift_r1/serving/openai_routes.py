"""`/v1/chat/completions`, `/v1/completions` and `/v1/models`: any OpenAI client can talk to the model as it learns, at
the server's address or at that of a session, where every call is recorded."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import Request
from starlette.responses import Response

from swift_r1.errors import one_line
from swift_r1.plugins.tools.parsing import ToolCallParser
from swift_r1.serving import openai_messages as messages
from swift_r1.serving.answers import BodyRoute, unless_gone
from swift_r1.serving.engines.base import Piece, PromptTokenizer
from swift_r1.serving.openai_messages import CallReader, ChatRequest, CompletionRequest, ToolCalls
from swift_r1.serving.pieces import Pieces, collected
from swift_r1.serving.sessions.calls import CallContent
from swift_r1.serving.sessions.gateway import (
    AnswerStream,
    Attempt,
    CallOfClient,
    Gateway,
    RenderedAhead,
)
from swift_r1.serving.sessions.history import Message
from swift_r1.wire.protocol import EngineDead, HTTPError, LimitReached, RolloutRequest
from swift_r1.wire.sessions import EQUAL_CALLS, GIVEN_UP

SESSION = "/v1/sessions/{session}"
_LONGEST_KEY = 255  # of an idempotency key, as OpenAI's and others' limits
# What the tokens of an answer depend on, beside what is said.
_SETTINGS = {
    *(
        "temperature",
        "top_p",
        "top_k",
        "stop",
        "stop_token_ids",
        "seed",
        "max_tokens",
        "max_completion_tokens",
    ),
    *("tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
}


class Served(Protocol):
    """The model that answers: a server's, or one that several servers share."""

    @property
    def model_name(self) -> str: ...

    @property
    def started(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def weight_version(self) -> int: ...

    @property
    def prompts(self) -> PromptTokenizer: ...

    @property
    def tool_calls(self) -> ToolCalls: ...

    async def with_images(
        self, unexpanded_ids: tuple[int, ...], files: Sequence[bytes]
    ) -> tuple[tuple[int, ...], tuple[str, ...]]: ...

    def pieces(
        self,
        requests: Sequence[RolloutRequest],
        seed: int | None,
        top_logprobs: int | None,
        special_tokens: bool,
    ) -> Pieces: ...


def add_openai(app: FastAPI, served: Callable[[], Served], gateway: Gateway) -> None:
    """Adds the routes; `served` raises HTTPError while there is no model."""

    def named(name: str) -> Served:
        model = served()
        if name != model.model_name:
            raise HTTPError(
                404, f"there is no model {name[:200]!r} here, only {model.model_name!r}"
            )
        return model

    routes = APIRouter(route_class=BodyRoute)

    @routes.get("/v1/models")
    async def models() -> Response:
        """The model that is served, with the version of its weights."""
        return JSONResponse({"object": "list", "data": [_model(served())]})

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """One model."""
        return JSONResponse(_model(named(name)))

    @routes.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Answers a conversation. OpenAI's chat completions; with `stream` the answer comes as server-sent events."""
        return await _chat(request, body, named(body.model))

    @routes.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continues texts or token ids. OpenAI's completions; with `stream` they come as server-sent events."""
        model = named(body.model)
        prompts = [
            await asyncio.to_thread(model.prompts.encode, one) if isinstance(one, str) else one
            for one in body.prompts
        ]
        asked = [body.request(one, body.max_tokens) for one in prompts]
        return await _answered(
            request,
            body,
            model,
            model.pieces(asked, body.seed, body.logprobs, False),
            TextShown(body),
        )

    # At the address of a session.

    @routes.get(f"{SESSION}/v1/models")
    async def session_models(session: str) -> Response:
        """The model, at the address of a session."""
        gateway.store.get(session)
        return await models()

    @routes.get(SESSION + "/v1/models/{name:path}")
    async def session_model(session: str, name: str) -> Response:
        """One model, at the address of a session."""
        gateway.store.get(session)
        return await model(name)

    @routes.post(f"{SESSION}/v1/chat/completions")
    async def session_chat(session: str, request: Request, body: ChatRequest) -> Response:
        """Answers a conversation, and records it. As `/v1/chat/completions`, with `n` 1; `model` may be any name,
        and what the session says of sampling wins."""
        gateway.store.get(session)
        return await _chat(request, body, served(), (gateway, session))

    app.include_router(routes)


class AnswerShape(Protocol):
    """Shows the completions of one request. `kind` begins the ids, `whole` and `chunk` are OpenAI's names of the
    objects."""

    kind: str
    whole: str
    chunk: str

    def choice(self, number: int, one: Piece) -> dict[str, Any]:
        """A whole completion."""

    def delta(self, number: int, piece: Piece, first: bool, offset: int) -> dict[str, Any]:
        """The next piece of a completion, of whose text `offset` characters were shown."""


class ChatShown:
    """With a `parser` calls of tools are looked for."""

    kind = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def __init__(
        self, body: ChatRequest, prompt: Sequence[int], parser: ToolCallParser | None
    ) -> None:
        self._logprobs = body.logprobs
        self._calls: CallReader | None = None
        if parser is not None:
            self._calls = CallReader(
                parser, body.template_tools, prompt, body.parallel_tool_calls is not False
            )

    def choice(self, number: int, one: Piece) -> dict[str, Any]:
        return messages.chat_choice(
            number, one, self._logprobs, self._calls.whole(one) if self._calls else None
        )

    def message(self, one: Piece) -> dict[str, Any]:
        """The completion as a message of the conversation."""
        shown = self.choice(0, one)["message"]
        return {
            name: value for name, value in shown.items() if name in ("role", "content") or value
        }

    def delta(self, number: int, piece: Piece, first: bool, offset: int) -> dict[str, Any]:
        parsed = self._calls.piece(number, piece) if self._calls else None
        return messages.chat_delta(number, piece, first, self._logprobs, parsed)


class TextShown:
    kind = "cmpl"
    whole = "text_completion"
    chunk = "text_completion"

    def __init__(self, body: CompletionRequest) -> None:
        self._logprobs = body.logprobs is not None

    def choice(self, number: int, one: Piece) -> dict[str, Any]:
        return messages.completion_choice(number, one, self._logprobs)

    def delta(self, number: int, piece: Piece, first: bool, offset: int) -> dict[str, Any]:
        return messages.completion_choice(number, piece, self._logprobs, offset)


class ChatAnswer(Protocol):
    """Shows the answer to one chat in a protocol's words."""

    def message(self, one: Piece) -> Message:
        """The completion as a message of the conversation."""


A = TypeVar("A", bound=ChatAnswer)
AnswerMaker = Callable[[Sequence[int], ToolCallParser | None], A]
"""Makes what shows an answer, from the prompt and the parser of calls, if any are looked for."""


async def _chat(
    request: Request, body: ChatRequest, model: Served, recorded: tuple[Gateway, str] | None = None
) -> Response:
    pieces, shown = await open_chat(request, body, model, recorded, partial(ChatShown, body))
    return await _answered(request, body, model, pieces, shown)


def content_of(body: ChatRequest, model: Served) -> tuple[PromptTokenizer, CallContent]:
    """Returns what words a chat's prompt, and what the chat says. Raises HTTPError (400)."""
    prompts = model.prompts
    if body.chat_template_kwargs:
        prompts = prompts.with_arguments(body.chat_template_kwargs)
    settings = body.model_dump(mode="json", include=_SETTINGS, exclude_defaults=True)
    return prompts, CallContent(body.template_messages, body.template_tools, settings)


async def open_chat(
    request: Request,
    body: ChatRequest,
    model: Served,
    recorded: tuple[Gateway, str] | None,
    shown: AnswerMaker[A],
    cut: bool = False,
) -> tuple[Pieces, A]:
    """Returns the pieces of the answer, and what shows them. `recorded` is the gateway and the name of the session, if
    there is one; with `cut` the answer may be asked to be longer than the model has room for. Raises HTTPError."""
    prompts, said = content_of(body, model)
    tools = said.tools
    if body.top_logprobs is not None and not body.logprobs:
        raise HTTPError(400, "top_logprobs needs logprobs to be true")
    if body.images and recorded is not None:
        raise HTTPError(400, "a session records no images: leave them out")
    prompt: tuple[int, ...] = ()
    if recorded is None:
        prompt = await asyncio.to_thread(prompts.render, said.messages, tools)
    seen: dict[str, Any] = {}
    if body.images:
        files = [messages.data_of(url) for url in body.images]
        expanded, names = await model.with_images(prompt, files)
        seen = {"images": names, "unexpanded_token_ids": prompt}
        prompt = expanded
    parser = await model.tool_calls.parser() if body.finds_calls else None
    tag = None
    if parser is not None and body.forces_call is not None:
        tag = await asyncio.to_thread(_forced, parser, tools, body.forces_call)
    logprobs = body.logprobs or recorded is not None
    call = _ChatCall(body, model, prompts, parser, tag, logprobs, shown, cut)
    if recorded is None:
        asked = call.request(prompt).model_copy(update=seen)
        return call.generate(asked, body.seed), shown(prompt, parser)
    gateway, session = recorded
    reader = await _recorded(gateway, session, request, body, model, prompts, said, call)
    return reader, shown(reader.prompt, parser)


@dataclass(frozen=True, slots=True)
class _ChatCall:
    """Answers a chat. `tag` is what the completion is forced to be; `logprobs` says whether they are wanted."""

    body: ChatRequest
    model: Served
    prompts: PromptTokenizer
    parser: ToolCallParser | None
    tag: str | None
    logprobs: bool
    shown: AnswerMaker[ChatAnswer]
    cut: bool

    def request(self, prompt: tuple[int, ...]) -> RolloutRequest:
        longest = self.model.max_model_len
        if len(prompt) >= longest:
            raise LimitReached(  # in words of OpenAI, which agents look for
                400,
                f"this model's maximum context length is {longest} tokens; the messages have {len(prompt)}",
                "length",
            )
        room = longest - len(prompt)
        wanted = self.body.max_completion_tokens or self.body.max_tokens or room
        wanted = min(wanted, room) if self.cut else wanted
        return self.body.request(prompt, wanted, self.prompts.turn_end, self.tag)

    def generate(self, request: RolloutRequest, seed: int | None) -> Pieces:
        top = (self.body.top_logprobs or 0) if self.logprobs else None
        return self.model.pieces([request], seed, top, self.parser is not None)

    def answer(self, completion: Piece, prompt: tuple[int, ...]) -> Message:
        return self.shown(prompt, self.parser).message(completion)


async def _recorded(
    gateway: Gateway,
    session: str,
    request: Request,
    body: ChatRequest,
    model: Served,
    prompts: PromptTokenizer,
    content: CallContent,
    call: CallOfClient,
) -> AnswerStream:
    if body.n != 1:
        raise HTTPError(400, "a call of a session has one answer: n must be 1")
    attempt = _attempt(request)
    async with gateway.store.get(session).beginning:  # one after another, as they came
        ahead = await RenderedAhead(prompts).make(gateway.store.get(session), content)
        state = gateway.store.get(session)  # now, after all waits: it may be gone
        return gateway.ask(state, content, body.seed, attempt, ahead, call)


def _attempt(request: Request) -> Attempt:
    """OpenAI's own clients count their retries in a header."""
    key = request.headers.get("idempotency-key") or None
    if key is not None and len(key) > _LONGEST_KEY:
        raise HTTPError(400, f"the Idempotency-Key is longer than {_LONGEST_KEY} characters")
    before = request.headers.get(EQUAL_CALLS, "0")
    before = before if before.isdecimal() and len(before) < 10 else "0"
    retried = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
    given_up = [one.strip() for one in request.headers.get(GIVEN_UP, "").split(",")]
    return Attempt(retried, key, int(before), given_up)


def _forced(parser: ToolCallParser, tools: Sequence[Mapping[str, Any]], choice: Any) -> str:
    """Raises HTTPError (400), also where vLLM could not follow the tag, as for a strange schema of a tool."""
    import xgrammar  # vLLM's

    try:
        tag = parser.forced(tools, choice)
        if tag is not None:
            xgrammar.Grammar.from_structural_tag(tag)
    except Exception as error:
        raise HTTPError(
            400, f"the model cannot be held to these tools: {one_line(error)}"
        ) from error
    if tag is None:
        raise HTTPError(
            400, f"vLLM cannot force calls of the format {parser.name}: leave tool_choice at auto"
        )
    return tag


async def _answered(
    request: Request,
    body: ChatRequest | CompletionRequest,
    model: Served,
    pieces: Pieces,
    shown: AnswerShape,
) -> Response:
    if body.stream:
        await unless_gone(request, pieces.start())
        events = _events(
            _head(model, pieces, shown.kind, shown.chunk), pieces, shown, body.wants_usage
        )
        return StreamingResponse(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )
    choices = await unless_gone(request, collected(pieces))
    usage = messages.usage(pieces.prompt_tokens, sum(len(one.token_ids) for one in choices))
    answer = {
        "choices": [shown.choice(number, one) for number, one in enumerate(choices)],
        "usage": usage,
    }
    return JSONResponse(_head(model, pieces, shown.kind, shown.whole) | answer)


async def _events(
    head: dict[str, Any], pieces: Pieces, shown: AnswerShape, with_usage: bool
) -> AsyncIterator[str]:
    """Server-sent events; an error on the way is the last event, since the status has been sent."""
    written = 0
    offsets: dict[int, int] = {}
    try:
        async for number, piece in pieces:
            first = number not in offsets
            offset = offsets.get(number, 0)
            yield _event(head | {"choices": [shown.delta(number, piece, first, offset)]})
            offsets[number] = offset + len(piece.text)
            written += len(piece.token_ids)
    except (HTTPError, EngineDead) as error:
        yield _event(
            messages.error(error.status if isinstance(error, HTTPError) else 503, str(error))
        )
        return
    if with_usage:
        yield _event(head | {"choices": [], "usage": messages.usage(pieces.prompt_tokens, written)})
    yield "data: [DONE]\n\n"


def _head(model: Served, pieces: Pieces, kind: str, name: str) -> dict[str, Any]:
    return {
        "id": f"{kind}-{pieces.name}",
        "object": name,
        "created": int(time.time()),
        "model": model.model_name,
        # OpenAI's name for the backend that answers
        "system_fingerprint": f"weights-{pieces.version}",
        "weight_version": pieces.version,
    }


def _model(model: Served) -> dict[str, Any]:
    return {
        "id": model.model_name,
        "object": "model",
        "created": model.started,
        "owned_by": "swift-r1",
        "max_model_len": model.max_model_len,
        "weight_version": model.weight_version,
    }


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
