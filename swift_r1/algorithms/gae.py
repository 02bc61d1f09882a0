"""Generalised advantage estimation and the value loss, for PPO with a value model.

Sources: GAE (arXiv 1506.02438, eq. 16), PPO (1707.06347, eq. 9), its value clipping as in Engstrom et al. (2005.12729).
"""

from __future__ import annotations

import torch
from torch import Tensor

from swift_r1.algorithms.aggregation import divide
from swift_r1.algorithms.metrics import masked_metric
from swift_r1.algorithms.policy import LossOutput


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """delta_t = r_t + gamma * V_{t+1} - V_t;  A_t = delta_t + gamma * lam * A_{t+1};  return_t = A_t + V_t

    `t + 1` is the row's next trained token; after its last one V and A are 0 (the completion ends there).

    Args:
        rewards: `[B, T]`, of tokens; the reward of a completion stands at its last trained token.
        values: `[B, T]`, of the state before each token.
        mask: `[B, T]`, not 0 on trained tokens; what stands elsewhere has no effect, NaN and rewards included.
        gamma: discount, 0 to 1.
        lam: 0 (one step) to 1 (the whole return less the value).

    Returns:
        `(advantages, returns)`, each `[B, T]`, without gradient, 0 where masked out; float64 where an input is,
        else float32.

    Raises:
        ValueError: shapes that do not fit together, or `gamma` or `lam` outside 0 to 1.
    """
    if rewards.dim() != 2 or not rewards.shape == values.shape == mask.shape:
        shapes = [tuple(t.shape) for t in (rewards, values, mask)]
        raise ValueError(f"rewards, values and mask must be of one shape [B, T], got {shapes}")
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0 <= number <= 1:
            raise ValueError(f"{name} must be from 0 to 1, got {number}")
    trained = mask != 0
    dtype = torch.promote_types(torch.promote_types(rewards.dtype, values.dtype), torch.float32)
    rewards = rewards.detach().to(dtype)
    values = values.detach().to(dtype).masked_fill(~trained, 0.0)

    advantages = torch.zeros_like(values)
    next_value = values.new_zeros(values.shape[0])
    next_advantage = torch.zeros_like(next_value)
    for t in reversed(range(values.shape[1])):
        here = trained[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(here, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = torch.where(here, next_advantage, 0.0)
    return advantages, advantages + values


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    cliprange_value: float | None,
    *,
    normalizer: Tensor | float | None = None,
) -> LossOutput:
    """0.5 * max((V - R)^2, (V_clip - R)^2), V_clip = old + clip(V - old, -c, c); the mean over trained tokens.

    Args:
        values: `[B, T]`, the value model's; only they get a gradient.
        old_values: `[B, T]`, as they were when `returns` were made.
        returns: `[B, T]`, of `gae`.
        mask: `[B, T]`, not 0 on trained tokens.
        cliprange_value: `c`, above 0; None: no clipping.
        normalizer: trained tokens of the whole optimizer step, over all micro-batches and ranks; by default this
            call's own.

    Returns:
        The loss (float64 for float64 `values`, else float32; parts of a step add up) and the metric
        `clip_ratio/value`: the share of tokens whose clipped error is the larger one, and that get no gradient.

    Raises:
        ValueError: shapes that do not fit together, or a clip range that is not above 0.
    """
    if values.dim() != 2 or not values.shape == old_values.shape == returns.shape == mask.shape:
        shapes = [tuple(t.shape) for t in (values, old_values, returns, mask)]
        raise ValueError(f"values, old_values, returns and mask must be of one shape [B, T], got {shapes}")
    if cliprange_value is not None and not cliprange_value > 0:
        raise ValueError(f"cliprange_value must be above 0, got {cliprange_value}")
    trained = mask != 0
    dtype = torch.promote_types(values.dtype, torch.float32)
    values = values.to(dtype).masked_fill(~trained, 0.0)
    old_values = old_values.detach().to(dtype).masked_fill(~trained, 0.0)
    returns = returns.detach().to(dtype).masked_fill(~trained, 0.0)
    error = (values - returns).square()
    over = torch.zeros_like(trained)
    if cliprange_value is not None:
        clipped = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
        other = (clipped - returns).square()
        over = other > error
        error = torch.maximum(error, other)
    weight = trained.to(dtype)
    total = (0.5 * error * weight).sum()
    loss = divide(total, trained.sum().double() if normalizer is None else normalizer)
    return LossOutput(loss, masked_metric("clip_ratio/value", over, weight))
