"""FIPO (arXiv 2603.19835): a token counts as the policy has moved on what followed it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swift_r1.algorithms.method import LOG_RATIO_BOUND, Loss, TokenLoss, nowhere, setting
from swift_r1.algorithms.methods.grpo import CLIPS, clipped_surrogate

if TYPE_CHECKING:
    from torch import Tensor

    from swift_r1.algorithms.config import LossConfig


@dataclass(frozen=True)
class FipoSettings:
    """The flags of FIPO."""

    fipo_decay_rate: float = setting(
        32.0, "fipo: tokens until the effect of later ones on a token's weight is half", more_than=0
    )
    fipo_clip_range: float | None = setting(
        0.2, "fipo: how far a token's weight may be from 1; 0: any", at_least=0, less_than=1
    )
    fipo_clip_high_only: bool = setting(True, "fipo: no weight below 1")
    fipo_safety_threshold: float | None = setting(
        4.0,
        "fipo: ratio above which a token of negative advantage has a weight of 0.8 to 1",
        more_than=0,
    )


if TYPE_CHECKING:

    class _Config(LossConfig, FipoSettings): ...


def fipo(ratio: Tensor, logps: Tensor, advantages: Tensor, config: _Config) -> TokenLoss:
    """`clipped_surrogate` times stopgrad(f_t), f_t = clip(exp(F_t)), F_t = sum over k >= t of gamma^(k - t) * log r_k

    gamma = 2^(-1 / `fipo_decay_rate`); tokens with r above `delta` add nothing to F; f is clipped to 1 +-
    `fipo_clip_range`, with `fipo_clip_high_only` from below at 1, and to 0.8..1 where A < 0 and r is above
    `fipo_safety_threshold`. A clip range or threshold of None clips nothing.
    """
    token = clipped_surrogate(ratio, logps, advantages, config)
    log_ratio = ratio.detach().log()
    if config.delta is not None:
        log_ratio = log_ratio.masked_fill(ratio > config.delta, 0.0)
    future = discounted_future(log_ratio, 2 ** (-1 / config.fipo_decay_rate))
    influence = future.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    width = config.fipo_clip_range
    if width:
        influence = influence.clamp(1.0 if config.fipo_clip_high_only else 1 - width, 1 + width)
    safe = ~nowhere(ratio)
    if config.fipo_safety_threshold is not None:
        safe = (advantages >= 0) | (ratio <= config.fipo_safety_threshold)
        influence = influence.where(safe, influence.clamp(0.8, 1.0))
    metrics = {
        "fipo/future_kl": future,
        "fipo/influence_weight": influence,
        "fipo/safety_keep_ratio": safe,
    }
    return TokenLoss(token.loss * influence, token.clipped_low, token.clipped_high, metrics)


def discounted_future(values: Tensor, gamma: float) -> Tensor:
    """Returns the sums over k >= t of gamma^(k - t) * values_k, `[B, T]`; computed by blocks, from the last one."""
    import torch

    size = 128
    blocks = []
    places = torch.arange(size, device=values.device, dtype=values.dtype)
    decay = (gamma ** (places - places[:, None]).clamp(min=0)).triu()
    later = values.new_zeros(len(values), 1)
    for block in reversed(torch.split(values, size, 1)):
        width = block.shape[1]
        own = block @ decay[:width, :width].T + later * (gamma * decay[:width, width - 1])
        later = own[:, :1]
        blocks.append(own)
    return torch.cat(blocks[::-1], 1)


METHODS = (
    Loss(
        name="fipo",
        function=fipo,
        reads=CLIPS,
        ratio_of_tokens=True,
        settings=FipoSettings,
        metrics=(
            ("fipo/future_kl", "discounted sum of later log ratios at a token, mean", "nats", ""),
            ("fipo/influence_weight", "weight of a token by it, mean", "", "near 1"),
            (
                "fipo/safety_keep_ratio",
                "tokens that the safety threshold leaves alone",
                "share",
                "near 1",
            ),
        ),
    ),
)
