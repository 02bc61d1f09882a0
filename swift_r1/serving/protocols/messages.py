"""Anthropic's Messages API at the address of a session: `/v1/messages` and `/v1/messages/count_tokens`.

What its requests may have beside these fields would change the answer, and is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from itertools import groupby
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse
from pydantic import Field, field_validator
from starlette.requests import Request
from starlette.responses import Response

from swift_r1.serving.answers import BodyRoute, anthropic_error
from swift_r1.serving.engines.base import Piece
from swift_r1.serving.openai_messages import (
    ChatRequest,
    OpenAIModel,
    RequestModel,
    SentBack,
    Stop,
    ToolName,
    Writable,
    in_parts,
    text_in,
)
from swift_r1.serving.openai_routes import SESSION, Served, content_of, open_chat
from swift_r1.serving.pieces import Pieces
from swift_r1.serving.protocols.turn import (
    Block,
    Step,
    Turn,
    answered,
    chat_request,
    object_of,
    thinking_arguments,
)
from swift_r1.serving.sessions.gateway import Gateway, RenderedAhead
from swift_r1.wire.protocol import TOP_K_LIMIT, EngineDead, HTTPError, Several, Text

_TYPES = {"thoughts": "thinking", "text": "text", "call": "tool_use"}
_DELTAS = {
    "thoughts": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
Caching = dict[str, Any] | None
"""Accepted and ignored: what is kept between calls changes no token."""


class TextBlock(RequestModel):
    type: Literal["text"]
    text: Text
    cache_control: Caching = None  # ignored


Texts = Annotated[Several[TextBlock], in_parts("text")]


class ToolResult(RequestModel):
    """An error is told to the model as `Error: ` before its text."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Texts = ()  # or a text
    is_error: bool = False
    cache_control: Caching = None  # ignored


class SaidText(SentBack):
    type: Literal["text"]
    text: Text


class SaidThoughts(SentBack):
    type: Literal["thinking"]
    thinking: Text


class SaidCall(SentBack):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: Writable


class SystemMessage(OpenAIModel):
    role: Literal["system"]
    content: Texts  # or a text

    def for_chat(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": text_in(self.content)}]


class UserMessage(OpenAIModel):
    role: Literal["user"]
    content: Annotated[
        Several[Annotated[TextBlock | ToolResult, Field(discriminator="type")]],
        in_parts("text"),
    ]  # or a text

    def for_chat(self) -> list[dict[str, Any]]:
        """Returns a message for each result of a tool, and one for the texts between them."""
        found: list[dict[str, Any]] = []
        for _, blocks in groupby(self.content, type):
            texts: list[str] = []
            for block in blocks:
                if isinstance(block, TextBlock):
                    texts.append(block.text)
                    continue
                text = ("Error: " if block.is_error else "") + text_in(block.content)
                found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            if texts:
                found.append({"role": "user", "content": "".join(texts)})
        return found or [{"role": "user", "content": ""}]


class AssistantMessage(OpenAIModel):
    """The model's, as the client got it."""

    role: Literal["assistant"]
    content: Annotated[
        Several[Annotated[SaidText | SaidThoughts | SaidCall, Field(discriminator="type")]],
        in_parts("text"),
    ]  # or a text

    def for_chat(self) -> list[dict[str, Any]]:
        texts = (block for block in self.content if isinstance(block, SaidText))
        message: dict[str, Any] = {"role": "assistant", "content": text_in(texts)}
        thoughts = [one.thinking for one in self.content if isinstance(one, SaidThoughts)]
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        for block in self.content:
            if isinstance(block, SaidCall):
                function = {"name": block.name, "arguments": json.dumps(block.input)}
                call = {"id": block.id, "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
        return [message]


class MessagesTool(RequestModel):
    type: Literal["custom"] = "custom"
    name: ToolName
    description: Text | None = None
    input_schema: Writable
    # accepted and ignored: a model that may choose is not held to the schema
    strict: bool | None = None
    cache_control: Caching = None  # ignored
    eager_input_streaming: bool | None = None  # ignored: arguments come as a whole
    defer_loading: Literal[False] = False
    allowed_callers: Several[Literal["direct"]] = ("direct",)

    def for_chat(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


class FreeChoice(OpenAIModel):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool = False  # true: the first call alone is in the answer


class OneTool(OpenAIModel):
    type: Literal["tool"]
    name: Text
    disable_parallel_tool_use: bool = False


class NoTool(OpenAIModel):
    type: Literal["none"]


class ThinkingOn(RequestModel):
    """Thoughts come as blocks. The template's `enable_thinking` becomes true, if it has one."""

    type: Literal["enabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1)  # a target; the model is not held to it
    display: Literal["summarized"] | None = None  # thoughts are shown as they are


class ThinkingOff(OpenAIModel):
    """The template's `enable_thinking` becomes false, if it has one."""

    type: Literal["disabled"]


class TokensRequest(RequestModel):
    """Body of `POST .../v1/messages/count_tokens`."""

    model: Text
    messages: Several[
        Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]
    ] = Field(min_length=1)
    system: Texts = ()  # or a text
    tools: Several[MessagesTool] = ()
    tool_choice: Annotated[FreeChoice | OneTool | NoTool, Field(discriminator="type")] | None = None
    thinking: Annotated[ThinkingOn | ThinkingOff, Field(discriminator="type")] | None = None
    cache_control: Caching = None  # ignored

    @field_validator("messages")
    @classmethod
    def _ends_with_a_question(cls, messages: Any) -> Any:
        if messages[-1].role == "assistant":
            raise ValueError("the last one is the assistant's: no turn of it is continued here")
        return messages

    @property
    def thinks(self) -> bool:
        return isinstance(self.thinking, ThinkingOn)

    def chat(self, model: Served) -> ChatRequest:
        """Returns the same as a chat. Raises HTTPError (400)."""
        return chat_request(self.for_chat(model))

    def for_chat(self, model: Served) -> dict[str, Any]:
        said = [{"role": "system", "content": text_in(self.system)}] if self.system else []
        asked: dict[str, Any] = {
            "model": self.model,
            "messages": said + [part for one in self.messages for part in one.for_chat()],
        }
        if self.tools:
            asked["tools"] = [one.for_chat() for one in self.tools]
        choice = self.tool_choice
        if isinstance(choice, OneTool):
            asked["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        elif choice is not None:
            asked["tool_choice"] = "required" if choice.type == "any" else choice.type
        if choice is not None and not isinstance(choice, NoTool):
            asked["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if self.thinking is not None:
            asked["chat_template_kwargs"] = thinking_arguments(model, self.thinks)
        return asked


class MessagesRequest(TokensRequest):
    """Body of `POST .../v1/messages`."""

    # longest answer, thoughts included; more than the model has room for is no fault
    max_tokens: int = Field(ge=1)
    temperature: float = Field(default=1.0, ge=0.0, le=1.0)  # 0: greedy
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=1, lt=TOP_K_LIMIT)
    stop_sequences: Several[Stop] = ()
    stream: bool = False  # server-sent events
    metadata: dict[Text, Text] | None = None  # ignored
    service_tier: Text | None = None  # ignored

    def for_chat(self, model: Served) -> dict[str, Any]:
        names = {"max_tokens", "temperature", "top_p", "top_k"} & self.model_fields_set
        asked = super().for_chat(model) | {name: getattr(self, name) for name in names}
        return asked | ({"stop": self.stop_sequences} if self.stop_sequences else {})


class MessagesShown:
    """Shows an answer as a message of Anthropic's."""

    def __init__(self, body: MessagesRequest, model: Served, pieces: Pieces, turn: Turn) -> None:
        self._body = body
        self._model = model
        self._pieces = pieces
        self._turn = turn

    def whole(self, one: Piece) -> dict[str, Any]:
        self._turn.take(one)
        content = [self._block(block) for block in self._turn.blocks]
        usage = {"usage": self._usage(self._turn.tokens)}
        return self._head() | {"content": content} | self._end() | usage

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        yield {"type": "message_start", "message": self._head() | {"usage": self._usage(0)}}
        yield {"type": "ping"}
        try:
            async for step, place, text in self._turn.steps(self._pieces):
                for event in self._shown(step, place, text):
                    yield event | {"index": place}
        except (HTTPError, EngineDead) as error:
            yield anthropic_error(error.status if isinstance(error, HTTPError) else 503, str(error))
            return
        usage = self._usage(self._turn.tokens)
        yield {"type": "message_delta", "delta": self._end(), "usage": usage}
        yield {"type": "message_stop"}

    def _shown(self, step: Step, place: int, text: str) -> Iterator[dict[str, Any]]:
        block = self._turn.blocks[place]
        kind, name = _DELTAS[block.kind]
        if step == "begins":
            yield {"type": "content_block_start", "content_block": _started(block)}
        elif step == "grows":
            yield {"type": "content_block_delta", "delta": {"type": kind, name: text}}
        else:
            if block.kind == "thoughts":
                delta = {"type": "signature_delta", "signature": self._pieces.name}
                yield {"type": "content_block_delta", "delta": delta}
            yield {"type": "content_block_stop"}

    def _head(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self._pieces.name}",
            "type": "message",
            "role": "assistant",
            "model": self._model.model_name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "weight_version": self._pieces.version,
        }

    def _block(self, block: Block) -> dict[str, Any]:
        shown = _started(block)
        if block.call is not None:
            return shown | {"input": object_of(block.text)}
        if block.kind == "thoughts":
            return shown | {"thinking": block.text, "signature": self._pieces.name}
        return shown | {"text": block.text}

    def _end(self) -> dict[str, Any]:
        """Returns why the answer ended. Of a text that ended it only the tokens are left."""
        turn = self._turn
        found = None
        if turn.cut:
            full = self._pieces.prompt_tokens + turn.tokens >= self._model.max_model_len
            short = full and turn.tokens < self._body.max_tokens
            reason = "model_context_window_exceeded" if short else "max_tokens"
        elif any(block.call is not None for block in turn.blocks):
            reason = "tool_use"
        else:
            found = self._stop_sequence()
            reason = "end_turn" if found is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": found}

    def _stop_sequence(self) -> str | None:
        ids = [token for piece in self._turn.came for token in piece.token_ids]
        prompts = self._model.prompts
        if not self._body.stop_sequences or not ids or ids[-1] in prompts.special:
            return None
        text = prompts.tokenizer.decode(ids)
        found = [(text.find(one), one) for one in self._body.stop_sequences if one in text]
        return min(found)[1] if found else None

    def _usage(self, written: int) -> dict[str, int]:
        return {"input_tokens": self._pieces.prompt_tokens, "output_tokens": written}


def _started(block: Block) -> dict[str, Any]:
    """Returns the block without what it says."""
    shown: dict[str, Any] = {"type": _TYPES[block.kind]}
    if block.call is not None:
        return shown | {"id": block.call.id, "name": block.call.name, "input": {}}
    return shown | ({"thinking": "", "signature": ""} if block.kind == "thoughts" else {"text": ""})


def add_messages(app: FastAPI, served: Callable[[], Served], gateway: Gateway) -> None:
    """Adds the routes; `served` returns the model, or raises HTTPError while there is none."""
    routes = APIRouter(route_class=BodyRoute)

    @routes.post(f"{SESSION}/v1/messages")
    async def session_messages(session: str, request: Request, body: MessagesRequest) -> Response:
        """Answers a conversation of Anthropic's Messages API, and records it."""
        gateway.store.get(session)
        model = served()
        chat = body.chat(model)
        turn = partial(Turn, chat, model.prompts, body.thinks, True)
        pieces, shown = await open_chat(request, chat, model, (gateway, session), turn, cut=True)
        return await answered(
            request, body.stream, pieces, MessagesShown(body, model, pieces, shown)
        )

    @routes.post(
        f"{SESSION}/v1/messages/count_tokens",
    )
    async def session_count(session: str, request: Request, body: TokensRequest) -> Response:
        """Counts the tokens of the prompt that a call would have here, and records nothing."""
        state = gateway.store.get(session)
        model = served()
        prompts, content = content_of(body.chat(model), model)
        ahead = await RenderedAhead(prompts).make(state, content)
        return JSONResponse({"input_tokens": state.count(content, ahead)})

    app.include_router(routes)
