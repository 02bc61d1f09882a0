"""The KL to a reference policy: its estimates for each token, and its share in a reward."""

from __future__ import annotations

import torch
from torch import Tensor

from swift_r1.algorithms.method import LOG_RATIO_BOUND


def k1(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """`logp - ref`: unbiased, noisy, may be negative. Same shape as the inputs.

    k1 and k3: J. Schulman, "Approximating KL Divergence", 2020.
    """
    return logps - ref_logps


def k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """`exp(ref - logp) - (ref - logp) - 1`: never negative. Same shape as the inputs."""
    log_ratio = (ref_logps - logps).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return log_ratio.exp() - log_ratio - 1


def rewards_less_kl(
    rewards: Tensor, logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float
) -> Tensor:
    """`--kl_in_reward`: each reward less `beta` times the sum of k1 over the completion's trained tokens.

    Args:
        rewards: float `[B]`; NaN stays NaN.
        logps, ref_logps: `[B, T]`, of the policy that sampled and of the reference policy.
        mask: `[B, T]`, 1 on trained tokens.

    Returns:
        `[B]`, without gradient; float64 for float64 rewards, else float32.
    """
    if not (rewards.shape == logps.shape[:1] and logps.shape == ref_logps.shape == mask.shape):
        shapes = [tuple(t.shape) for t in (rewards, logps, ref_logps, mask)]
        raise ValueError(
            f"rewards, logps, ref_logps, mask must be [B], [B, T], [B, T], [B, T], got {shapes}"
        )
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    tokens = k1(logps.detach().to(dtype), ref_logps.detach().to(dtype)).masked_fill(mask == 0, 0.0)
    return rewards.detach().to(dtype) - beta * tokens.sum(1)
