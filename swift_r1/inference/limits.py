"""What the model and the server can take of a request, well formed or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastapi import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swift_r1.inference.engines.base import EngineInfo
from swift_r1.wire import protocol as wire
from swift_r1.wire.http_errors import HTTPError

MAX_BODY_BYTES = 64 << 20
MAX_HEADER_BYTES = 32 << 10
BUCKET_PATH = "/v1/weights/bucket"


class LimitSizes:
    """Refuses large headers (431) and bodies (413) before they are read; buckets of weights have a limit of their own.

    Args:
        answer: makes the answer from a status and a sentence.
    """

    def __init__(self, app: ASGIApp, answer: Callable[[int, str, str], Response]) -> None:
        self._app, self._answer = app, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, headers = scope["path"], scope["headers"]
        if sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
            refusal = self._answer(431, f"the headers are larger than {MAX_HEADER_BYTES} bytes", path)
            await refusal(scope, receive, send)
            return
        too_large = f"the body is larger than {MAX_BODY_BYTES} bytes"
        promised = next((value for name, value in headers if name == b"content-length"), b"0")
        if path == BUCKET_PATH:
            await self._app(scope, receive, send)
            return
        if promised.isdigit() and int(promised[:20]) > MAX_BODY_BYTES:
            await self._answer(413, too_large, path)(scope, receive, send)
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > MAX_BODY_BYTES:
                raise HTTPException(413, too_large)  # what FastAPI lets through while it reads a body
            return message

        await self._app(scope, counted, send)


def check_request(request: wire.RolloutRequest, info: EngineInfo, max_n: int) -> None:
    """Raises HTTPError (422) for a request that the model cannot take, or of more than `max_n` completions."""
    name, limit = f"request {request.request_id!r}", info.max_model_len
    check_tokens(name, request.prompt_token_ids, info.vocab_size)
    check_tokens(f"stop_token_ids of {name}", request.sampling.stop_token_ids, info.vocab_size)
    if request.n > max_n:
        raise HTTPError(422, f"{name} asks for n = {request.n}, this server gives at most {max_n}")
    if request.seeds is not None and len(request.seeds) != request.n:
        raise HTTPError(422, f"{name} has {len(request.seeds)} seeds for n = {request.n} completions")
    prompt, new = len(request.prompt_token_ids), request.sampling.max_tokens
    if prompt + new > limit:
        raise HTTPError(422, f"{name} is too long: {prompt} prompt + {new} new tokens, max_model_len is {limit}")
    if any(not text for text in request.sampling.stop):
        raise HTTPError(422, f"{name} has an empty stop string")


def check_tokens(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Raises HTTPError (422) for a token that the model does not have."""
    if tokens and max(tokens) >= vocab_size:
        raise HTTPError(422, f"{name} has token {max(tokens)}, the vocabulary ends at {vocab_size - 1}")
