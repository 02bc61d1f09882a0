"""CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4): no token loses its gradient, its weight is capped instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swift_r1.algorithms.method import Loss, TokenLoss, nowhere

if TYPE_CHECKING:
    from torch import Tensor

    from swift_r1.algorithms.config import LossConfig


def cispo(ratio: Tensor, logps: Tensor, advantages: Tensor, config: LossConfig) -> TokenLoss:
    """-stopgrad(min(r, epsilon_high)) * A * logp, where `epsilon_high` is the cap itself."""
    weight = ratio.detach().clamp(max=config.clip_high)
    capped = (ratio > config.clip_high) & (advantages != 0)
    return TokenLoss(-weight * advantages * logps, nowhere(ratio), capped)


METHODS = (Loss(name="cispo", function=cispo, reads=("epsilon_high",), cap=5.0),)
