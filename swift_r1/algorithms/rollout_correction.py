"""Importance weights for the gap between the engine that sampled and the trainer that learns.

Both hold the same weights, yet their log-probs differ by numerics; the weight `trainer / engine` corrects for it.
Sources: truncated importance sampling, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
(Yao et al. 2025); masking, IcePop (Ling team 2025) and MIS (Liu et al. 2025).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from swift_r1.algorithms.aggregation import token_means
from swift_r1.algorithms.config import RolloutCorrection


class RolloutWeights(NamedTuple):
    """`weights` and bool `over` (above the threshold before it was applied): `[B, T]`, or `[B, 1]` for sequences."""

    weights: Tensor
    over: Tensor


def rollout_weights(
    old_logps: Tensor, rollout_logps: Tensor, mask: Tensor, mode: RolloutCorrection, threshold: float
) -> RolloutWeights:
    """w = exp(old - rollout), a token or (its geometric mean) a completion, kept below `threshold`.

    `*_truncate` gives `min(w, threshold)`; `*_mask` gives `w` where `w <= threshold`, else 0.

    Args:
        old_logps: `[B, T]`, the trainer's, under the weights that sampled; finite where masked out too.
        rollout_logps: `[B, T]`, the engine's for the same tokens; finite where masked out too.
        mask: `[B, T]`, 1 on trained tokens, dtype of `old_logps`.
        mode: what a weight belongs to, and what happens above the threshold.
        threshold: the largest weight, above 0.

    Returns:
        Weights without gradient.
    """
    log_ratio = (old_logps - rollout_logps).detach()
    if mode.startswith("sequence"):
        log_ratio = token_means(log_ratio, mask)[:, None]
    ratio = log_ratio.exp()  # may overflow: the threshold is below infinity, and there is no backward pass
    over = ratio > threshold
    weights = ratio.masked_fill(over, 0.0) if mode.endswith("mask") else ratio.clamp(max=threshold)
    return RolloutWeights(weights, over)
