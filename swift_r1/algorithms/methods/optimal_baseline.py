"""Optimal token baseline: each token has the baseline of least variance of the gradient, not one per completion.

"The Optimal Token Baseline" (arXiv 2602.07078), verl's `optimal_token_baseline`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swift_r1.algorithms.groups import centre, constant
from swift_r1.algorithms.method import Estimator

if TYPE_CHECKING:
    from torch import Tensor

LEAST_ENERGY = 1e-8
"""Added to each W: where all tokens so far were certain, completions count alike."""


def energies(old_logps: Tensor, squares: Tensor) -> Tensor:
    """1 - 2 p_t + sum of p^2 over the vocabulary: the squared norm of the gradient of log p_t by the logits; same shape."""
    return 1 - 2 * old_logps.exp() + squares


def token_advantages(
    rewards: Tensor,
    old_logps: Tensor,
    squares: Tensor,
    mask: Tensor,
    num_generations: int,
    weights: Tensor | None = None,
) -> Tensor:
    """A_t = r - B_t, B_t = sum of r * W_t over the group / sum of W_t, W_t = sum over j <= t of `energies` * w_j^2.

    t counts the tokens that the policy wrote; a completion that has ended before t is not in the sums. Where only one goes
    on, its B is its reward.

    Args:
        rewards: float `[N]`, the groups one after another; one that is not finite is invalid: its A is 0.
        old_logps: `[N, T]`, of the policy that sampled.
        squares: `[N, T]`, the sum of its squared probabilities at each token.
        mask: bool `[N, T]`, True on tokens that the policy wrote.
        num_generations: completions per group; divides `N`.
        weights: `[N, T]`, w of a correction between engine and trainer; None: 1.

    Returns:
        float32 `[N, T]`, without gradient; 0 where masked out, and in groups of equal rewards.
    """
    energy = energies(old_logps.detach().double(), squares.double())
    if weights is not None:
        energy = energy * weights.double().square()
    path = energy.masked_fill(~mask, 0.0).cumsum(1) + LEAST_ENERGY
    # each token's number among those written; a column more for the others
    width = mask.shape[1]
    numbers = (mask.long().cumsum(1) - 1).masked_fill(~mask, width)
    by_number = path.new_zeros(len(path), width + 1).scatter(1, numbers, path)[:, :width]

    grouped = rewards.detach().double().view(-1, num_generations, 1)
    valid = grouped.isfinite()
    grouped = grouped.masked_fill(~valid, 0.0)
    shares = by_number.view(-1, num_generations, width) * valid
    total = shares.sum(1, keepdim=True)
    baseline = (grouped * shares).sum(1, keepdim=True) / total.clamp(min=LEAST_ENERGY)
    equal = constant(grouped.squeeze(2), valid.squeeze(2))[:, :, None]
    numbered = (grouped - baseline).masked_fill(~valid | equal, 0.0).flatten(0, 1)
    return numbered.gather(1, numbers.clamp(max=width - 1)).masked_fill(~mask, 0.0).float()


METHODS = (
    Estimator(
        name="optimal_token_baseline",
        centre=centre,
        default_scale="none",
        of_tokens=token_advantages,
    ),
)
