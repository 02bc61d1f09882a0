"""GRPO (arXiv 2402.03300), and the losses that have another divisor: BNPO, DAPO (2503.14476), Dr. GRPO (2503.20783)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swift_r1.algorithms.groups import centre
from swift_r1.algorithms.method import Estimator, Loss, TokenLoss

if TYPE_CHECKING:
    from torch import Tensor

    from swift_r1.algorithms.config import LossConfig

CLIPS = ("epsilon", "epsilon_high", "delta")


def clipped_surrogate(
    ratio: Tensor, logps: Tensor, advantages: Tensor, config: LossConfig
) -> TokenLoss:
    """-min(min(r, delta) * A, clip(r, 1 - epsilon, 1 + epsilon_high) * A)

    PPO (arXiv 1707.06347, eq. 7) and GRPO (2402.03300, eq. 3); a higher upper bound: DAPO (2503.14476);
    the cap `delta`: INTELLECT-2 (2505.07291).
    """
    low = 1 - config.epsilon
    high = 1 + config.clip_high
    clipped = ratio.clamp(low, high)
    unclipped = ratio if config.delta is None else ratio.clamp(max=config.delta)
    loss = -(unclipped * advantages).minimum(clipped * advantages)
    return TokenLoss(loss, (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0))


METHODS = (
    Estimator(name="grpo", centre=centre),
    Loss(name="grpo", function=clipped_surrogate, reads=CLIPS, mean_over="completions"),
    Loss(name="bnpo", function=clipped_surrogate, reads=CLIPS),
    Loss(name="dapo", function=clipped_surrogate, reads=CLIPS),
    Loss(name="dr_grpo", function=clipped_surrogate, reads=CLIPS, mean_over="length"),
)
