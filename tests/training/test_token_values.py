"""Which completions are recorded, and that each token's values are at its place, however the step was cut."""

from __future__ import annotations

import pytest
import torch

from swift_r1.algorithms.config import LossConfig
from swift_r1.algorithms.losses import policy_loss
from swift_r1.data.prompts import Prompt
from swift_r1.rollout.scoring import ScoredRound
from swift_r1.rollout.trajectory import TokenSequence, Trajectory
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.batching import Batching, round_batch, split_step
from swift_r1.training.micro_batches import Form
from swift_r1.training.token_values import StepTokens, chosen

ALONE = Ranks(0, 1, torch.device("cpu"), None)
LENGTHS = (3, 1, 5, 2)
# the last stretch has no token yet
SPANS = (((0, 4),), ((0, 4),), ((0, 4), (3, 6)), ((0, 5), (2, 6)))


@pytest.mark.parametrize(
    "form", [Form(), Form(packed=True), Form(packed=True, shared=True)], ids=str
)
@pytest.mark.parametrize("per_token", [False, True])
def test_values_are_at_their_places(form: Form, per_token: bool) -> None:
    """The values tell where they come from: completion 2's token 3 has 2.3 in the logps, and so on."""
    completions = [
        [10 * sample + place for place in range(length)] for sample, length in enumerate(LENGTHS)
    ]
    masks = [[True] * length for length in LENGTHS]
    masks[2][1] = False  # a token that the policy did not write
    logps = [
        [sample + place / 10 for place in range(length)] for sample, length in enumerate(LENGTHS)
    ]
    prompts = [[7, 8]] * 2 + [[9]] * 2
    batch = round_batch(
        [TokenSequence(*row) for row in zip(prompts, completions, logps, masks, strict=True)],
        [0.0] * 4,
    )
    recorded = [{"sample": sample, "weight_versions": SPANS[sample]} for sample in (0, 2, 3)]
    tokens = StepTokens(recorded, batch, with_reference=False)
    for micro in split_step(batch, range(4), Batching(form, 1, 2, max_tokens=8), ALONE):
        values = micro.rollout_logps * micro.mask
        result = policy_loss(values, values, torch.ones(len(values)), micro.trained, LossConfig())
        tokens.add(micro, values, 10 * values, result)
    advantages = torch.arange(4.0)
    rows = tokens.rows(advantages[:, None].expand(4, 5) if per_token else advantages, ALONE)
    assert rows is not None
    assert rows.lengths.tolist() == [3, 5, 2] and rows.prompt_token_ids.tolist() == [7, 8, 9, 9]
    expected = {
        "token_ids": [0, 1, 2, 20, 21, 22, 23, 24, 30, 31],
        "rollout_logps": [0, 0.1, 0.2, 2, 2.1, 2.2, 2.3, 2.4, 3, 3.1],
        "logps": [0, 0.1, 0.2, 2, 0, 2.2, 2.3, 2.4, 3, 3.1],
        "entropies": [0, 1, 2, 20, 0, 22, 23, 24, 30, 31],
        "ratios": [1] * 10,
        "clipped": [0] * 10,
        "mask": [1, 1, 1, 1, 0, 1, 1, 1, 1, 1],
        "written": [1, 1, 1, 1, 0, 1, 1, 1, 1, 1],
        "advantages": [0, 0, 0, 2, 2, 2, 2, 2, 3, 3],
        "weight_versions": [4, 4, 4, 4, 4, 4, 6, 6, 5, 5],
    }
    assert {name: values.tolist() for name, values in rows.tokens.items()} == {
        name: pytest.approx(values) for name, values in expected.items()
    }


def completions_of(prompt_ids: list[str]) -> ScoredRound:
    """A round with two completions of each prompt."""

    def one(prompt_id: str, number: int) -> Trajectory:
        prompt = Prompt(prompt_id, "data", (), "", (1,), {})
        row = TokenSequence.of_answer(prompt.token_ids, [2])
        return Trajectory(prompt_id, prompt, [row], [[2]], [], "", "stop", number=number)

    return ScoredRound(
        [one(prompt_id, number) for prompt_id in prompt_ids for number in range(2)], []
    )


def test_a_prompt_is_chosen_by_its_id() -> None:
    prompts = [f"data:{number}" for number in range(1000)]

    def of(prompt_ids: list[str], size: int, share: float) -> list[str]:
        return [
            one["prompt_id"] for one in chosen(completions_of(prompt_ids), 1, size, share, ALONE)
        ]

    some = of(prompts, 2000, 0.25)
    assert 400 < len(some) < 600 and len(some) == 2 * len(set(some))
    assert set(of(prompts[::-1], 200, 0.25)) == set(some)
    assert set(some) < set(of(prompts, 2000, 0.5))
    assert of(prompts, 8, 0) == [] and len(of(prompts, 8, 1)) == 2000
    # One at least in each optimizer step, here of four completions.
    few = of(prompts, 4, 1e-9)
    assert len(few) == 2 * 500 and all(
        {few[2 * step]} < set(prompts[2 * step : 2 * step + 2]) for step in range(500)
    )
