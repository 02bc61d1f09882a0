"""The experts of tokens over the wire: whole, or one sentence about what is wrong with them."""

import base64

import numpy as np
import pytest
from pydantic import ValidationError

from swift_r1.errors import RunFailed
from swift_r1.wire.protocol import Completion, RolloutRequest, Routes, RoutesAsked, SamplingParams
from swift_r1.wire.routes import packed, routes_of


def request(experts=8, first=0):
    return RolloutRequest(
        request_id="run/3/1",
        prompt_token_ids=(5, 6, 7),
        sampling=SamplingParams(max_tokens=4),
        routes=RoutesAsked(layers=2, chosen=2, experts=experts, first=first),
    )


def completion(routes, tokens=3):
    return Completion(
        token_ids=tuple(range(tokens)),
        logprobs=(-1.0,) * tokens,
        finish_reason="stop",
        weight_version=1,
        routes=routes,
    )


def some(count, experts=8):
    return np.random.default_rng(0).integers(0, experts, (count, 2, 2))


@pytest.mark.parametrize(("experts", "size"), [(8, 1), (255, 1), (256, 2), (1000, 2)])
@pytest.mark.parametrize("first", [0, 2, 3])
def test_numbers_come_through_as_they_are(experts, size, first):
    routes = some(5 - first, experts)
    asked = request(experts, first)
    sent = completion(packed(routes, asked.routes))
    again = Completion.model_validate_json(sent.model_dump_json())
    found = routes_of(again, asked)
    assert found.tolist() == routes.tolist() and found.dtype.itemsize == size
    assert len(base64.b64decode(sent.routes.data)) == routes.size * size


def test_nothing_is_looked_for_that_nobody_has_asked_for():
    plain = request().model_copy(update={"routes": None})
    assert routes_of(completion(None), plain) is None
    assert '"routes":null' in plain.model_dump_json()


GOOD = packed(some(5), request().routes)


@pytest.mark.parametrize(
    ("routes", "why"),
    [
        (None, "it has none"),
        (packed(some(6), request().routes), r"their shape is \[6, 2, 2\], not \[5, 2, 2\]"),
        (packed(some(5)[:, :1], request().routes), r"their shape is \[5, 1, 2\]"),
        (GOOD.model_copy(update={"data": "$$$$"}), "no base64"),
        (GOOD.model_copy(update={"data": "MTIzNDU2Nw=="}), r"7 bytes are not \[5, 2, 2\] of uint8"),
        (packed(some(5) + 1, request().routes), "a number of an expert is 8, of 8"),
    ],
)
def test_what_is_wrong_is_one_sentence(routes, why):
    with pytest.raises(RunFailed, match=f"^the experts in the answer to run/3/1 are not .*{why}"):
        routes_of(completion(routes), request())


@pytest.mark.parametrize(
    "routes", [{"shape": [5, 2], "data": ""}, {"shape": [5, 2, 2]}, {"layers": 2}, "AAAA"]
)
def test_another_form_is_no_message(routes):
    with pytest.raises(ValidationError):
        Routes.model_validate(routes)
