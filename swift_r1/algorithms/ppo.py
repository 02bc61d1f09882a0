"""What PPO with a value model learns from a round: rewards of tokens, advantages and returns.

Sources: PPO (arXiv 1707.06347), GAE (1506.02438), the KL in the reward and the whitening as in "Fine-Tuning Language
Models from Human Preferences" (1909.08593) and its reproduction (2403.17031).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from swift_r1.algorithms.advantages import STD_EPSILON
from swift_r1.algorithms.gae import gae
from swift_r1.algorithms.kl import k1


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig:
    """Fields are the flags of the same names.

    Attributes:
        kl_coef: weight of the KL to the reference policy in the reward of each token.
        gamma, lam: of `gae`.
        cliprange_value: a value may move so far from what it was before the round; 0: no clipping.
        vf_coef: weight of the value loss: the critic's gradient is multiplied by it before it is clipped.
        whiten_rewards: divide the tokens' rewards by their standard deviation.
        whiten_advantages: subtract the advantages' mean and divide by their standard deviation.
    """

    kl_coef: float = 0.0
    gamma: float = 1.0
    lam: float = 0.95
    cliprange_value: float = 0.2
    vf_coef: float = 0.1
    whiten_rewards: bool = False
    whiten_advantages: bool = True

    @classmethod
    def from_flags(cls, flags: object) -> PPOConfig:
        """Takes the fields from the attributes of the same names."""
        return cls(**{item.name: getattr(flags, item.name) for item in fields(cls)})


class PPOTargets(NamedTuple):
    """What a round's tokens are trained towards; all without gradient.

    Attributes:
        advantages: float32 `[N, T]`, 0 where masked out and in completions without a valid reward.
        returns: float32 `[N, T]`, likewise.
        valid: bool `[N]`, completions with a valid reward.
        metrics: `returns/mean`, `returns/std`, `values/mean`, `explained_variance` = 1 - Var(R - V) / Var(R) (left out
            where all returns are equal) over the tokens of valid completions; with a KL `kl_penalty`, the mean of what
            it took from a completion's reward.
    """

    advantages: Tensor
    returns: Tensor
    valid: Tensor
    metrics: dict[str, float]


def token_rewards(
    rewards: Tensor,
    mask: Tensor,
    kl_coef: float = 0.0,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
) -> Tensor:
    """r_t = -kl_coef * (old_t - ref_t), and the completion's reward in addition at its last trained token.

    Args:
        rewards: float `[N]`, finite.
        mask: `[N, T]`, not 0 on trained tokens; a completion without any gets no reward anywhere.
        kl_coef: weight of k1; above 0 it needs the log-probs.
        old_logps, ref_logps: `[N, T]`, of the policy that sampled and of the reference policy.

    Returns:
        `[N, T]`, float64, without gradient, 0 where masked out.

    Raises:
        ValueError: log-probs that are missing.
    """
    trained = mask != 0
    if kl_coef:
        if old_logps is None or ref_logps is None:
            raise ValueError("kl_coef above 0 needs old_logps and ref_logps")
        tokens = -kl_coef * k1(old_logps.detach().double(), ref_logps.detach().double()).masked_fill(~trained, 0.0)
    else:
        tokens = torch.zeros(mask.shape, dtype=torch.float64)
    later = trained.long().flip(1).cumsum(1).flip(1)
    return tokens + (trained & (later == 1)) * rewards.detach().double()[:, None]


def whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """(x - mean) / (std + 1e-4) over the entries where `mask` is not 0, and 0 elsewhere; the sample standard deviation.

    Without `shift_mean` the mean stays: x / (std + 1e-4). Fewer than two entries, or equal ones, have a standard
    deviation of 0: they are not scaled, and with `shift_mean` become 0.
    """
    chosen = values[mask != 0].double()
    if chosen.numel() < 2 or chosen.min() == chosen.max():
        return values.masked_fill(mask == 0, 0.0) * (not shift_mean)
    shift = chosen.mean() if shift_mean else 0.0
    return ((values.double() - shift) / (chosen.std() + STD_EPSILON)).masked_fill(mask == 0, 0.0).to(values.dtype)


def ppo_targets(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    config: PPOConfig,
    *,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
) -> PPOTargets:
    """Rewards of tokens, whitened if asked; GAE; advantages whitened if asked. Over the whole round, all ranks.

    Args:
        rewards: float `[N]`; one that is not finite is invalid: its completion teaches nothing.
        values: `[N, T]`, the critic's before the round's first step, of the state before each token.
        mask: `[N, T]`, not 0 on tokens that the policy wrote.
        config: what to compute.
        old_logps, ref_logps: `[N, T]`, where `config.kl_coef` is above 0.

    Raises:
        ValueError: shapes that do not fit together, or log-probs that are missing.
    """
    if rewards.shape != mask.shape[:1]:
        raise ValueError(f"rewards {tuple(rewards.shape)} must be [{mask.shape[0]}]")
    valid = rewards.isfinite()
    counted = (mask != 0) & valid[:, None]
    outcome = rewards.masked_fill(~valid, 0.0)
    tokens = token_rewards(outcome, mask, config.kl_coef, old_logps, ref_logps)
    metrics = {}
    if config.kl_coef:
        taken = outcome.double() * (counted.any(1)) - (tokens * counted).sum(1)
        metrics["kl_penalty"] = taken[valid].mean().item()
    if config.whiten_rewards:
        tokens = whiten(tokens, counted, shift_mean=False)
    advantages, returns = gae(tokens, values.double(), counted, config.gamma, config.lam)
    if counted.any():
        r, v = returns[counted], values.detach().double()[counted]
        metrics |= {
            "returns/mean": r.mean().item(),
            "returns/std": r.std(unbiased=False).item(),
            "values/mean": v.mean().item(),
        }
        if r.min() < r.max():
            metrics["explained_variance"] = 1 - ((r - v).var(unbiased=False) / r.var(unbiased=False)).item()
    if config.whiten_advantages:
        advantages = whiten(advantages, counted)
    return PPOTargets(advantages.float(), returns.float(), valid, metrics)
