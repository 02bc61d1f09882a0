"""The losses of single tokens, one function a formula, each from a ratio `r`, log-probs and an advantage `A`.

All take `ratio` `[B, T]` (the same number along a row at sequence level), `logps` `[B, T]` and `advantages` `[B, T]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from swift_r1.algorithms.config import LossConfig


class TokenLoss(NamedTuple):
    """`loss` `[B, T]`; bool `[B, T]` where the ratio was clipped from below and from above."""

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def clipped_surrogate(ratio: Tensor, logps: Tensor, advantages: Tensor, config: LossConfig) -> TokenLoss:
    """-min(min(r, delta) * A, clip(r, 1 - epsilon, 1 + epsilon_high) * A)

    PPO (arXiv 1707.06347, eq. 7) and GRPO (2402.03300, eq. 3); a higher upper bound: DAPO (2503.14476);
    the cap `delta`: INTELLECT-2 (2505.07291).
    """
    low, high = 1 - config.epsilon, 1 + config.clip_high
    clipped = ratio.clamp(low, high)
    unclipped = ratio if config.delta is None else ratio.clamp(max=config.delta)
    loss = -torch.minimum(unclipped * advantages, clipped * advantages)
    return TokenLoss(loss, (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0))


def cispo(ratio: Tensor, logps: Tensor, advantages: Tensor, config: LossConfig) -> TokenLoss:
    """-stopgrad(min(r, epsilon_high)) * A * logp, where `epsilon_high` is the cap itself.

    MiniMax-M1 (arXiv 2506.13585, eq. 4): no token loses its gradient, its weight is capped instead.
    """
    weight = ratio.detach().clamp(max=config.clip_high)
    capped = (ratio > config.clip_high) & (advantages != 0)
    return TokenLoss(-weight * advantages * logps, torch.zeros_like(capped), capped)


def sapo(ratio: Tensor, logps: Tensor, advantages: Tensor, config: LossConfig) -> TokenLoss:
    """-(4 / tau) * sigmoid(tau * (r - 1)) * A, tau = `tau_pos` where A > 0, else `tau_neg`.

    SAPO (arXiv 2511.20347): a soft gate in the place of the clip, slope 1 at r = 1. Nothing is clipped.
    """
    tau = torch.full_like(ratio, config.tau_neg).masked_fill(advantages > 0, config.tau_pos)
    gate = torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    return TokenLoss(-gate * advantages, nothing, nothing)


TOKEN_LOSSES: Mapping[str, Callable[[Tensor, Tensor, Tensor, LossConfig], TokenLoss]] = {
    "grpo": clipped_surrogate,
    "bnpo": clipped_surrogate,
    "dapo": clipped_surrogate,
    "dr_grpo": clipped_surrogate,
    "cispo": cispo,
    "sapo": sapo,
}
"""`--loss_type` to its formula; the denominators are in `swift_r1.algorithms.aggregation`."""
