"""GMPO (arXiv 2507.20673): the geometric mean of a completion's token ratios, each of them clipped first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swift_r1.algorithms.method import Loss, TokenLoss, nowhere

if TYPE_CHECKING:
    from torch import Tensor

    from swift_r1.algorithms.config import LossConfig


def limited(log_ratio: Tensor, advantages: Tensor, config: LossConfig) -> Tensor:
    """min(log r, epsilon_high) where A > 0, max(log r, -epsilon) where A < 0: the paper's clip of r, from
    exp(-epsilon) to exp(epsilon_high), on the side to which A draws it."""
    high = log_ratio.clamp(max=config.clip_high)
    low = log_ratio.clamp(min=-config.epsilon)
    return high.where(advantages > 0, low.where(advantages < 0, log_ratio))


def gmpo(ratio: Tensor, logps: Tensor, advantages: Tensor, config: LossConfig) -> TokenLoss:
    """-r * A with the completion's r: exp of the mean of `limited` over its tokens."""
    return TokenLoss(-ratio * advantages, nowhere(ratio), nowhere(ratio))


METHODS = (
    Loss(
        name="gmpo",
        function=gmpo,
        mean_over="completions",
        reads=("epsilon", "epsilon_high"),
        limit=limited,
        ignores={"importance_sampling_level": "it has the geometric mean over the completion"},
    ),
)
