"""The experts of an agent's tokens: those that the engine chose when it first read them, up to the trainer's pass."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

from swift_r1.errors import RunFailed
from swift_r1.models.attention import use_packed_attention
from swift_r1.models.routing import routing_of
from swift_r1.serving.engines.transformers import TransformersEngine
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.batching import collate, round_batch
from swift_r1.training.micro_batches import Form
from swift_r1.training.optimizer import OptimizerConfig
from swift_r1.wire.protocol import RolloutOutput, RolloutRequest, RoutesAsked
from tests.families import family_model
from tests.rollout.agents.conftest import Stage

CPU = torch.device("cpu")


@pytest.fixture
def forks(
    stages: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> tuple[Stage, RoutesAsked]:
    """An agent that forks, over a mixture, and what is asked of its routers."""
    stage = stages("forks")
    tokenizer = stage.tokenizer
    model = family_model("qwen3_moe", len(tokenizer))
    ends = (tokenizer.eos_token_id,)
    mixture = TransformersEngine(model, tokenizer, ends, tokenizer.pad_token_id)
    monkeypatch.setattr(stage.rollouts, "engine", mixture)
    return stage, RoutesAsked(**routing_of(model).shape._asdict())


def noted(model: Any, work: Callable[[], Any]) -> torch.Tensor:
    """The experts that a model's routers choose in a pass."""
    routing = routing_of(model)
    with routing.noting(), torch.no_grad():
        work()
        return routing.noted()


def test_the_trainer_sends_tokens_to_the_experts_of_the_engine(
    forks: tuple[Stage, RoutesAsked], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, routes = forks
    asked = list[RolloutRequest]()
    one = stage.rollouts.one

    def noting(request: RolloutRequest) -> RolloutOutput:
        asked.append(request)
        return one(request)

    monkeypatch.setattr(stage.rollouts, "one", noting)
    [[episode]] = stage.play([{}], n=1, routes=routes)
    assert [call.kind for call in episode.calls] == ["new", "extends", "branch"]
    assert [call.parent for call in episode.calls] == [None, 0, 0]
    # the two that go on have what the first has read, all but the last token that it wrote
    read = len(asked[0].prompt_token_ids) + len(episode.turns[0]) - 1
    assert [request.routes and request.routes.first for request in asked] == [0, read, read]

    engine = stage.rollouts.engine.model
    trained = deepcopy(engine)
    use_packed_attention(trained)
    with torch.no_grad():
        for name, weight in trained.named_parameters():
            if name.endswith("gate.weight"):  # of the routers
                weight.normal_()
    backend = LocalBackend(trained, OptimizerConfig(0.05, 0.0, 0.9, 0.95, 1e-8, 1.0))
    batch = round_batch(episode.sequences, [1.0, 0.0])
    for number, row in enumerate(episode.sequences):
        ids = torch.tensor([[*row.prompt_token_ids, *row.token_ids[:-1]]])
        expected = noted(engine, lambda ids=ids: engine(ids))
        inputs = collate(batch, [(number,)], Form(packed=True), CPU).inputs
        assert inputs.token_ids[0, : ids.shape[1]].equal(ids[0])
        found = noted(trained, lambda inputs=inputs: backend.logprobs(inputs, 1.0))
        assert found[: ids.shape[1]].equal(expected)
        own = noted(
            trained, lambda inputs=inputs: backend.logprobs(inputs._replace(routes=None), 1.0)
        )
        assert not own[: ids.shape[1]].equal(expected)


@pytest.mark.parametrize("served", [True, False])
def test_an_answer_without_experts_ends_the_run(
    forks: tuple[Stage, RoutesAsked], monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    stage, routes = forks
    one = stage.rollouts.one

    def silent(request: RolloutRequest) -> RolloutOutput:
        return one(request.model_copy(update={"routes": None}))

    monkeypatch.setattr(stage.rollouts, "one", silent)
    with pytest.raises(RunFailed, match=r"R3\): it has none"):
        stage.play([{}], n=1, served=served, routes=routes)
