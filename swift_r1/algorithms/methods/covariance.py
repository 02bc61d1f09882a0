"""Clip-Cov and KL-Cov (arXiv 2505.22617): a few tokens of high covariance make entropy fall, so these are held back.

How much a token lowers the entropy is seen from its centred cross-product of log-prob and advantage,
over all tokens of an optimizer step. Clip-Cov takes some of the high ones out of the loss; KL-Cov holds the highest
where they were before the round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swift_r1.algorithms.method import Loss, TokenLoss, nowhere, setting
from swift_r1.algorithms.methods.grpo import CLIPS, clipped_surrogate

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from swift_r1.algorithms.config import LossConfig


@dataclass(frozen=True)
class ClipCovSettings:
    """The flags of Clip-Cov."""

    clip_cov_ratio: float = setting(
        0.0002, "clip_cov: share of tokens that leave the loss", more_than=0, at_most=1
    )
    clip_cov_lb: float = setting(
        1.0, "clip_cov: covariance above which a token may be among them", at_least=0
    )
    clip_cov_ub: float = setting(
        5.0, "clip_cov: covariance below which a token may be among them", more_than=0
    )


@dataclass(frozen=True)
class KlCovSettings:
    """The flags of KL-Cov."""

    kl_cov_ratio: float = setting(
        0.0002, "kl_cov: share of tokens, by highest covariance, with a KL", more_than=0, at_most=1
    )
    ppo_kl_coef: float = setting(1.0, "kl_cov: weight of that KL", at_least=0)


if TYPE_CHECKING:

    class _Config(LossConfig, ClipCovSettings, KlCovSettings): ...


def covariances(logps: Tensor, advantages: Tensor, trained: Tensor) -> Tensor:
    """(A - mean A) * (logp - mean logp), with means over the trained tokens; float64, without meaning elsewhere.

    Args:
        logps, advantages: float `[R, T]`, finite.
        trained: bool `[R, T]`.
    """
    count = trained.sum().clamp(min=1)
    centred = [
        values.double() - values.double().masked_fill(~trained, 0.0).sum() / count
        for values in (advantages, logps)
    ]
    return centred[0] * centred[1]


def _share(ratio: float, trained: Tensor) -> int:
    """Returns how many tokens a share of the trained ones is; at least one."""
    return max(int(ratio * int(trained.sum())), 1)


def drawn(
    logps: Tensor, advantages: Tensor, trained: Tensor, config: _Config, generator: Generator
) -> Tensor:
    """Returns `clip_cov_ratio` of the trained tokens, bool `[R, T]`: drawn by chance from those whose covariance is
    between `clip_cov_lb` and `clip_cov_ub`. Arguments as for `covariances`."""
    import torch

    found = covariances(logps, advantages, trained)
    may = trained & (found > config.clip_cov_lb) & (found < config.clip_cov_ub)
    # A number for each token, so that rounding at the bounds changes one token's fate and not that of all.
    lots = torch.rand(found.shape, generator=generator, dtype=torch.float64)
    first = lots.masked_fill(~may, torch.inf).flatten().argsort()
    marked = torch.zeros_like(trained).flatten()
    marked[first[: _share(config.clip_cov_ratio, trained)]] = True
    return marked.view_as(trained) & may


def highest(
    logps: Tensor, advantages: Tensor, trained: Tensor, config: _Config, generator: Generator
) -> Tensor:
    """Returns `kl_cov_ratio` of the trained tokens, bool `[R, T]`: those of the highest covariance."""
    import torch

    found = covariances(logps, advantages, trained).masked_fill(~trained, -torch.inf).flatten()
    marked = torch.zeros_like(trained).flatten()
    marked[found.argsort(descending=True)[: _share(config.kl_cov_ratio, trained)]] = True
    return marked.view_as(trained) & trained


def clip_cov(
    ratio: Tensor, logps: Tensor, advantages: Tensor, config: _Config, marked: Tensor
) -> TokenLoss:
    """`clipped_surrogate`; 0 at the marked tokens."""
    token = clipped_surrogate(ratio, logps, advantages, config)
    return TokenLoss(
        token.loss.masked_fill(marked, 0.0),
        token.clipped_low,
        token.clipped_high,
        {"clip_cov/dropped": marked},
        dropped=marked,
    )


def kl_cov(
    ratio: Tensor, logps: Tensor, advantages: Tensor, config: _Config, marked: Tensor
) -> TokenLoss:
    """-r * A, + `ppo_kl_coef` * |log r| at the marked tokens; nothing is clipped."""
    penalty = config.ppo_kl_coef * ratio.log().abs() * marked
    return TokenLoss(
        penalty - ratio * advantages,
        nowhere(ratio),
        nowhere(ratio),
        {"kl_cov/penalized": marked, "kl_cov/penalty": penalty},
    )


METHODS = (
    Loss(
        name="clip_cov",
        function=clip_cov,
        reads=CLIPS,
        ratio_of_tokens=True,
        settings=ClipCovSettings,
        marks=drawn,
        metrics=(
            (
                "clip_cov/dropped",
                "tokens of high covariance that were taken out of the loss",
                "share",
                "`--clip_cov_ratio`; less: few tokens are between the bounds",
            ),
        ),
    ),
    Loss(
        name="kl_cov",
        function=kl_cov,
        ratio_of_tokens=True,
        settings=KlCovSettings,
        marks=highest,
        everywhere=True,
        from_second=True,
        metrics=(
            ("kl_cov/penalized", "tokens of highest covariance", "share", "`--kl_cov_ratio`"),
            ("kl_cov/penalty", "what their KL adds to the loss of a token, mean", "nats", ""),
        ),
    ),
)
