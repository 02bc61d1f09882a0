"""The loss of answers: against a slow one in float64, and however a step is cut into micro-batches."""

from __future__ import annotations

import json
import math

import pytest
import torch

from swift_r1.data.conversations import ConversationEncoder
from swift_r1.models.loading import load_model, load_tokenizer
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.batching import Batching, split_step
from swift_r1.training.micro_batches import Form
from swift_r1.training.objectives.answers import LearnedAnswers
from swift_r1.training.objectives.base import AnswerEvaluator, batch_of
from swift_r1.training.optimizer import OptimizerConfig
from tests.training.fixtures.make_sft_cases import FILE, ROWS, SCALES, save_model

ALONE = Ranks(0, 1, torch.device("cpu"), None)


class Frozen(LocalBackend):
    """Keeps its gradients and takes no step."""

    def step(self, learning_rate):
        trained = self.model.named_parameters()
        self.gradients = {name: parameter.grad.clone() for name, parameter in trained}
        self.model.zero_grad()
        return 0.0


def messages(number: int) -> list[dict]:
    """Conversations of one to three answers, the second of which is not learned."""
    found = []
    for turn in range(1 + number % 3):
        found += [
            {"role": "user", "content": f"{number} and {turn}" * (1 + turn)},
            {"role": "assistant", "content": f"it is {number * turn}", "loss": turn != 1},
        ]
    return found


@pytest.fixture(scope="module")
def conversations(tiny_model):
    encoder = ConversationEncoder(load_tokenizer(str(tiny_model)))
    rows = [
        {"messages": messages(n), "prompt_id": f"d:{n}", "dataset": "even" if n % 2 == 0 else "odd"}
        for n in range(7)
    ]
    return [encoder.encode(row) for row in rows]


@pytest.fixture(scope="module")
def backend(tiny_model):
    model = load_model(tiny_model, "float32", gradient_checkpointing=False)
    return Frozen(model, OptimizerConfig(1e-3, 0.1, 0.9, 0.95, 1e-8, 1.0))


@pytest.fixture(scope="module")
def expected(tiny_model, conversations):
    """Loss, gradients and share of likeliest tokens by torch's cross-entropy on whole logits, a row at a time, in
    float64; and the sum of the loss of each row with its number of tokens."""
    model = load_model(tiny_model, "float32", gradient_checkpointing=False).double()
    sums, hits = [], 0
    for one in conversations:
        for sequence in one.sequences:
            ids = torch.tensor([sequence.token_ids])
            logits = model(ids).logits[0, :-1]
            mask = torch.tensor(sequence.learned[1:])
            own = torch.nn.functional.cross_entropy(logits[mask], ids[0, 1:][mask], reduction="sum")
            hits += (logits[mask].argmax(-1) == ids[0, 1:][mask]).sum().item()
            sums.append((own, int(mask.sum())))
    tokens = sum(count for _, count in sums)
    loss = sum(own for own, _ in sums) / tokens
    loss.backward()
    gradients = {name: one.grad for name, one in model.named_parameters()}
    return loss.item(), gradients, hits / tokens, [(own.item(), count) for own, count in sums]


FORMS = [(Form(), 1000), (Form(), 60), (Form(packed=True), 1000), (Form(packed=True), 90)]


@pytest.mark.parametrize(("form", "budget"), FORMS)
def test_loss_and_gradients_are_those_of_cross_entropy(
    backend, conversations, expected, form, budget
) -> None:
    loss, gradients, hits, _ = expected
    objective = LearnedAnswers(backend, ALONE)
    batch = batch_of(objective, conversations)
    batching = Batching(form, 1, 1, max_tokens=budget)
    micros = split_step(batch, range(len(batch)), batching, ALONE)
    assert (len(micros) > 1) == (budget < 1000)
    metrics = objective.step(batch, micros, 0.0)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert metrics["token_accuracy"] == pytest.approx(hits)
    size = torch.stack([one.norm() for one in gradients.values()]).norm()
    for name, one in backend.gradients.items():
        assert (one - gradients[name]).norm() / size < 5e-6, name


@pytest.fixture(scope="module")
def same_model(tmp_path_factory):
    """The model that other libraries have computed with, and its tokenizer."""
    folder = tmp_path_factory.mktemp("same")
    return folder, save_model(folder)


@pytest.mark.parametrize(("form", "budget"), [(Form(), 1000), (Form(packed=True), 90)])
@pytest.mark.parametrize("library", SCALES)
def test_loss_and_gradients_are_those_of_other_libraries(same_model, library, form, budget) -> None:
    folder, tokenizer = same_model
    theirs = json.loads(FILE.read_text())[library]
    encoder = ConversationEncoder(tokenizer, loss_scale=SCALES[library])
    rows = [row | {"prompt_id": "d:0", "dataset": "d"} for row in ROWS]
    model = load_model(folder, "float32", gradient_checkpointing=False)
    backend = Frozen(model, OptimizerConfig(1e-3, 0.1, 0.9, 0.95, 1e-8, 1e9))
    objective = LearnedAnswers(backend, ALONE)
    batch = batch_of(objective, [encoder.encode(row) for row in rows])
    micros = split_step(batch, range(len(batch)), Batching(form, 1, 1, max_tokens=budget), ALONE)
    metrics = objective.step(batch, micros, 0.0)
    assert metrics["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    assert backend.gradients.keys() == theirs["gradients"].keys()
    for name, one in backend.gradients.items():
        expected = torch.tensor(theirs["gradients"][name]).view_as(one)
        torch.testing.assert_close(one, expected, rtol=1e-6, atol=1e-6)


def test_evaluation_is_of_each_data_set(backend, conversations, expected) -> None:
    loss, _, _, sums = expected
    evaluator = AnswerEvaluator(
        LearnedAnswers(backend, ALONE),
        conversations,
        len(conversations),
        3,
        Batching(Form(), 1, 1),
        ALONE,
    )
    metrics, rows = evaluator.run(0, lambda: False)
    assert rows == []
    for first, name in enumerate(("even", "odd")):
        total, tokens = (sum(one) for one in zip(*sums[first::2], strict=True))
        assert metrics[f"eval/{name}/loss"] == pytest.approx(total / tokens, rel=1e-6)
        assert metrics[f"eval/{name}/tokens_learned"] == tokens
    both = sum(
        metrics[f"eval/{n}/loss"] * metrics[f"eval/{n}/tokens_learned"] for n in ("even", "odd")
    )
    assert both / sum(count for _, count in sums) == pytest.approx(loss, rel=1e-6)


def test_a_step_without_a_learned_token(backend, tiny_model) -> None:
    encoder = ConversationEncoder(load_tokenizer(str(tiny_model)))
    silent = [messages(0)[0], messages(0)[1] | {"loss": False}]
    one = encoder.encode({"messages": silent, "prompt_id": "d:0", "dataset": "d"})
    objective = LearnedAnswers(backend, ALONE)
    batch = batch_of(objective, [one])
    micros = split_step(batch, range(1), Batching(Form(), 1, 1), ALONE)
    metrics = objective.step(batch, micros, 0.0)
    assert metrics["loss"] == 0 and metrics["tokens_learned"] == 0
    assert all(not one.any() for one in backend.gradients.values())
