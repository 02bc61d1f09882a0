"""Steps on pairs of answers: against slow ones on whole logits, and however a step is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

from swift_r1.algorithms.preferences import PreferenceConfig
from swift_r1.data.conversations import Conversation, PreferenceEncoder
from swift_r1.models.loading import load_model, load_tokenizer
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.batching import Batching, split_step
from swift_r1.training.micro_batches import Form
from swift_r1.training.objectives.base import AnswerEvaluator, batch_of, of_answers
from swift_r1.training.objectives.preferences import Preferences
from swift_r1.training.optimizer import OptimizerConfig
from tests.training.test_sft import Frozen

ALONE = Ranks(0, 1, torch.device("cpu"), None)
FORMS = [(Form(), 1000), (Form(packed=True), 1000), (Form(packed=True), 60)]
FORMS += [(Form(packed=True, shared=True), 1000), (Form(packed=True, shared=True), 60)]


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def row(number: int) -> dict[str, Any]:
    """Answers of other lengths; of the second row the last two turns are compared."""
    asked = [said("user", f"what is {number} and {number}?" * (1 + number % 2))]
    if number == 1:
        asked += [said("assistant", "wait"), said("user", "now")]
    chosen = [*asked, said("assistant", f"it is {2 * number}")]
    rejected = [*asked, said("assistant", "I do not know" * (number % 3) + "!")]
    return {"messages": chosen, "rejected_messages": rejected, "prompt_id": f"d:{number}"} | {
        "dataset": "even" if number % 2 == 0 else "odd"
    }


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def backends(request, tiny_model, tiny_model_untied) -> tuple[Frozen, LocalBackend, Any]:
    """A policy, another one as its reference, and its tokenizer."""
    path = tiny_model if request.param == "llama" else tiny_model_untied
    policy = Frozen(
        load_model(path, "float32", False), OptimizerConfig(1e-3, 0.1, 0.9, 0.95, 1e-8, 1e9)
    )
    return policy, policy.reference(load=lambda: other(path, "float32")), load_tokenizer(str(path))


def other(path: Path, dtype: str) -> Any:
    model = load_model(path, dtype, False)
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(1.02)
    return model


@pytest.fixture(scope="module")
def slow_models(backends) -> list[Any]:
    """Policy and reference in float64."""
    path = backends[2].name_or_path
    return [load_model(path, "float64", False), other(path, "float64")]


@pytest.fixture(scope="module")
def rows(backends) -> list[Conversation]:
    encoder = PreferenceEncoder(backends[2], loss_scale="last_round")
    return [one for number in range(5) if (one := encoder.encode(row(number))) is not None]


def logps_of(model: Any, answer: Any) -> torch.Tensor:
    """Log-probs of the learned tokens of an answer of one sequence."""
    [one] = answer
    ids = torch.tensor([one.token_ids])
    logps = model(ids).logits[0, :-1].log_softmax(-1)
    return logps.gather(1, ids[0, 1:, None])[torch.tensor(one.learned[1:])].squeeze(1)


def dpo(pairs: Any, config: PreferenceConfig) -> torch.Tensor:
    losses, nll, tokens = [], 0.0, 0
    for chosen, rejected, ref_chosen, ref_rejected in pairs:
        most = min(len(chosen), len(rejected))
        alpha = 1.0 if config.ld_alpha is None else config.ld_alpha
        one, other = (x[:most].sum() + alpha * x[most:].sum() for x in (chosen, rejected))
        apart = one - other - (ref_chosen.sum() - ref_rejected.sum())
        losses.append(-logsigmoid(config.beta * apart))
        nll, tokens = nll - chosen.sum(), tokens + len(chosen)
    return torch.stack(losses).mean() + (config.rpo_alpha or 0.0) * nll / tokens


def aot(pairs: Any, config: PreferenceConfig) -> torch.Tensor:
    own = torch.stack([one.sum() - other.sum() for one, other, _, _ in pairs]).sort().values
    refs = torch.stack([one.sum() - other.sum() for _, _, one, other in pairs]).sort().values
    return -logsigmoid(config.beta * (own - refs)).mean()


def simpo(pairs: Any, config: PreferenceConfig) -> torch.Tensor:
    apart = torch.stack([one.mean() - other.mean() for one, other, _, _ in pairs])
    nll = -torch.cat([one for one, *_ in pairs]).mean()
    return -logsigmoid(config.beta * apart - config.simpo_gamma).mean() + config.cpo_alpha * nll


def orpo(pairs: Any, config: PreferenceConfig) -> torch.Tensor:
    odds = [[x.mean() - (1 - x.mean().exp()).log() for x in pair[:2]] for pair in pairs]
    ratio = torch.stack([logsigmoid(one - other) for one, other in odds]).mean()
    return -torch.cat([one for one, *_ in pairs]).mean() - config.beta * ratio


CASES: dict[str, tuple[Callable[..., torch.Tensor], PreferenceConfig]] = {
    "dpo": (dpo, PreferenceConfig(rpo_alpha=0.3, ld_alpha=0.4)),
    "aot": (aot, PreferenceConfig(loss_type=["aot"])),
    "simpo": (simpo, PreferenceConfig(rlhf_type="simpo", loss_type=["simpo"], beta=2.0)),
    "orpo": (orpo, PreferenceConfig(rlhf_type="orpo", beta=0.5)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("form", "budget"), FORMS)
def test_loss_and_gradients_are_those_of_whole_logits(
    backends, slow_models, rows, case, form, budget
) -> None:
    slow, config = CASES[case]
    model, whole_reference = slow_models
    policy, reference, _ = backends
    objective = Preferences(config, policy, reference if case in ("dpo", "aot") else None, ALONE)
    batch = batch_of(objective, rows)
    batching = of_answers(Batching(form, 1, 1, max_tokens=budget), 2)
    micros = split_step(batch, range(len(batch)), batching, ALONE)
    assert (len(micros) > 1) == (budget < 1000)
    metrics = objective.step(batch, micros, 0.0)
    pairs = []
    for one in rows:
        both = one.sequences, one.rejected
        with torch.no_grad():
            references = [logps_of(whole_reference, answer) for answer in both]
        pairs.append([*(logps_of(model, answer) for answer in both), *references])
    loss = slow(pairs, config)
    loss.backward()
    expected = {name: one.grad.clone() for name, one in model.named_parameters()}
    model.zero_grad()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    size = torch.stack([one.norm() for one in expected.values()]).norm()
    for name, one in policy.gradients.items():
        # what two answers do nearly cancels
        assert (one - expected[name]).norm() / size < 1e-5, name
    assert metrics["logps/chosen"] == pytest.approx(
        sum(pair[0].sum().item() for pair in pairs) / len(pairs), rel=1e-6
    )


def test_what_answers_begin_with_is_computed_once(backends, rows) -> None:
    objective = Preferences(PreferenceConfig(), *backends[:2], ALONE)
    batch = batch_of(objective, rows)
    computed = []
    for form in (Form(packed=True), Form(packed=True, shared=True)):
        batching = of_answers(Batching(form, 1, 1, max_tokens=1000), 2)
        micros = split_step(batch, range(len(batch)), batching, ALONE)
        computed.append(sum(micro.inputs.token_ids.numel() for micro in micros))
    prompts = sum(one.sequences[0].begin for one in rows)
    assert computed[0] - computed[1] >= prompts


def test_evaluation_is_of_each_data_set(backends, rows) -> None:
    objective = Preferences(PreferenceConfig(), *backends[:2], ALONE)
    batching = of_answers(Batching(Form(), 1, 1), 2)
    whole = AnswerEvaluator(objective, rows, len(rows), 2, batching, ALONE)
    metrics, _ = whole.run(0, lambda: False)
    assert metrics["eval/even/pairs"] == 3 and metrics["eval/odd/pairs"] == 2
    odd = [one for one in rows if one.dataset == "odd"]
    batch = batch_of(objective, odd)
    step = objective.step(batch, split_step(batch, range(4), batching, ALONE), 0.0)
    for name in ("loss", "rewards/margins", "rewards/accuracies", "logps/rejected"):
        assert metrics[f"eval/odd/{name}"] == pytest.approx(step[name], rel=1e-6), name


def test_a_pair_that_is_left_out_leaves_the_others(backends) -> None:
    long = row(2) | {"rejected_messages": [said("user", "2"), said("assistant", "x" * 90)]}
    encoder = PreferenceEncoder(backends[2], max_length=80, loss_scale="last_round")
    assert not encoder.fits(long) and encoder.fits(row(2))
    cut = PreferenceEncoder(backends[2], None, 80, "right", "last_round").encode(long)
    assert cut is not None and len(cut.rejected[0].token_ids) == 80
    assert cut.sequences == encoder.encode(row(2)).sequences
