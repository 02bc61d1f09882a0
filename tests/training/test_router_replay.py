"""Experts follow their tokens: through packing, sharing, micro-batches, updates and a checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swift_r1.errors import UsageError
from swift_r1.models.attention import use_packed_attention
from swift_r1.models.routing import routing_of
from swift_r1.record.recorded import WholeCompletion
from swift_r1.record.token_reader import TokenRecord
from swift_r1.record.token_record import TokenWriter
from swift_r1.rollout.trajectory import TokenSequence
from swift_r1.runtime.ranks import Ranks
from swift_r1.training import grpo, prefixes
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.batching import Batching, collate, round_batch
from swift_r1.training.micro_batches import Form
from swift_r1.training.model_checks import check_routing
from swift_r1.training.optimizer import OptimizerConfig
from swift_r1.training.recorded import _trajectory
from swift_r1.training.token_values import StepTokens
from swift_r1.wire.protocol import RoutesAsked
from tests.families import family_model

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, CPU, None)
FORMS = [Form(), Form(packed=True), Form(packed=True, shared=True)]
LAYERS, CHOSEN, EXPERTS, VOCAB = 2, 2, 4, 60
BEGINNING = list(range(3, 12))
ENDINGS = [[20, 21, 22, 23, 24], [20, 21, 30], [20, 40, 41, 42], [50, 51, 52, 53]]
"""Of completions of one prompt, of which three have a first token in common."""


def chosen_for(tokens, salt=0):
    """Experts by a token's id, `[tokens, layers, chosen]`, two different ones."""
    first = np.add.outer(np.asarray(tokens) * 7 + salt, [0, 5]) % EXPERTS
    return np.stack([first, (first + 1 + salt % 2) % EXPERTS], -1).astype(np.uint8)


def a_round(routed=True, salts=(0, 0, 0, 0)):
    rows = [
        TokenSequence(
            BEGINNING,
            ending,
            [-1.0] * len(ending),
            [True] * len(ending),
            routes=chosen_for(BEGINNING + ending[:-1], salt) if routed else None,
        )
        for ending, salt in zip(ENDINGS, salts, strict=True)
    ]
    return round_batch(rows, [1.0, 0.0, 1.0, 0.0])


@pytest.fixture(autouse=True)
def every_token_branches(monkeypatch):
    monkeypatch.setattr(prefixes, "LEAST", 1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("units", [[(0, 1, 2, 3)], [(2, 0)], [(3,), (1,)]])
def test_tokens_have_their_experts_in_every_form(form, units):
    micro = collate(a_round(), units, form, CPU)
    ids, routes = micro.inputs.token_ids, micro.inputs.routes
    assert routes.shape == (*ids.shape, LAYERS, CHOSEN) and routes.dtype == torch.uint8
    last = {ending[-1] for ending in ENDINGS}
    for token, found in zip(ids.flatten().tolist(), routes.flatten(0, 1), strict=True):
        unknown = token == 0 or token in last  # padding, and what no engine has read
        expected = np.full((LAYERS, CHOSEN), 255) if unknown else chosen_for([token])[0]
        assert found.tolist() == expected.tolist()


def test_a_row_that_no_engine_wrote_chooses_by_itself():
    known = TokenSequence([3, 4], [5, 6], [0.0] * 2, [True] * 2, routes=chosen_for([3, 4, 5]))
    batch = round_batch([TokenSequence.of_answer([3], [9, 8]), known], [0.0, 1.0])
    assert batch.of_routes.flatten(1).eq(255).all(1).tolist() == [True] * 3 + [False] * 3 + [True]
    assert a_round(routed=False).of_routes is None
    assert collate(a_round(routed=False), [(0,)], Form(), CPU).inputs.routes is None


def recorded(folder, batch, routed=True):
    """The rows of a round as the token record has them."""
    folder.mkdir(exist_ok=True)
    who = {"prompt_id": "d:1", "request_id": "r", "number": 0, "weight_versions": ((0, 1),)}
    rows = [{"sample": sample, "routed": routed} | who for sample in (2, 0)]
    writer = TokenWriter(folder / "tokens", 1e9, lambda: [(b"a", False)])
    writer.write(1, StepTokens(rows, batch, False).rows(torch.zeros(4), ALONE))
    writer.close()
    found = TokenRecord(folder).columns(1, WholeCompletion._fields)
    return [WholeCompletion(**row) for row in found]


ROW = {"prompt": "p", "completion": "c", "finish_reason": "stop", "weight_version": 1}


@pytest.mark.parametrize("more", [0, 300])
def test_the_token_record_has_them(tmp_path, more):
    batch = a_round(salts=(0, 1, 2, 3))
    if more:
        known = batch.of_routes
        batch = batch.with_routes(torch.where(known == 255, 32767, known.short() + more).short())
    asked = RoutesAsked(layers=LAYERS, chosen=CHOSEN, experts=EXPERTS + more)
    found = [_trajectory(one, ROW, asked).sequences[0].routes for one in recorded(tmp_path, batch)]
    for routes, row in zip(found, (2, 0), strict=True):
        expected = chosen_for(BEGINNING + ENDINGS[row][:-1], row).astype(int) + more
        assert routes[:-1].tolist() == expected.tolist()
        assert (routes[-1] == np.iinfo(routes.dtype).max).all()  # the last was never read


def test_a_record_without_them_and_one_of_another_model_are_refused(tmp_path):
    asked = RoutesAsked(layers=LAYERS, chosen=CHOSEN, experts=EXPERTS)
    one, _ = recorded(tmp_path / "without", a_round(), routed=False)
    assert one.routes is None and _trajectory(one, ROW).sequences[0].routes is None
    with pytest.raises(UsageError, match="the record has no experts of its tokens"):
        _trajectory(one, ROW, asked)
    one, _ = recorded(tmp_path / "with", a_round())
    with pytest.raises(UsageError, match="bytes are not the experts of 13 tokens in 3 layers"):
        _trajectory(one, ROW, asked.model_copy(update={"layers": 3}))


@pytest.fixture(scope="module")
def backend():
    model = family_model("qwen3_moe", VOCAB)
    use_packed_attention(model)
    return LocalBackend(model, OptimizerConfig(0.05, 0.0, 0.9, 0.95, 1e-8, 1.0))


def logps_by_sample(backend, micros):
    found = {}
    for micro in micros:
        logps = micro.unflatten(backend.logprobs(micro.inputs, 1.0).logps)
        for sample, row, mask in zip(micro.samples.tolist(), logps, micro.mask, strict=True):
            found[sample] = row[mask]
    return [found[number] for number in sorted(found)]


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_neither_cuts_nor_packing_change_a_log_prob(backend, mode):
    """R2: those that were noted in one form are replayed in all others, after an update too."""
    batch = a_round(routed=mode == "R3")
    check_routing(backend, mode)

    def split(form, batch):
        batching = Batching(form, 2, 4, max_tokens=40)
        return grpo.split_round(batch, 1, batching, ALONE)

    def noted(form):
        return grpo.before_training(
            split(form, batch), backend, None, 1.0, old_policy=True, notes_routes=mode == "R2"
        )

    steps = noted(FORMS[2])
    if mode == "R2":
        plain = [micro.old_logps[micro.mask] for micro in steps[0]]
        batch = grpo.with_noted_routes(batch, steps, ALONE)
        again = [
            micro.flatten(micro.unflatten(backend.logprobs(micro.inputs, 1.0).logps))
            for micro in steps[0]
        ]
        assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
        assert routing_of(backend.model).take_counts()[1] == 0
        with torch.no_grad():
            for parameter in backend.model.parameters():
                parameter.mul_(0.7)
    with torch.no_grad():
        expected = logps_by_sample(backend, steps[0])
        differing = grpo.end_replay(backend, ALONE)
        assert 0 < differing["router_replay/differing"] < 1
        own = logps_by_sample(backend, split(Form(), a_round(routed=False))[0])
        assert (
            max((one - other).abs().max() for one, other in zip(own, expected, strict=True)) > 1e-3
        )
        for form in FORMS:
            found = logps_by_sample(backend, split(form, batch)[0])
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
        for parameter in backend.model.parameters() if mode == "R2" else ():
            parameter.div_(0.7)


def test_the_reference_chooses_by_itself(backend):
    reference = backend.reference()
    batching = Batching(Form(), 4, 4)
    found = []
    for routed in (False, True):
        steps = grpo.split_round(a_round(routed), 1, batching, ALONE)
        ((micro,),) = grpo.before_training(steps, backend, reference, 1.0, old_policy=True)
        found.append((micro.old_logps, micro.ref_logps))
    (own, ref), (old, same) = found
    assert torch.equal(ref, same) and torch.equal(own, ref)
    assert (old - own).abs().max() > 1e-3
