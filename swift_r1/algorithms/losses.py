"""The formulas: what a loss is made of, per token. `policy_loss.py` puts them together.

The token losses take an importance ratio `r` `[B, T]` (the same number along a row at sequence level), log-probs
`[B, T]` and an advantage `A` `[B, T]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from swift_r1.algorithms.advantages import check_known

LossType = Literal["grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo", "fipo", "real"]
ImportanceSamplingLevel = Literal["token", "sequence", "sequence_token"]
RolloutCorrection = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

CISPO_EPSILON_HIGH = 5.0  # the cap on the importance ratio that `cispo` uses when `epsilon_high` is not given
LOG_RATIO_BOUND = 60.0
"""Log-ratios are kept within this before `exp`: float32 overflows at 88, and inf * 0 in a backward pass is NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """The flags of `swift rlhf` that decide a loss, under the same names. Every field may be given for every loss; a
    loss reads what its formula names. Raises ValueError: a value outside its range."""

    loss_type: LossType = "grpo"  # which loss, see `TOKEN_LOSSES`
    epsilon: float = 0.2  # the ratio is clipped from below at `1 - epsilon`
    # the ratio is clipped from above at `1 + epsilon_high`; None means `epsilon`. For `cispo` it is the cap on the
    # ratio itself; None means 5.0
    epsilon_high: float | None = None
    # a cap on the unclipped ratio, against huge ratios under negative advantages; None: no cap
    delta: float | None = None
    beta: float = 0.0  # weight of the KL to the reference policy
    teacher_kl_coef: float = 1.0  # weight of the KL to a teacher, where there is one in the loss
    kl_in_reward: bool = False  # the KL was subtracted from the rewards, so the loss leaves it out
    # one ratio per `token`, or one per completion (`sequence`, GSPO), whose gradient may be the token's own
    # (`sequence_token`, GSPO-token)
    importance_sampling_level: ImportanceSamplingLevel = "token"
    max_completion_length: int = 512  # `L` of `dr_grpo`, in tokens
    # tau_pos, tau_neg: temperatures of `sapo` for advantages above zero and for all others
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    # of `fipo`: tokens until a token's effect on earlier ones is half; how far their weight may be from 1 (None or 0:
    # any), and whether never below it; the ratio above which a token of negative advantage weighs 0.8 to 1 (None: none)
    fipo_decay_rate: float = 32.0
    fipo_clip_range: float | None = 0.2
    fipo_clip_high_only: bool = True
    fipo_safety_threshold: float | None = 4.0
    real_tau: float = 0.5  # temperature of `real`
    num_generations: int = 8  # completions in a group, which `real` compares
    # weight of `sdar` and how sharp its gate is; 0: none, and no teacher's log-probs are needed
    sdar_loss_coef: float = 0.0
    sdar_gate_beta: float = 5.0
    # the share of trained tokens, those of highest entropy, that keep their policy loss; 1.0 keeps all
    top_entropy_quantile: float = 1.0
    # how the gap between engine and trainer is corrected; None: not at all
    rollout_importance_sampling_mode: RolloutCorrection | None = None
    rollout_importance_sampling_threshold: float = 2.0  # the largest weight that this correction gives
    # completions with a negative advantage leave the loss where the policy has lowered their mean log-prob by more
    # than this since they were sampled; None: none
    off_policy_sequence_mask_delta: float | None = None
    log_rollout_offpolicy_metrics: bool = False  # more about the gap between engine and trainer (`off_policy_metrics`)
    # completions were sampled with top-p or top-k, so that the engine's log-probs are those of a part of the
    # distribution
    cuts_sampling: bool = False

    def __post_init__(self) -> None:
        mode = self.rollout_importance_sampling_mode
        check_known("loss_type", self.loss_type, get_args(LossType))
        check_known("importance_sampling_level", self.importance_sampling_level, get_args(ImportanceSamplingLevel))
        check_known("rollout_importance_sampling_mode", mode, (None, *get_args(RolloutCorrection)))
        if not 0 <= self.epsilon <= 1:
            raise ValueError(f"epsilon must be from 0 to 1, got {self.epsilon}")
        if not 0 < self.top_entropy_quantile <= 1:
            raise ValueError(f"top_entropy_quantile must be above 0 and at most 1, got {self.top_entropy_quantile}")
        at_least_0 = ("epsilon_high", "beta", "teacher_kl_coef", "off_policy_sequence_mask_delta")
        for name in (*at_least_0, "fipo_clip_range", "sdar_loss_coef"):
            number = getattr(self, name)
            if number is not None and not number >= 0:
                raise ValueError(f"{name} must be at least 0, got {number}")
        above_0 = ["delta", "max_completion_length", "tau_pos", "tau_neg", "rollout_importance_sampling_threshold"]
        above_0 += ["fipo_decay_rate", "fipo_safety_threshold", "real_tau", "num_generations", "sdar_gate_beta"]
        for name in above_0:
            number = getattr(self, name)
            if number is not None and not number > 0:
                raise ValueError(f"{name} must be above 0, got {number}")

    @property
    def clip_high(self) -> float:
        """`epsilon_high` as the loss uses it, its default filled in."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        return CISPO_EPSILON_HIGH if self.loss_type == "cispo" else self.epsilon

    @property
    def by_completion(self) -> bool:
        """Whether a number of a completion as a whole decides about its tokens."""
        by_sequence = (self.rollout_importance_sampling_mode or "").startswith("sequence")
        return (
            self.importance_sampling_level != "token" or by_sequence or self.off_policy_sequence_mask_delta is not None
        )

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss adds `beta` times k3, and so needs the reference policy's log-probs."""
        return self.beta > 0 and not self.kl_in_reward


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """`loss` `[B, T]`; bool `[B, T]` where the ratio was clipped from below and from above; what else to log, by name,
    `[B, T]`."""

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


def clipped_surrogate(ratio: Tensor, logps: Tensor, advantages: Tensor, config: LossConfig) -> TokenLoss:
    """-min(min(r, delta) * A, clip(r, 1 - epsilon, 1 + epsilon_high) * A)

    PPO (arXiv 1707.06347, eq. 7) and GRPO (2402.03300, eq. 3); a higher upper bound: DAPO (2503.14476);
    the cap `delta`: INTELLECT-2 (2505.07291).
    """
    low = 1 - config.epsilon
    high = 1 + config.clip_high
    clipped = ratio.clamp(low, high)
    unclipped = ratio if config.delta is None else ratio.clamp(max=config.delta)
    loss = -torch.minimum(unclipped * advantages, clipped * advantages)
    return TokenLoss(loss, (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0))


def cispo(ratio: Tensor, logps: Tensor, advantages: Tensor, config: LossConfig) -> TokenLoss:
    """-stopgrad(min(r, epsilon_high)) * A * logp, where `epsilon_high` is the cap itself.

    MiniMax-M1 (arXiv 2506.13585, eq. 4): no token loses its gradient, its weight is capped instead.
    """
    weight = ratio.detach().clamp(max=config.clip_high)
    capped = (ratio > config.clip_high) & (advantages != 0)
    return TokenLoss(-weight * advantages * logps, torch.zeros_like(capped), capped)


def sapo(ratio: Tensor, logps: Tensor, advantages: Tensor, config: LossConfig) -> TokenLoss:
    """-(4 / tau) * sigmoid(tau * (r - 1)) * A, tau = `tau_pos` where A > 0, else `tau_neg`.

    SAPO (arXiv 2511.20347): a soft gate in the place of the clip, slope 1 at r = 1. Nothing is clipped.
    """
    tau = torch.full_like(ratio, config.tau_neg).masked_fill(advantages > 0, config.tau_pos)
    gate = torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    return TokenLoss(-gate * advantages, nothing, nothing)


def fipo(ratio: Tensor, logps: Tensor, advantages: Tensor, config: LossConfig) -> TokenLoss:
    """`clipped_surrogate` times stopgrad(f_t), f_t = clip(exp(F_t)), F_t = sum over k >= t of gamma^(k - t) * log r_k

    FIPO (arXiv 2603.19835): a token counts as the policy has moved on what followed it. gamma = 2^(-1 /
    `fipo_decay_rate`); tokens with r above `delta` add nothing to F; f is clipped to 1 +- `fipo_clip_range`, with
    `fipo_clip_high_only` from below at 1, and to 0.8..1 where A < 0 and r is above `fipo_safety_threshold`.
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
    safe = torch.ones_like(token.clipped_low)
    if config.fipo_safety_threshold is not None:
        safe = (advantages >= 0) | (ratio <= config.fipo_safety_threshold)
        influence = torch.where(safe, influence, influence.clamp(0.8, 1.0))
    metrics = {"fipo/future_kl": future, "fipo/influence_weight": influence, "fipo/safety_keep_ratio": safe}
    return TokenLoss(token.loss * influence, token.clipped_low, token.clipped_high, metrics)


def discounted_future(values: Tensor, gamma: float) -> Tensor:
    """`[B, T]`: the sum over k >= t of gamma^(k - t) * values_k; by blocks, from the last one."""
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


def real(ratio: Tensor, logps: Tensor, advantages: Tensor, config: LossConfig) -> TokenLoss:
    """-log(r) * A with the A of `real_advantages`, whose mean over completions has the gradient of REAL's loss."""
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    return TokenLoss(-ratio.log() * advantages, nothing, nothing)


TOKEN_LOSSES: Mapping[str, Callable[[Tensor, Tensor, Tensor, LossConfig], TokenLoss]] = {
    **dict.fromkeys(("grpo", "bnpo", "dapo", "dr_grpo"), clipped_surrogate),
    "cispo": cispo,
    "sapo": sapo,
    "fipo": fipo,
    "real": real,
}
"""`--loss_type` to its formula; the denominators are in `aggregation.py`."""


def k1(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """`logp - ref`: unbiased, noisy, may be negative. Same shape as the inputs.

    k1 and k3: J. Schulman, "Approximating KL Divergence", 2020.
    """
    return logps - ref_logps


def k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """`exp(ref - logp) - (ref - logp) - 1`: never negative. Same shape as the inputs."""
    log_ratio = (ref_logps - logps).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return log_ratio.exp() - log_ratio - 1


def rewards_less_kl(rewards: Tensor, logps: Tensor, ref_logps: Tensor, mask: Tensor, beta: float) -> Tensor:
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
        raise ValueError(f"rewards, logps, ref_logps, mask must be [B], [B, T], [B, T], [B, T], got {shapes}")
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    tokens = k1(logps.detach().to(dtype), ref_logps.detach().to(dtype)).masked_fill(mask == 0, 0.0)
    return rewards.detach().to(dtype) - beta * tokens.sum(1)
