"""REAL, "Rewards as Labels" (arXiv 2602.05630): tells a group's better completions from the others.

With the score s of a completion, its mean of logp - old, and of each group the loss

    log(1 + sum over positives of exp(-s / tau)) + log(1 + sum over negatives of exp(s / tau)),

averaged over groups. It takes a whole group at once, which may be in several micro-batches and ranks. Its gradient is
that of -s * A with the A of `real_advantages`, from the scores of the whole optimizer step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swift_r1.algorithms.method import Loss, TokenLoss, nowhere, setting

if TYPE_CHECKING:
    from torch import Tensor

    from swift_r1.algorithms.config import LossConfig


@dataclass(frozen=True)
class RealSettings:
    """The flags of REAL."""

    real_tau: float = setting(0.5, "real: temperature; the gradient is at most 1 / it", more_than=0)


if TYPE_CHECKING:

    class _Config(LossConfig, RealSettings): ...


def real(ratio: Tensor, logps: Tensor, advantages: Tensor, config: _Config) -> TokenLoss:
    """-log(r) * A with the A of `real_advantages`, whose mean over completions has the gradient of REAL's loss."""
    return TokenLoss(-ratio.log() * advantages, nowhere(ratio), nowhere(ratio))


def reward_labels(advantages: Tensor, valid: Tensor, num_generations: int) -> Tensor:
    """Returns 1 for a completion whose advantage is above 0, else -1; 0 where it is not valid, and in a group without
    both. `[N]`, the groups one after another, dtype of `advantages`; `valid` is bool `[N]`."""
    positive = (advantages > 0).view(-1, num_generations)
    negative = valid.view_as(positive) & ~positive
    both = positive.any(1, keepdim=True) & negative.any(1, keepdim=True)
    return (
        (positive & both).to(advantages.dtype) - (negative & both).to(advantages.dtype)
    ).flatten()


def real_advantages(
    scores: Tensor, labels: Tensor, num_generations: int, tau: float
) -> tuple[Tensor, Tensor]:
    """A = label * n / tau * p of each completion, p its share exp(-label * s / tau) / (1 + sum over its label's).

    Args:
        scores: `[N]`, of the whole optimizer step.
        labels: `[N]`, of `reward_labels`, 0 for completions that do not count.
        num_generations: n, completions per group.

    Returns:
        A `[N]`, and the sum of the groups' losses times n, scalar; both without gradient, float64, and to be divided by
        the number of completions.
    """
    labels = labels.detach().double().view(-1, num_generations)
    logits = -labels * scores.detach().double().view_as(labels) / tau
    advantages = logits.new_zeros(logits.shape)
    total = logits.new_zeros(())
    for label in (1, -1):
        own = logits.masked_fill(labels != label, -math.inf)
        log_sum = own.logsumexp(1, keepdim=True).logaddexp(own.new_zeros(()))
        advantages += label * (own - log_sum).exp() * num_generations / tau
        total += log_sum.sum() * num_generations
    return advantages.flatten(), total


def targets(scores: Tensor, labels: Tensor, config: _Config) -> tuple[Tensor, Tensor]:
    """Returns what `real_advantages` gives with the settings of a run."""
    return real_advantages(scores, labels, config.num_generations, config.real_tau)


METHODS = (
    Loss(
        name="real",
        function=real,
        mean_over="completions",
        settings=RealSettings,
        labels=reward_labels,
        targets=targets,
        ignores={
            "scale_rewards": "only the sign of advantages counts",
            "importance_sampling_level": "it has the sequence's mean",
        },
    ),
)
