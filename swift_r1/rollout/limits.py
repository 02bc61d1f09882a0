"""What the model and the server can take of a request that is well formed."""

from __future__ import annotations

from collections.abc import Sequence

from swift_r1.rollout import protocol as wire
from swift_r1.rollout.engines.base import EngineInfo
from swift_r1.rollout.refusals import Refused


def check_request(request: wire.RolloutRequest, info: EngineInfo, max_n: int) -> None:
    """Raises Refused (422) for a request that the model cannot take, or of more than `max_n` completions."""
    name, limit = f"request {request.request_id!r}", info.max_model_len
    check_tokens(name, request.prompt_token_ids, info.vocab_size)
    check_tokens(f"stop_token_ids of {name}", request.sampling.stop_token_ids, info.vocab_size)
    if request.n > max_n:
        raise Refused(422, f"{name} asks for n = {request.n}, this server gives at most {max_n}")
    if request.seeds is not None and len(request.seeds) != request.n:
        raise Refused(422, f"{name} has {len(request.seeds)} seeds for n = {request.n} completions")
    prompt, new = len(request.prompt_token_ids), request.sampling.max_tokens
    if prompt + new > limit:
        raise Refused(422, f"{name} is too long: {prompt} prompt + {new} new tokens, max_model_len is {limit}")
    if any(not text for text in request.sampling.stop):
        raise Refused(422, f"{name} has an empty stop string")


def check_tokens(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Raises Refused (422) for a token that the model does not have."""
    if tokens and max(tokens) >= vocab_size:
        raise Refused(422, f"{name} has token {max(tokens)}, the vocabulary ends at {vocab_size - 1}")
