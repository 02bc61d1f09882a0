"""OpenAI's Responses API at the address of a session: `/v1/responses`. No response is stored.

What its requests may have beside these fields would change the answer, and is refused by name.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, FastAPI
from pydantic import BeforeValidator, Field, field_validator, model_validator
from starlette.requests import Request
from starlette.responses import Response

from swift_r1.serving.answers import BodyRoute
from swift_r1.serving.engines.base import Piece, TokenLogprob
from swift_r1.serving.openai_messages import (
    ChatRequest,
    NamedFunction,
    OpenAIModel,
    RequestModel,
    SentBack,
    TextFormat,
    ToolName,
    Writable,
    in_parts,
    text_in,
)
from swift_r1.serving.openai_routes import SESSION, Served, open_chat
from swift_r1.serving.pieces import Pieces
from swift_r1.serving.protocols.turn import (
    CLOSE,
    Block,
    Step,
    Turn,
    answered,
    chat_request,
    thinking_arguments,
)
from swift_r1.serving.sessions.gateway import Gateway
from swift_r1.serving.sessions.history import Message
from swift_r1.wire.protocol import EngineDead, HTTPError, Several, Text

_TYPES = {"thoughts": "reasoning", "text": "message", "call": "function_call"}
_IDS = {"thoughts": "rs", "text": "msg", "call": "fc"}
_CALL = 2  # the place of calls in a turn of the model, behind its thoughts and its text


class InputText(OpenAIModel):
    type: Literal["input_text"]
    text: Text


class OutputText(SentBack):
    type: Literal["output_text"]
    text: Text


class ReasoningText(SentBack):
    type: Literal["reasoning_text"]
    text: Text


class ItemOfMessage(RequestModel):
    """A message; one of the assistant is the model's, as the client got it."""

    type: Literal["message"]
    role: Literal["user", "system", "developer", "assistant"]
    content: Annotated[
        Several[Annotated[InputText | OutputText, Field(discriminator="type")]],
        in_parts("input_text"),
    ]  # or a text
    id: Text | None = None
    status: Text | None = None  # ignored

    @model_validator(mode="before")
    @classmethod
    def _without_what_clients_add(cls, item: Any) -> Any:
        if isinstance(item, dict) and item.get("role") == "assistant":
            return {name: value for name, value in item.items() if name in cls.model_fields}
        return item

    @property
    def place(self) -> int | None:
        return 1 if self.role == "assistant" else None

    def for_chat(self) -> dict[str, Any]:
        return {"role": self.role, "content": text_in(self.content)}

    def add_to(self, message: dict[str, Any]) -> None:
        message["content"] = text_in(self.content)


class CallOutput(RequestModel):
    place: ClassVar[int | None] = None

    type: Literal["function_call_output"]
    call_id: Text
    output: Annotated[Several[InputText], in_parts("input_text")]  # or a text
    id: Text | None = None
    status: Text | None = None  # ignored
    name: Text | None = None  # ignored

    def for_chat(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": text_in(self.output)}


class Reasoning(SentBack):
    """The model's thoughts, as the client got them. Where they are left out, `encrypted_content` has them."""

    place: ClassVar[int | None] = 0

    type: Literal["reasoning"]
    content: Several[ReasoningText] | None = None
    encrypted_content: Text | None = None
    id: Text | None = None

    def add_to(self, message: dict[str, Any]) -> None:
        text = text_in(self.content or ())
        if not text and self.encrypted_content:
            try:
                text = base64.b64decode(self.encrypted_content, validate=True).decode()
            except (binascii.Error, ValueError) as error:
                raise HTTPError(400, "encrypted_content of a reasoning is not ours") from error
        if text:
            message["reasoning_content"] = text


class FunctionCall(SentBack):
    """The model's call, as the client got it."""

    place: ClassVar[int | None] = _CALL

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text
    id: Text | None = None

    def add_to(self, message: dict[str, Any]) -> None:
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)


Item = Annotated[
    ItemOfMessage | CallOutput | Reasoning | FunctionCall,
    Field(discriminator="type"),
]


def _as_items(given: Any) -> Any:
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list):
        return given
    return [{"type": "message"} | one if isinstance(one, dict) else one for one in given]


class ResponsesTool(RequestModel):
    type: Literal["function"]
    name: ToolName
    description: Text | None = None
    parameters: Writable | None = None
    # accepted and ignored: a model that may choose is not held to the schema
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        function = self.model_dump(exclude={"type", "strict"}, exclude_none=True)
        return {"type": "function", "function": function}


class FunctionChoice(NamedFunction):
    type: Literal["function"]


class ReasoningSettings(RequestModel):
    effort: Literal["none"] | None = None
    summary: Literal["auto"] | None = None  # thoughts are shown as they are, without a summary


class TextSettings(RequestModel):
    format: TextFormat | None = None  # only text
    verbosity: Literal["medium"] | None = None


class StreamSettings(RequestModel):
    include_obfuscation: bool = False  # ignored: nothing is padded


class ResponsesRequest(RequestModel):
    """Body of `POST .../v1/responses`."""

    model: Text
    input: Annotated[Several[Item], BeforeValidator(_as_items)]  # or a text
    instructions: Text | None = None  # a system message in front, of this response alone
    previous_response_id: None = None
    store: bool = False  # only false: the conversation comes back as `input`
    max_output_tokens: int | None = Field(default=None, ge=1)  # longest answer, thoughts included
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)  # 0: greedy
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    stream: bool = False  # server-sent events
    stream_options: StreamSettings | None = None
    tools: Several[ResponsesTool] = ()
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool = True  # false: the first call alone is in the answer
    reasoning: ReasoningSettings | None = None
    text: TextSettings | None = None
    include: Several[Literal["reasoning.encrypted_content"]] = ()
    # Of these only what changes no token is accepted.
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    top_logprobs: Literal[0] = 0
    # Accepted and ignored.
    max_tool_calls: int | None = None  # of tools that are not here; ignored, as those that follow
    metadata: dict[Text, Text] | None = None
    client_metadata: dict[Text, Text] | None = None  # of the Codex CLI
    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None
    service_tier: Text | None = None

    @field_validator("store", "previous_response_id", mode="before")
    @classmethod
    def _nothing_is_stored(cls, value: Any) -> Any:
        if value:
            raise ValueError(
                "no response is stored here: leave it out, and send the whole conversation as input"
            )
        return value

    def chat(self, model: Served, messages: Sequence[Message]) -> ChatRequest:
        """Returns the same as a chat of these messages. Raises HTTPError (400)."""
        front: list[Message] = []
        if self.instructions is not None:
            front = [{"role": "system", "content": self.instructions}]
        names = {"temperature", "top_p", "parallel_tool_calls"} & self.model_fields_set
        asked = {
            "model": self.model,
            "messages": [*front, *messages],
            "max_completion_tokens": self.max_output_tokens,
            "tools": [one.for_chat() for one in self.tools] or None,
        } | {name: getattr(self, name) for name in names}
        choice = self.tool_choice
        if isinstance(choice, FunctionChoice):
            asked["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        else:
            asked["tool_choice"] = choice
        if self.reasoning is not None and self.reasoning.effort is not None:
            asked["chat_template_kwargs"] = thinking_arguments(model, False)
        return chat_request(asked)


def _messages_of(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns a chat's messages: the items of one turn of the model are one."""
    messages: list[dict[str, Any]] = []
    last: int | None = None  # of the open turn
    for item in items:
        if item.place is None:
            messages.append(item.for_chat())
        else:
            follows = last is not None and (item.place > last or item.place == last == _CALL)
            if not follows:
                messages.append({"role": "assistant", "content": ""})
            item.add_to(messages[-1])
        last = item.place
    return messages


class ResponsesShown:
    """Shows an answer as a response of OpenAI's."""

    def __init__(self, body: ResponsesRequest, model: Served, pieces: Pieces, turn: Turn) -> None:
        self._body = body
        self._model = model
        self._pieces = pieces
        self._turn = turn
        self._created = int(time.time())

    @cached_property
    def _version(self) -> int:
        """Returns the version of the weights, as it is known at the start."""
        return self._pieces.version

    def whole(self, one: Piece) -> dict[str, Any]:
        self._turn.take(one)
        return self._finished()

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        number = 0
        async for event in self._unnumbered():
            yield event | {"sequence_number": number}
            number += 1

    async def _unnumbered(self) -> AsyncIterator[dict[str, Any]]:
        head = self._response("in_progress")
        yield {"type": "response.created", "response": head}
        yield {"type": "response.in_progress", "response": head}
        try:
            async for step, place, text in self._turn.steps(self._pieces):
                for event in self._shown(step, place, text):
                    yield event | {"output_index": place}
        except (HTTPError, EngineDead) as error:
            fault = {"code": "server_error", "message": str(error)}
            failed = self._response("failed") | {"error": fault}
            yield {"type": "response.failed", "response": failed}
            return
        whole = self._finished()
        yield {"type": f"response.{whole['status']}", "response": whole}

    def _shown(self, step: Step, place: int, text: str) -> Iterator[dict[str, Any]]:
        block = self._turn.blocks[place]
        if step == "begins":
            empty = Block(block.kind, "", block.call)
            item = self._item(place, empty, "in_progress")
            if block.call is None:
                item["content"] = []
            yield {"type": "response.output_item.added", "item": item}
            if block.call is None:
                yield self._part(place, empty, "added")
        elif step == "grows":
            yield self._event(place, "delta", {"delta": text})
        elif block.call is None:
            yield self._event(place, "done", {"text": block.text})
            yield self._part(place, block, "done")
            yield {"type": "response.output_item.done", "item": self._item(place, block)}
        else:
            whole = {"arguments": block.text, "name": block.call.name}
            yield self._event(place, "done", whole)
            yield {"type": "response.output_item.done", "item": self._item(place, block)}

    def _event(self, place: int, what: str, more: dict[str, Any]) -> dict[str, Any]:
        """Returns what grows the item, or ends its growth."""
        kind = self._turn.blocks[place].kind
        event = {"item_id": self._id(place, kind)} | more
        if kind == "call":
            return {"type": f"response.function_call_arguments.{what}"} | event
        event |= {"content_index": 0}
        if kind == "thoughts":
            return {"type": f"response.reasoning_text.{what}"} | event
        return {"type": f"response.output_text.{what}", "logprobs": []} | event

    def _part(self, place: int, block: Block, what: str) -> dict[str, Any]:
        return {
            "type": f"response.content_part.{what}",
            "item_id": self._id(place, block.kind),
            "content_index": 0,
            "part": _part_of(block),
        }

    def _id(self, place: int, kind: str) -> str:
        return f"{_IDS[kind]}_{self._pieces.name}_{place}"

    def _item(self, place: int, block: Block, status: str | None = None) -> dict[str, Any]:
        if status is None:
            cut = place == len(self._turn.blocks) - 1 and self._turn.cut
            status = "incomplete" if cut else "completed"
        item: dict[str, Any] = {
            "id": self._id(place, block.kind),
            "type": _TYPES[block.kind],
            "status": status,
        }
        if block.call is not None:
            call = {"call_id": block.call.id, "name": block.call.name}
            return item | call | {"arguments": block.text}
        item["content"] = [_part_of(block)]
        if block.kind == "text":
            return item | {"role": "assistant"}
        item["summary"] = []
        if self._body.include:
            item["encrypted_content"] = base64.b64encode(block.text.encode()).decode()
        return item

    def _finished(self) -> dict[str, Any]:
        turn = self._turn
        read = self._pieces.prompt_tokens
        thoughts = 0
        if turn.blocks[0].kind == "thoughts":
            thoughts = _thought([one for piece in turn.came for one in piece.logprobs])
        response = self._response("incomplete" if turn.cut else "completed")
        response["output"] = [self._item(place, block) for place, block in enumerate(turn.blocks)]
        response["incomplete_details"] = {"reason": "max_output_tokens"} if turn.cut else None
        response["usage"] = {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": turn.tokens,
            "output_tokens_details": {"reasoning_tokens": thoughts},
            "total_tokens": read + turn.tokens,
        }
        return response

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        names = (
            "instructions",
            "max_output_tokens",
            "metadata",
            "parallel_tool_calls",
            "previous_response_id",
            "store",
            "temperature",
            "tools",
            "top_p",
            "truncation",
        )
        choice = "auto" if body.tool_choice is None else body.model_dump()["tool_choice"]
        return body.model_dump(include=set(names)) | {
            "id": f"resp_{self._pieces.name}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self._model.model_name,
            "output": [],
            "text": {"format": {"type": "text"}},
            "tool_choice": choice,
            "usage": None,
            "weight_version": self._version,
        }


def _part_of(block: Block) -> dict[str, Any]:
    if block.kind == "thoughts":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _thought(tokens: Sequence[TokenLogprob]) -> int:
    """Returns how many of the tokens are thoughts, the tag at their end included."""
    text = ""
    for place, token in enumerate(tokens):
        text = (text + token.text)[-100:]
        if CLOSE in text:
            return place + 1
    return len(tokens)


def add_responses(app: FastAPI, served: Callable[[], Served], gateway: Gateway) -> None:
    """Adds the routes; `served` returns the model, or raises HTTPError while there is none."""
    routes = APIRouter(route_class=BodyRoute)

    @routes.post(f"{SESSION}/v1/responses")
    async def session_responses(session: str, request: Request, body: ResponsesRequest) -> Response:
        """Answers a conversation of OpenAI's Responses API, and records it."""
        gateway.store.get(session)
        model = served()
        chat = body.chat(model, _messages_of(body.input))
        turn = partial(Turn, chat, model.prompts, True, False)
        pieces, shown = await open_chat(request, chat, model, (gateway, session), turn)
        return await answered(
            request, body.stream, pieces, ResponsesShown(body, model, pieces, shown)
        )

    app.include_router(routes)
