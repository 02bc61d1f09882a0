"""OpenAI's shapes: the fields of requests that we act on (others are refused), and the JSON of answers
with the tool calls in them."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from swift_r1.data.prompt_templates import (
    check_arguments,
    opening_of,
    rendered,
    renders_tools,
    text_of,
    tool_template,
)
from swift_r1.errors import UsageError
from swift_r1.plugins.tools.parsing import Parsed, ToolCallParser, chosen_parser
from swift_r1.serving.engines.base import Piece, TokenLogprob
from swift_r1.serving.pieces import joined
from swift_r1.wire.protocol import (
    TOP_K_LIMIT,
    HTTPError,
    RolloutRequest,
    SamplingParams,
    Seed,
    Several,
    Text,
    TokenId,
)

Stop = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[Several[TokenId], Field(min_length=1)]
# levels of a tool's parameters; templates and records, which write them, stop at some hundreds
_DEEPEST = 100
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}


class OpenAIModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TextPart(OpenAIModel):
    type: Literal["text"]
    text: Text


class ImageUrl(OpenAIModel):
    url: Text  # data:image/...;base64,...
    detail: Literal["auto", "low", "high"] = "auto"  # ignored: images are as large as they are


class ImagePart(OpenAIModel):
    type: Literal["image_url"]
    image_url: ImageUrl


class SentBack(OpenAIModel):
    """What the model said, as a client sends it back: clients add to it (`parsed_arguments`, `index`)."""

    model_config = ConfigDict(extra="ignore")


class CalledFunction(SentBack):
    name: Text
    arguments: Text


class MessageToolCall(SentBack):
    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(OpenAIModel):
    """A message of the conversation. Clients send the model's own back as they got it, with its empty fields and with
    what they add."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Several[TextPart | ImagePart] | None = None
    name: Text | None = None
    tool_calls: Several[MessageToolCall] | None = None
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="before")
    @classmethod
    def _without_what_clients_add(cls, message: Any) -> Any:
        if isinstance(message, dict) and isinstance(message.get("content"), list):
            parts = message["content"]
            texts = [part for part in parts if not _is_image(part)]
            try:
                if texts or not parts:
                    text_of(texts)
            except ValueError as error:
                raise ValueError(f"the content {error}") from error
        if isinstance(message, dict) and message.get("role") == "assistant":
            known = cls.model_fields
            return {name: value for name, value in message.items() if name in known}
        return message

    @model_validator(mode="after")
    def _whole(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of the {self.role} has no tool_calls")
        if self.content is None and self.role != "assistant":
            raise ValueError(f"the message of the {self.role} has no content")
        return self

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def images(self) -> list[str]:
        """The URLs of its images, in order."""
        parts = self.content if isinstance(self.content, tuple) else ()
        return [part.image_url.url for part in parts if isinstance(part, ImagePart)]

    def for_template(self) -> dict[str, Any]:
        """What chat templates read of it."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.images and isinstance(self.content, tuple):
            message["content"] = [
                {"type": "text", "text": part.text}
                if isinstance(part, TextPart)
                else {"type": "image"}
                for part in self.content
            ]
        if self.tool_calls:
            message["tool_calls"] = [one.model_dump() for one in self.tool_calls]
        for name in (
            ("name", "tool_call_id", "reasoning_content")
            if self.role in ("assistant", "tool")
            else ()
        ):
            value = getattr(self, name)
            if value is not None:
                message[name] = value
        return message


def in_parts(kind: str) -> BeforeValidator:
    """Returns what lets a text stand for a list with one part of this type."""
    return BeforeValidator(
        lambda content: [{"type": kind, "text": content}] if isinstance(content, str) else content
    )


def text_in(parts: Iterable[Any]) -> str:
    """Returns the texts of parts without anything between."""
    return "".join(part.text for part in parts)


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image_url"


def data_of(url: str) -> bytes:
    """Returns what is in a data URL. Raises HTTPError (400) for another one: nothing is fetched."""
    head, comma, text = url.partition(",")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        raise HTTPError(
            400, f"image_url {head[:40]!r}: only data:image/...;base64 is read, nothing is fetched"
        )
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise HTTPError(400, f"image_url is not base64: {error}") from error


def _within(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_within(one, levels - 1) for one in inner)


def writable(value: Any) -> Any:
    """Returns what can be written as JSON again. Raises ValueError."""
    if not _within(value, _DEEPEST):
        raise ValueError(f"nested more than {_DEEPEST} levels deep")
    json.dumps(value, ensure_ascii=False).encode()  # a ValueError for half a surrogate pair
    return value


Writable = Annotated[dict[str, Any], AfterValidator(writable)]
ToolName = Annotated[str, Field(pattern=r"^[\w.:/-]{1,128}$")]


class FunctionTool(OpenAIModel):
    name: ToolName
    description: Text | None = None
    parameters: Writable | None = None
    # accepted and ignored: a model that may choose is not held to the schema
    strict: bool | None = None


class RequestTool(OpenAIModel):
    type: Literal["function"]
    function: FunctionTool

    def for_template(self) -> dict[str, Any]:
        """Returns the tool as it was sent, without what only servers read."""
        return self.model_dump(exclude_unset=True, exclude={"function": {"strict"}}) | {
            "type": self.type
        }


class NamedFunction(OpenAIModel):
    name: Text


class NamedChoice(OpenAIModel):
    type: Literal["function"]
    function: NamedFunction


class StreamOptions(OpenAIModel):
    include_usage: bool = False
    include_obfuscation: bool = False  # ignored: nothing is padded


class TextFormat(OpenAIModel):
    type: Literal["text"]


class RequestModel(OpenAIModel):
    """A body, in which `null` stands for what is not given."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        return (
            {name: value for name, value in body.items() if value is not None}
            if isinstance(body, dict)
            else body
        )


class Generation(RequestModel):
    """The fields of both kinds of request."""

    model: Text  # as GET /v1/models names it
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)  # 0: greedy
    # from the likeliest tokens that have this probability together
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    # not OpenAI's, but every open server has it
    top_k: int = Field(default=-1, ge=-1, lt=TOP_K_LIMIT)
    n: int = Field(default=1, ge=1)  # answers
    stop: Stop | Several[Stop] | None = None  # texts that end the answer
    stop_token_ids: Several[TokenId] = ()  # vLLM's
    seed: Seed | None = None  # makes the answer repeatable
    stream: bool = False  # server-sent events
    stream_options: StreamOptions | None = None
    # Of these only what changes no token is accepted.
    frequency_penalty: float = Field(default=0.0, ge=0.0, le=0.0)  # only 0
    presence_penalty: float = Field(default=0.0, ge=0.0, le=0.0)  # only 0
    logit_bias: dict[str, float] = Field(default_factory=dict, max_length=0)  # only empty
    # Accepted and ignored.
    user: Text | None = None  # ignored, as those down to `store`
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None
    metadata: dict[Text, Text] | None = None
    service_tier: Text | None = None
    store: bool | None = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def request(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        turn_end: int | None = None,
        structural_tag: str | None = None,
    ) -> RolloutRequest:
        """The same request in our words; `turn_end` is one more token that ends a completion."""
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=(self.stop,) if isinstance(self.stop, str) else self.stop or (),
            stop_token_ids=self.stop_token_ids
            if turn_end is None
            else (*self.stop_token_ids, turn_end),
            structural_tag=structural_tag,
        )
        # All of it was checked, and a prompt may be long.
        return RolloutRequest.model_construct(
            request_id="openai", prompt_token_ids=prompt, n=self.n, sampling=sampling
        )


class ChatRequest(Generation):
    """Body of `POST /v1/chat/completions`. Without a limit the answer may fill the model's length."""

    messages: Several[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)  # OpenAI's older name of the next
    max_completion_tokens: int | None = Field(default=None, ge=1)  # longest answer
    logprobs: bool = False  # of the tokens of the answer
    # likeliest tokens beside each; needs `logprobs`
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    # vLLM's: arguments of the chat template, over the server's
    chat_template_kwargs: dict[str, Any] = {}
    tools: Several[RequestTool] | None = None  # the chat template describes them to the model
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None  # false: the first call alone is in the answer
    response_format: TextFormat | None = None  # only text
    modalities: Several[Literal["text"]] = ()
    reasoning_effort: Literal["none"] | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _arguments_of_a_template(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        check_arguments(arguments)
        writable(arguments)
        return arguments

    @model_validator(mode="after")
    def _choice_has_a_tool(self) -> ChatRequest:
        names = [one.function.name for one in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("two tools have the same name")
        if (
            isinstance(self.tool_choice, NamedChoice)
            and self.tool_choice.function.name not in names
        ):
            raise ValueError(
                f"tool_choice names {self.tool_choice.function.name!r}, which is not among tools"
            )
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice is required, and there are no tools")
        return self

    @property
    def template_messages(self) -> list[dict[str, Any]]:
        return [one.for_template() for one in self.messages]

    @property
    def images(self) -> list[str]:
        """The URLs of the images of all messages, in order."""
        return [url for one in self.messages for url in one.images]

    @property
    def template_tools(self) -> list[dict[str, Any]]:
        return [one.for_template() for one in self.tools or ()]

    @property
    def finds_calls(self) -> bool:
        """Whether calls are looked for in the answer. With `none` the model still sees the tools, as its prompt stays
        the same, but what it writes is text."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def forces_call(self) -> Any:
        """`required`, or the function that must be called, as JSON; None where the model is free."""
        if isinstance(self.tool_choice, NamedChoice):
            return self.tool_choice.model_dump()
        return "required" if self.tool_choice == "required" else None


class CompletionRequest(Generation):
    """Body of `POST /v1/completions`: texts, or token ids as they are."""

    prompt: (
        Text
        | TokenIds
        | Annotated[Several[Text], Field(min_length=1, max_length=256)]
        | Annotated[Several[TokenIds], Field(min_length=1, max_length=256)]
    )
    max_tokens: int = Field(default=16, ge=1)  # longest completion
    logprobs: int | None = Field(default=None, ge=0, le=5)  # likeliest tokens beside each
    best_of: Literal[1] = 1
    echo: Literal[False] = False
    suffix: Literal[""] = ""

    @property
    def prompts(self) -> Sequence[str | tuple[int, ...]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return (self.prompt,)
        return self.prompt


def error(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def chat_choice(
    index: int, choice: Piece, logprobs: bool, parsed: Parsed | None = None
) -> dict[str, Any]:
    """`parsed` where calls were looked for in it."""
    content = choice.text if parsed is None else parsed.content
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if parsed is not None and parsed.calls:
        message["tool_calls"] = [one.as_message() for one in parsed.calls]
    return {
        "index": index,
        "message": message
        if parsed is None or parsed.calls
        else message | {"content": content or ""},
        "logprobs": _chat_logprobs(choice.logprobs) if logprobs else None,
        "finish_reason": _finish(choice, parsed),
    }


def chat_delta(
    index: int, piece: Piece, first: bool, logprobs: bool, parsed: Parsed | None = None
) -> dict[str, Any]:
    """`parsed` where calls are looked for: what the piece adds to the text, and at the end the calls."""
    delta: dict[str, Any] = {"role": "assistant"} if first else {}
    if parsed is None or parsed.content or first:
        delta["content"] = piece.text if parsed is None else parsed.content or ""
    if parsed is not None and parsed.calls:
        delta["tool_calls"] = [
            {"index": place} | one.as_message() for place, one in enumerate(parsed.calls)
        ]
    return {
        "index": index,
        "delta": delta,
        "logprobs": _chat_logprobs(piece.logprobs) if logprobs and piece.logprobs else None,
        "finish_reason": _finish(piece, parsed),
    }


def _finish(piece: Piece, parsed: Parsed | None) -> str | None:
    return (
        "tool_calls"
        if piece.finish_reason == "stop" and parsed and parsed.calls
        else piece.finish_reason
    )


def _chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    def one(token: TokenLogprob) -> dict[str, Any]:
        return {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.text.encode("utf-8", "replace")),
        }

    content = [
        one(token) | {"top_logprobs": [one(other) for other in token.top]} for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_choice(index: int, part: Piece, logprobs: bool, offset: int = 0) -> dict[str, Any]:
    """`offset` is the number of characters before the part."""
    return {
        "index": index,
        "text": part.text,
        "logprobs": _completion_logprobs(part.logprobs, offset) if logprobs else None,
        "finish_reason": part.finish_reason,
    }


def _completion_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{other.text: other.logprob for other in token.top} for token in tokens],
        "text_offset": offsets,
    }


class ToolCalls:
    """The parser of the served model. It is imported for the first request that has tools."""

    def __init__(self, name: str | None, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._found: asyncio.Task[ToolCallParser] | None = None
        self.name = name
        self.why = "--tool_call_parser"
        if name is None and renders_tools(tokenizer):
            self.name, self.why = chosen_parser(None, tool_template(tokenizer))

    def said(self) -> str:
        """One line for the log."""
        if self.name is not None:
            return f"tool calls are read by vLLM's parser {self.name} ({self.why})"
        if not renders_tools(self._tokenizer):
            return (
                "requests with tools are refused: the model's chat template has no place for tools"
            )
        return f"requests with tools are refused: {self.why}; --tool_call_parser names one"

    async def parser(self) -> ToolCallParser:
        """Raises HTTPError (400) where none is known, or it cannot be used."""
        if self.name is None:
            raise HTTPError(400, f"{self.said()}")
        if self._found is None:
            opening = opening_of(partial(rendered, self._tokenizer))
            made = asyncio.to_thread(ToolCallParser, self.name, self._tokenizer, opening)
            self._found = asyncio.ensure_future(made)
        try:
            return await asyncio.shield(self._found)
        except UsageError as error:
            raise HTTPError(400, str(error)) from error


class CallReader:
    """Finds the calls in the completions of one request. What comes in pieces is read at its end: until then nobody knows
    whether a text is a call."""

    def __init__(
        self,
        parser: ToolCallParser,
        tools: Sequence[dict[str, Any]],
        prompt: Sequence[int],
        parallel: bool,
    ) -> None:
        self._parser = parser
        self._tools = tools
        self._prompt = prompt
        self._parallel = parallel
        self._came: dict[int, list[Piece]] = {}

    def whole(self, one: Piece) -> Parsed:
        return self._allowed(
            self._parser.parse(one.text, self._tools, (*self._prompt, *one.token_ids))
        )

    def piece(self, number: int, piece: Piece) -> Parsed:
        """Returns what the next piece of completion `number` adds."""
        came = self._came.setdefault(number, [])
        came.append(piece)
        return Parsed(None) if piece.finish_reason is None else self.whole(joined(came))

    def _allowed(self, parsed: Parsed) -> Parsed:
        """Without parallel calls only the first."""
        return parsed if self._parallel else Parsed(parsed.content, parsed.calls[:1])
