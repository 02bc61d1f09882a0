"""The metrics that only the diagnosis reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swift_r1.record.metrics import slowdown
from swift_r1.rollout.scoring import text_metrics
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.grpo import changed_share, weight_sample


def trajectory(request_id: str, prompt: str, text: str, ids: list[int]) -> Any:
    asked = SimpleNamespace(text=prompt, token_ids=tuple(prompt.encode()), images=())
    return SimpleNamespace(
        request_id=request_id,
        prompt=asked,
        text=text,
        sequences=[SimpleNamespace(token_ids=tuple(ids), turns=())],
    )


def test_repetition_is_of_the_policy_s_own_tokens_however_an_episode_is_cut() -> None:
    """Its environment says the same again and again; of its own turns the third is the first."""
    said = [5] * 60
    turns = [list(range(10, 30)), list(range(40, 60)), list(range(10, 30))]
    one = trajectory("a", "1", "2", [*turns[0], *said, *turns[1], *said, *turns[2]])
    [whole] = one.sequences
    whole.turns = [0] * 20 + [-1] * 60 + [1] * 20 + [-1] * 60 + [2] * 20
    expected = {"completions/repetition": pytest.approx(13 / 39)}
    assert text_metrics([one]).items() >= expected.items()
    one.sequences = [
        SimpleNamespace(token_ids=tuple(ids + said), turns=[turn] * 20 + [-1] * 60)
        for turn, ids in enumerate(turns)
    ]
    assert text_metrics([one]).items() >= expected.items()
    one.sequences = []
    assert "completions/repetition" not in text_metrics([one])


def test_metrics_of_a_round() -> None:
    loop, plain = [1, 2] * 20, list(range(40))
    found = text_metrics(
        [
            trajectory("a", "say да", "да no", loop),
            trajectory("a", "say да", "学习", plain),
            trajectory("b", "say да", "", [1]),
            trajectory("b", "say да", "", [1]),
        ]
    )
    assert found == {
        "prompts/repeated": 0.5,
        "completions/repeated": 0.25,
        "completions/repetition": pytest.approx(31 / 66),
        "completions/foreign_letters": pytest.approx(2 / 6),
    }
    assert text_metrics([trajectory("a", "1", "2", [5])]) == {
        "prompts/repeated": 0.0,
        "completions/repeated": 0.0,
    }


def test_the_slowest_of_several() -> None:
    assert slowdown("rank", [1.0]) == {} and slowdown("rank", [1.0, 0.0]) == {}
    assert slowdown("rank", [1.0, 3.0]) == {"time/rank_slowdown": 3.0, "time/slowest_rank": 1.0}
    assert slowdown("server", [4.0, 0.0, 1.0, 2.0, 3.0])["time/server_slowdown"] == 2.0


def test_weights_that_round_to_what_they_were() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 2000)).to(
        torch.bfloat16
    )
    model[0].requires_grad_(False)
    ranks = Ranks(0, 1, torch.device("cpu"), None)
    before = weight_sample(model)
    # of the matrix alone
    assert before.dtype == torch.bfloat16 and len(before) == len(range(0, 60_000, 234))
    with torch.no_grad():
        model[1].bias += 1e3
        model[1].weight[:100] = 0.0
    before = weight_sample(model)
    with torch.no_grad():
        model[1].weight += 1e-9
    assert changed_share(before, weight_sample(model), ranks) == {"weights/changed": 0.0}
    with torch.no_grad():
        model[1].weight[:1000] += 1.0
    share = changed_share(before, weight_sample(model), ranks)["weights/changed"]
    assert share == pytest.approx(900 / 1900, abs=0.02)
    assert changed_share(weight_sample(model.float()), weight_sample(model), ranks) == {}
