"""The entropy bonus in the loss."""

from __future__ import annotations

import math

import pytest
import torch

from swift_r1.algorithms.config import LossConfig
from swift_r1.algorithms.losses import policy_loss


def test_the_bonus_is_a_gradient_of_the_entropies_alone() -> None:
    """Not of those that the filter chooses by, and of filtered tokens too; padding may hold anything."""
    entropies = torch.tensor([[0.5, 2.0, 1.0], [3.0, math.nan, math.inf]], dtype=torch.float64)
    chosen_by = entropies.nan_to_num(posinf=0.0).flip(0).requires_grad_()
    entropies.requires_grad_()
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    nothing = torch.zeros(2, 3, dtype=torch.float64)
    for loss_type, slopes in (
        ("bnpo", [[1 / 4] * 3, [1 / 4, 0, 0]]),
        ("grpo", [[1 / 6] * 3, [1 / 2, 0, 0]]),
    ):
        config = LossConfig(loss_type=loss_type, entropy_coef=0.2, top_entropy_quantile=0.5)
        output = policy_loss(
            nothing,
            nothing,
            torch.zeros(2),
            mask,
            config,
            entropies=entropies,
            old_entropies=chosen_by,
        )
        (slope,) = torch.autograd.grad(output.loss, entropies)
        torch.testing.assert_close(slope, -0.2 * torch.tensor(slopes, dtype=torch.float64))
    assert not output.loss.requires_grad or output.metrics["entropy/sum"] == 6.5
    with pytest.raises(ValueError, match="entropy_coef above 0 needs entropies"):
        policy_loss(nothing, nothing, torch.zeros(2), mask, LossConfig(entropy_coef=0.1))
