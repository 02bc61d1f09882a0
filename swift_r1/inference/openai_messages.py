"""OpenAI's shapes: the fields of requests that we act on (others are refused), and the JSON of answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from swift_r1.inference.engines.base import Piece, TokenLogprob
from swift_r1.wire.protocol import TOP_K_LIMIT, RolloutRequest, SamplingParams, Seed, Text, TokenId

Stop = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[tuple[TokenId, ...], Field(min_length=1)]
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}


class OpenAIModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TextPart(OpenAIModel):
    type: Literal["text"]
    text: Text


class ChatMessage(OpenAIModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | tuple[TextPart, ...]
    name: Text | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(OpenAIModel):
    include_usage: bool = False


class Generation(OpenAIModel):
    """The fields of both kinds of request."""

    model: Text
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=-1, ge=-1, lt=TOP_K_LIMIT)  # not OpenAI's, but every open server has it
    n: int = Field(default=1, ge=1)
    stop: Stop | tuple[Stop, ...] | None = None
    stop_token_ids: tuple[TokenId, ...] = ()  # vLLM's
    seed: Seed | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Text | None = None  # accepted and ignored

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def request(self, prompt: tuple[int, ...], max_tokens: int, turn_end: int | None = None) -> RolloutRequest:
        """The same request in our words; `turn_end` is one more token that ends a completion."""
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=(self.stop,) if isinstance(self.stop, str) else self.stop or (),
            stop_token_ids=self.stop_token_ids if turn_end is None else (*self.stop_token_ids, turn_end),
        )
        return RolloutRequest(request_id="openai", prompt_token_ids=prompt, n=self.n, sampling=sampling)


class ChatRequest(Generation):
    """Body of `POST /v1/chat/completions`. Without a limit the answer may fill the model's length."""

    messages: tuple[ChatMessage, ...] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)


class CompletionRequest(Generation):
    """Body of `POST /v1/completions`: texts, or token ids as they are."""

    prompt: (
        Text
        | TokenIds
        | Annotated[tuple[Text, ...], Field(min_length=1, max_length=256)]
        | Annotated[tuple[TokenIds, ...], Field(min_length=1, max_length=256)]
    )
    max_tokens: int = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=5)

    @property
    def prompts(self) -> Sequence[str | tuple[int, ...]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return (self.prompt,)
        return self.prompt


def error(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def joined(pieces: Sequence[Piece]) -> Piece:
    """A whole completion."""
    return Piece(
        tuple(token for piece in pieces for token in piece.token_ids),
        "".join(piece.text for piece in pieces),
        tuple(one for piece in pieces for one in piece.logprobs),
        pieces[-1].finish_reason if pieces else None,
        pieces[-1].versions if pieces else None,
    )


def chat_choice(index: int, choice: Piece, logprobs: bool) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": _chat_logprobs(choice.logprobs) if logprobs else None,
        "finish_reason": choice.finish_reason,
    }


def chat_delta(index: int, piece: Piece, first: bool, logprobs: bool) -> dict[str, Any]:
    return {
        "index": index,
        "delta": ({"role": "assistant"} if first else {}) | {"content": piece.text},
        "logprobs": _chat_logprobs(piece.logprobs) if logprobs and piece.logprobs else None,
        "finish_reason": piece.finish_reason,
    }


def _chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    def one(token: TokenLogprob) -> dict[str, Any]:
        return {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode("utf-8", "replace"))}

    content = [one(token) | {"top_logprobs": [one(other) for other in token.top]} for token in tokens]
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
