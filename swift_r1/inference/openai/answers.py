"""The JSON that OpenAI's clients read, made of the engine's pieces. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from swift_r1.inference.engines.base import Piece, TokenLogprob

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@dataclass(slots=True)
class Choice:
    """One completion in the making, its pieces together."""

    text: str = ""
    tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.tokens += len(piece.token_ids)
        self.logprobs += piece.logprobs
        self.finish_reason = piece.finish_reason


def error(status: int, sentence: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": sentence, "type": kind, "param": param, "code": code}}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    def one(token: TokenLogprob) -> dict[str, Any]:
        return {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode("utf-8", "replace"))}

    content = [one(token) | {"top_logprobs": [one(other) for other in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """`offset` is the number of characters before the first token."""
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


def chat_choice(index: int, choice: Choice, logprobs: bool) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": chat_logprobs(choice.logprobs) if logprobs else None,
        "finish_reason": choice.finish_reason,
    }


def chat_delta(index: int, piece: Piece, first: bool, logprobs: bool) -> dict[str, Any]:
    delta = ({"role": "assistant"} if first else {}) | {"content": piece.text}
    return {
        "index": index,
        "delta": delta,
        "logprobs": chat_logprobs(piece.logprobs) if logprobs and piece.logprobs else None,
        "finish_reason": piece.finish_reason,
    }


def completion_choice(index: int, part: Choice | Piece, logprobs: bool, offset: int = 0) -> dict[str, Any]:
    return {
        "index": index,
        "text": part.text,
        "logprobs": completion_logprobs(part.logprobs, offset) if logprobs else None,
        "finish_reason": part.finish_reason,
    }
