"""SAPO (arXiv 2511.20347): a soft gate in the place of the clip, slope 1 at r = 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swift_r1.algorithms.method import Loss, TokenLoss, nowhere, setting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SapoSettings:
    """The flags of SAPO."""

    tau_pos: float = setting(1.0, "sapo: temperature where the advantage is positive", more_than=0)
    tau_neg: float = setting(1.05, "sapo: temperature where the advantage is negative", more_than=0)


def sapo(ratio: Tensor, logps: Tensor, advantages: Tensor, config: SapoSettings) -> TokenLoss:
    """-(4 / tau) * sigmoid(tau * (r - 1)) * A, tau = `tau_pos` where A > 0, else `tau_neg`. Nothing is clipped."""
    tau = ratio.new_full(ratio.shape, config.tau_neg).masked_fill(advantages > 0, config.tau_pos)
    gate = (tau * (ratio - 1)).sigmoid() * (4 / tau)
    return TokenLoss(-gate * advantages, nowhere(ratio), nowhere(ratio))


METHODS = (Loss(name="sapo", function=sapo, mean_over="completions", settings=SapoSettings),)
