"""Routers whose experts are noted and replayed: the families of mixtures, and what a router says in formulas."""

from __future__ import annotations

import copy
from types import MethodType

import pytest
import torch
from torch.nn.functional import linear

from swift_r1.errors import UsageError
from swift_r1.models.attention import use_packed_attention
from swift_r1.models.policy import ModelInputs, Policy
from swift_r1.models.routing import routing_of
from swift_r1.serving.engines.transformers import TransformersEngine
from swift_r1.wire.protocol import RolloutRequest, RoutesAsked, SamplingParams
from swift_r1.wire.routes import routes_of
from tests.families import family_model

VOCAB = 60


def softmax_of_all(router, hidden, experts, bias):
    weights = linear(hidden, router.weight).softmax(-1).gather(-1, experts)
    return weights / weights.sum(-1, keepdim=True)


def scaled_softmax(router, hidden, experts, bias):
    return linear(hidden, router.weight).softmax(-1).gather(-1, experts) * 1.5


def sigmoid(router, hidden, experts, bias):
    """Biases of experts are for the choice alone."""
    weights = linear(hidden, router.weight).sigmoid().gather(-1, experts)
    weights = weights / weights.sum(-1, keepdim=True)
    return weights * getattr(router, "routed_scaling_factor", 1.0)


def softmax_of_chosen(router, hidden, experts, bias):
    return linear(hidden, router.weight, router.bias).gather(-1, experts).softmax(-1)


def sigmoid_scattered(router, hidden, experts, bias):
    scores = linear(hidden, router.weight).sigmoid()
    return torch.zeros_like(scores).scatter(-1, experts, scores.gather(-1, experts))


GATES = {
    "qwen3_moe": softmax_of_all,
    "qwen3_next": softmax_of_all,
    "mixtral": softmax_of_all,
    "glm4_moe": sigmoid,
    "deepseek_v2": scaled_softmax,
    "deepseek_v3": sigmoid,
    "deepseek_v32": sigmoid,
    "kimi_linear": sigmoid,
    "lfm2_moe": sigmoid,
    "gpt_oss": softmax_of_chosen,
    "qwen3_5_moe": softmax_of_all,
    "llama4": sigmoid_scattered,
}
"""The gates' weights by each family's paper or code, of a router's input and the experts that it is told."""


def routers_of(model):
    return [one for one in model.modules() if type(one).__name__.endswith("Router")]


def logps_of(model, inputs, routes=None):
    """`[K]`, by the policy; `routes` are `[R * S, layers, k]`."""
    if routes is not None:
        routes = routes.view(*inputs.token_ids.shape, *routes.shape[1:])
    return Policy(model)(1.0, *inputs._replace(routes=routes)).logps


def some_inputs(rows=2, length=12):
    ids = torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))
    return ModelInputs(ids, torch.arange(rows * length), ids.roll(-1, 1).flatten())


def by_hand(model, routes):
    """A copy of the model whose routers are formulas, told their experts."""
    formula = GATES[model.config.model_type.removesuffix("_text")]
    told = copy.deepcopy(model)
    names = [name for name, one in told.named_modules() if one in routers_of(told)]

    def forward(router, hidden, bias=None, layer=0):
        flat = hidden.reshape(-1, hidden.shape[-1])
        experts = routes[:, layer].long()
        weights = formula(router, flat, experts, bias)
        if formula is sigmoid_scattered:
            return weights, None
        return None, weights, experts

    for name in names:
        layer = int(next(word for word in name.split(".") if word.isdigit()))
        router = told.get_submodule(name)
        router.forward = MethodType(
            lambda self, hidden, bias=None, layer=layer: forward(self, hidden, bias, layer), router
        )
    return told


@pytest.mark.parametrize("family", GATES)
def test_a_family_replays_its_own_choice_and_any_other(family):
    model = family_model(family, VOCAB)
    inputs = some_inputs()
    plain = logps_of(model, inputs)
    routing = routing_of(model)
    with routing.noting():
        assert torch.equal(logps_of(model, inputs), plain)
        own = routing.noted()
    assert torch.equal(logps_of(model, inputs, own), plain)
    assert routing.take_counts()[1] == 0

    other = (own + 1) % 4
    found = logps_of(model, inputs, other)
    assert (found - plain).abs().max() > 0.01 and routing.take_counts()[1] > 0
    told = by_hand(model, other)
    expected = logps_of(told, inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    found.sum().backward()
    expected.sum().backward()
    for router, theirs in zip(routers_of(model), routers_of(told), strict=True):
        assert router.weight.grad.abs().max() > 1e-3
        torch.testing.assert_close(router.weight.grad, theirs.weight.grad, rtol=1e-3, atol=1e-3)
    routing.end_replay()
    assert torch.equal(logps_of(model, inputs), plain)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_token_without_known_experts_chooses_by_itself(family):
    model = family_model(family, VOCAB)
    inputs = some_inputs(rows=1)
    plain = logps_of(model, inputs)
    routing = routing_of(model)
    with routing.noting():
        logps_of(model, inputs)
        own = routing.noted()
    other = (own + 1) % 4
    other[:8] = routing.shape.unknown
    found = logps_of(model, inputs, other)
    torch.testing.assert_close(found[:8], plain[:8], rtol=0, atol=1e-6)
    assert (found[8:] - plain[8:]).abs().max() > 0.01


def test_gradient_checkpointing_replays_in_the_backward_pass():
    gradients = []
    for checkpointing in (False, True):
        model = family_model("qwen3_moe", VOCAB)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        routes = torch.randint(0, 4, (24, 2, 1), generator=torch.Generator().manual_seed(2))
        routes = torch.cat([routes, (routes + 1) % 4], -1).to(torch.uint8)
        logps_of(model, some_inputs(), routes).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("family", "why"),
    [("qwen3", "it is no mixture of experts"), ("deepseek_v4", "a call has 0")],
)
def test_other_models_are_refused_by_name(family, why):
    model = family_model(family, VOCAB)
    with pytest.raises(UsageError, match=f"{family}.*{why}"), routing_of(model).noting():
        logps_of(model, some_inputs())


IN_THE_ENGINE = [
    pytest.param(
        name, marks=() if name in ("qwen3_moe", "gpt_oss", "lfm2_moe") else pytest.mark.long
    )
    for name in GATES
]


class Nothing:
    def decode(self, token_ids):
        return ""


@pytest.mark.parametrize("family", IN_THE_ENGINE)
def test_the_engine_notes_the_experts_of_each_token_that_it_read(family):
    """As the model's own forward pass over the whole chooses; prompts of several lengths, completions that end."""
    model = family_model(family, VOCAB).eval()
    use_packed_attention(model)
    engine = TransformersEngine(model, Nothing(), [2], 0)
    shape = routing_of(model).shape
    generator = torch.Generator().manual_seed(3)
    asked = [
        RolloutRequest(
            request_id=str(length),
            prompt_token_ids=tuple(
                torch.randint(3, VOCAB, (length,), generator=generator).tolist()
            ),
            n=3,
            seeds=(length, 5, 6),
            sampling=SamplingParams(max_tokens=most),
            routes=RoutesAsked(**shape._asdict(), first=first),
        )
        for length, most, first in ((9, 14, 0), (4, 7, 2), (9, 1, 9))
    ]
    routing = routing_of(model)
    for request, output in zip(asked, engine.generate(asked, 1), strict=True):
        for one in output.completions:
            found = routes_of(one, request)
            ids = torch.tensor([request.prompt_token_ids + one.token_ids])
            with routing.noting(), torch.no_grad():
                model(input_ids=ids, use_cache=False)
                expected = routing.noted()[request.routes.first : -1]
            assert torch.equal(torch.from_numpy(found.copy()).sort(-1)[0], expected.sort(-1)[0])
    plain = [request.model_copy(update={"routes": None}) for request in asked]
    for with_routes, without in zip(
        engine.generate(asked, 1), engine.generate(plain, 1), strict=True
    ):
        for one, other in zip(with_routes.completions, without.completions, strict=True):
            assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
            assert other.routes is None
