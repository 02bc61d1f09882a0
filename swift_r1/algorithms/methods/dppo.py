"""DPPO (arXiv 2602.04879): a token leaves the loss by how far its probability has moved, not by their ratio.

Both divergences are of two outcomes, the sampled token and any other one: cheap lower bounds of those over the whole
vocabulary. A rare token's ratio may be large where its probability has hardly moved, and a likely one's small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from swift_r1.algorithms.method import Loss, TokenLoss

if TYPE_CHECKING:
    from torch import Tensor

    from swift_r1.algorithms.config import LossConfig

LARGEST_RATIO = 20.0
"""The weight of a token is its ratio up to this; as in verl (section 5.4 of the paper)."""
LEAST_REST = 1e-8
"""The probability of all other tokens counts as this much at least: its log is needed."""


def binary_tv(p: Tensor, old: Tensor) -> Tensor:
    """|p - old|, the total variation (eq. 13); of probabilities, same shape."""
    return (p - old).abs()


def binary_kl(p: Tensor, old: Tensor) -> Tensor:
    """KL(old || p) = old * log(old / p) + (1 - old) * log((1 - old) / (1 - p)), nats (eq. 14); of probabilities above 0,
    same shape."""
    rest = (1 - p).clamp(min=LEAST_REST)
    old_rest = (1 - old).clamp(min=LEAST_REST)
    return old * (old / p).log() + old_rest * (old_rest / rest).log()


def dppo_tv(ratio: Tensor, logps: Tensor, advantages: Tensor, config: LossConfig) -> TokenLoss:
    """`_masked` by `binary_tv`."""
    return _masked(ratio, logps, advantages, config, "dppo_tv", binary_tv)


def dppo_kl(ratio: Tensor, logps: Tensor, advantages: Tensor, config: LossConfig) -> TokenLoss:
    """`_masked` by `binary_kl`."""
    return _masked(ratio, logps, advantages, config, "dppo_kl", binary_kl)


def _masked(
    ratio: Tensor,
    logps: Tensor,
    advantages: Tensor,
    config: LossConfig,
    name: str,
    measure: Callable[[Tensor, Tensor], Tensor],
) -> TokenLoss:
    """-stopgrad(min(r, 20)) * A * logp (eq. 11); 0 where A > 0, r > 1 and the divergence is above `epsilon_high`, or
    A < 0, r < 1 and it is above `epsilon` (eq. 12): where the update would lead further away."""
    p = logps.detach().exp()
    divergence = measure(p, p / ratio.detach())
    high = (advantages > 0) & (ratio > 1) & (divergence > config.clip_high)
    low = (advantages < 0) & (ratio < 1) & (divergence > config.epsilon)
    weight = ratio.detach().clamp(max=LARGEST_RATIO)
    loss = (-weight * advantages * logps).masked_fill(high | low, 0.0)
    return TokenLoss(loss, low, high, {f"{name}/divergence": divergence})


METHODS = (
    Loss(
        name="dppo_tv",
        function=dppo_tv,
        reads=("epsilon", "epsilon_high"),
        ratio_of_tokens=True,
        metrics=(
            (
                "dppo_tv/divergence",
                "change of a sampled token's probability since the round began, mean",
                "probability",
                "below 0.01",
            ),
        ),
    ),
    Loss(
        name="dppo_kl",
        function=dppo_kl,
        reads=("epsilon", "epsilon_high"),
        ratio_of_tokens=True,
        metrics=(
            (
                "dppo_kl/divergence",
                "KL of a sampled token's probability, and that of all others, since the round began, mean",
                "nats",
                "below 0.01",
            ),
        ),
    ),
)
