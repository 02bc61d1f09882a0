"""Losses and the optimal token baseline against verl, from numbers that verl wrote (`fixtures/make_verl_cases.py`).

Where we differ from verl on purpose: Clip-Cov and KL-Cov choose tokens of the whole optimizer step by the policy before the
round, verl those of a micro-batch by the policy of the moment; here that policy's log-probs are given for the choice. Where
one completion of a group goes on alone its advantage is 0; verl's is its reward by default (`handle_zero_tail`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from swift_r1.algorithms.config import LossConfig
from swift_r1.algorithms.losses import marked_tokens, policy_loss
from swift_r1.algorithms.methods.optimal_baseline import token_advantages

DOCUMENT = json.loads(Path(__file__).with_name("fixtures").joinpath("verl_cases.json").read_text())
GIVEN = {
    name: torch.tensor(value, dtype=torch.float64) for name, value in DOCUMENT["inputs"].items()
}
MASK = GIVEN["mask"].bool()
NAMES = {"clip_ratio": "epsilon", "clip_ratio_high": "epsilon_high"}


@pytest.mark.parametrize("name", DOCUMENT["cases"])
def test_loss_and_gradient_agree_with_verl(name: str) -> None:
    case = DOCUMENT["cases"][name]
    settings = {NAMES.get(key, key): value for key, value in case["settings"].items()}
    config = LossConfig(loss_type=name.removesuffix("_high"), **settings)
    logps = GIVEN["logps"].clone().requires_grad_()
    marked = None
    if config.loss.marks is not None:
        advantages = GIVEN["advantages"][:, None].expand_as(MASK)
        marked = marked_tokens(logps, advantages, MASK, config, seed=0)
        assert marked.any() and not marked[MASK].all()
    output = policy_loss(
        logps, GIVEN["old_logps"], GIVEN["advantages"], MASK, config, marked=marked
    )
    (grad,) = torch.autograd.grad(output.loss, logps)
    assert output.loss.item() == pytest.approx(case["loss"], rel=1e-7)
    expected = torch.tensor(case["grad"], dtype=torch.float64)
    torch.testing.assert_close(grad, expected, rtol=1e-6, atol=1e-9)
    clips = name != "kl_cov"  # and then only some of the tokens
    assert (expected[MASK] != 0).sum() > 0 and clips == (expected[MASK] == 0).any()


@pytest.mark.parametrize("name", DOCUMENT["optimal_token_baseline"])
def test_the_optimal_token_baseline_agrees_with_verl(name: str) -> None:
    found = token_advantages(
        GIVEN["rewards"],
        GIVEN["old_logps"],
        GIVEN["squares"],
        MASK,
        DOCUMENT["group"],
        GIVEN["weights"] if name == "corrected" else None,
    )
    expected = torch.tensor(DOCUMENT["optimal_token_baseline"][name])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
