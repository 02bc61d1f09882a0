"""REAL, "Rewards as Labels" (arXiv 2602.05630): tells a group's better completions from the others.

With the score s of a completion, its mean of logp - old, and of each group the loss

    log(1 + sum over positives of exp(-s / tau)) + log(1 + sum over negatives of exp(s / tau)),

averaged over groups. It takes a whole group at once, which may be in several micro-batches and ranks. Its gradient is
that of -s * A with the A of `real_advantages`, from the scores of the whole optimizer step.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reward_labels(advantages: Tensor, valid: Tensor, num_generations: int) -> Tensor:
    """Of each completion 1 where its advantage is above 0, else -1; 0 where it is not valid, and in a group without
    both. `[N]`, the groups one after another, dtype of `advantages`; `valid` is bool `[N]`."""
    positive = (advantages > 0).view(-1, num_generations)
    negative = valid.view_as(positive) & ~positive
    both = positive.any(1, keepdim=True) & negative.any(1, keepdim=True)
    return ((positive & both).to(advantages.dtype) - (negative & both).to(advantages.dtype)).flatten()


def real_advantages(scores: Tensor, labels: Tensor, num_generations: int, tau: float) -> tuple[Tensor, Tensor]:
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
    advantages = torch.zeros_like(logits)
    total = logits.new_zeros(())
    for label in (1, -1):
        own = logits.masked_fill(labels != label, -torch.inf)
        log_sum = torch.logaddexp(own.logsumexp(1, keepdim=True), own.new_zeros(()))
        advantages += label * (own - log_sum).exp() * num_generations / tau
        total += log_sum.sum() * num_generations
    return advantages.flatten(), total
