"""Which experts of a mixture tokens went to, in numbers and on the wire."""

from __future__ import annotations

import base64
import binascii

import numpy as np

from swift_r1.errors import RunFailed
from swift_r1.wire.protocol import Completion, RolloutRequest, Routes, RoutesAsked


def packed(routes: np.ndarray, asked: RoutesAsked) -> Routes:
    """Returns `routes` `[tokens, layers, chosen]` of any integer type as they are sent."""
    narrow = np.ascontiguousarray(routes, dtype=_type_of(asked))
    tokens, layers, chosen = routes.shape
    return Routes(shape=(tokens, layers, chosen), data=base64.b64encode(narrow.tobytes()).decode())


def routes_of(completion: Completion, request: RolloutRequest) -> np.ndarray | None:
    """Returns the routes that a request has asked for, `[tokens, layers, chosen]`; None where it has not. Raises
    RunFailed, in one sentence, where they are not those of its tokens, or of such a model."""
    asked = request.routes
    if asked is None:
        return None
    tokens = len(request.prompt_token_ids) - asked.first + max(len(completion.token_ids) - 1, 0)
    return unpacked(completion.routes, asked, tokens, request.request_id)


def unpacked(sent: Routes | None, asked: RoutesAsked, tokens: int, name: str) -> np.ndarray:
    """Returns the routes of so many tokens as they were sent in the answer to request `name`. Raises as `routes_of`."""
    wanted = (tokens, asked.layers, asked.chosen)
    if sent is None:
        raise _unfit(name, "it has none")
    if sent.shape != wanted:
        raise _unfit(name, f"their shape is {list(sent.shape)}, not {list(wanted)}")
    try:
        data = base64.b64decode(sent.data, validate=True)
    except binascii.Error as error:
        raise _unfit(name, f"no base64: {error}") from error
    kind = _type_of(asked)
    if len(data) != np.prod(wanted) * kind.itemsize:
        raise _unfit(name, f"{len(data)} bytes are not {list(wanted)} of {kind}")
    routes = np.frombuffer(data, kind).reshape(wanted)
    if tokens and not 0 <= routes.min() <= routes.max() < asked.experts:
        raise _unfit(name, f"a number of an expert is {routes.max()}, of {asked.experts}")
    return routes


def bytes_per_token(asked: RoutesAsked) -> int:
    """Returns the bytes of a token's routes, which `Routes` has as base64."""
    return asked.layers * asked.chosen * _type_of(asked).itemsize


def of_bytes(data: bytes, asked: RoutesAsked) -> np.ndarray:
    """Returns routes `[tokens, layers, chosen]` from their bytes, of which there are those of whole tokens."""
    return np.frombuffer(data, _type_of(asked)).reshape(-1, asked.layers, asked.chosen)


def _type_of(asked: RoutesAsked) -> np.dtype[np.generic]:
    return np.dtype("u1" if asked.experts < 256 else "<i2")


def _unfit(name: str, why: str) -> RunFailed:
    return RunFailed(
        f"the experts in the answer to {name} are not those of its tokens (--router_replay_mode R3): {why}"
    )
