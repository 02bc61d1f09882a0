"""CHORD (arXiv 2508.11408): (1 - mu) * the policy's loss + mu * the loss of experts' answers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from swift_r1.algorithms.aggregation import check_shapes, divide, masked_metric
from swift_r1.algorithms.losses import LossOutput


def chord_mu(step: int, warmup_steps: int, decay_steps: int, peak: float, valley: float) -> float:
    """CHORD-mu: to `peak` in a line over `warmup_steps`, to `valley` along a cosine over `decay_steps`, and it stays;
    `step` counts the optimizer steps done."""
    if step < warmup_steps:
        return peak * step / warmup_steps
    if step >= warmup_steps + decay_steps:
        return valley
    return valley + (peak - valley) * 0.5 * (
        1 + math.cos(math.pi * (step - warmup_steps) / decay_steps)
    )


def expert_loss(
    logps: Tensor,
    mask: Tensor,
    *,
    enable_phi: bool = False,
    normalizer: Tensor | float | None = None,
) -> LossOutput:
    """-logp; with `enable_phi` times p * (1 - p) of p = stopgrad(exp(logp)), CHORD-phi. The mean over tokens.

    Args:
        logps: `[B, T]`, of experts' answers, under the policy at temperature 1.
        mask: `[B, T]`, not 0 on their tokens.
        normalizer: their number in the whole optimizer step; by default this call's own.

    Returns:
        The loss (parts of a step add up), and the metric `chord/nll`: -logp without the weight.
    """
    check_shapes(logps=logps, mask=mask)
    trained = mask != 0
    logps = logps.to(torch.promote_types(logps.dtype, torch.float32)).masked_fill(~trained, 0.0)
    p = logps.detach().exp()
    weight = p * (1 - p) if enable_phi else torch.ones_like(p)
    loss = divide(
        -(logps * weight).sum(), trained.sum().double() if normalizer is None else normalizer
    )
    return LossOutput(loss, masked_metric("chord/nll", -logps, trained.to(logps.dtype)))
