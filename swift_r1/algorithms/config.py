"""What decides a loss: the flags of `swift rlhf` that `policy_loss` reads, under the same names."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

LossType = Literal["grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo"]
ImportanceSamplingLevel = Literal["token", "sequence"]
RolloutCorrection = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

CISPO_EPSILON_HIGH = 5.0
"""The cap on the importance ratio that `cispo` uses when `epsilon_high` is not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Every field may be given for every loss; a loss reads what its formula names.

    Attributes:
        loss_type: which loss, see `swift_r1.algorithms.losses`.
        epsilon: the ratio is clipped from below at `1 - epsilon`.
        epsilon_high: the ratio is clipped from above at `1 + epsilon_high`; None means `epsilon`.
            For `cispo` it is the cap on the ratio itself; None means 5.0.
        delta: a cap on the unclipped ratio, against huge ratios under negative advantages; None: no cap.
        beta: weight of the KL to the reference policy.
        kl_in_reward: the KL was subtracted from the rewards, so the loss leaves it out.
        importance_sampling_level: one ratio a `token`, or one a completion (`sequence`, GSPO).
        max_completion_length: `L` of `dr_grpo`, in tokens.
        tau_pos, tau_neg: temperatures of `sapo` for advantages above zero and for all others.
        top_entropy_quantile: the share of trained tokens, those of highest entropy, that keep their policy
            loss; 1.0 keeps all.
        rollout_importance_sampling_mode: how the gap between engine and trainer is corrected; None: not at all.
        rollout_importance_sampling_threshold: the largest weight that this correction gives.
        ratio_to_behaviour: the importance ratio is to `rollout_logps`, for completions by older weights; else to the
            log-probs of the policy before the round's first step.
        cuts_sampling: completions were sampled with top-p or top-k, so that the engine's log-probs are those of a part
            of the distribution.

    Raises:
        ValueError: a value outside its range.
    """

    loss_type: LossType = "grpo"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    kl_in_reward: bool = False
    importance_sampling_level: ImportanceSamplingLevel = "token"
    max_completion_length: int = 512
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    top_entropy_quantile: float = 1.0
    rollout_importance_sampling_mode: RolloutCorrection | None = None
    rollout_importance_sampling_threshold: float = 2.0
    ratio_to_behaviour: bool = False
    cuts_sampling: bool = False

    def __post_init__(self) -> None:
        _one_of("loss_type", self.loss_type, get_args(LossType))
        _one_of("importance_sampling_level", self.importance_sampling_level, get_args(ImportanceSamplingLevel))
        if self.rollout_importance_sampling_mode is not None:
            modes = get_args(RolloutCorrection)
            _one_of("rollout_importance_sampling_mode", self.rollout_importance_sampling_mode, modes)
        _check("epsilon", self.epsilon, 0 <= self.epsilon <= 1, "from 0 to 1")
        if self.epsilon_high is not None:
            _check("epsilon_high", self.epsilon_high, self.epsilon_high >= 0, "at least 0")
        if self.delta is not None:
            _check("delta", self.delta, self.delta > 0, "above 0")
        _check("beta", self.beta, self.beta >= 0, "at least 0")
        _check("max_completion_length", self.max_completion_length, self.max_completion_length > 0, "above 0")
        _check("tau_pos", self.tau_pos, self.tau_pos > 0, "above 0")
        _check("tau_neg", self.tau_neg, self.tau_neg > 0, "above 0")
        quantile, threshold = self.top_entropy_quantile, self.rollout_importance_sampling_threshold
        _check("top_entropy_quantile", quantile, 0 < quantile <= 1, "above 0 and at most 1")
        _check("rollout_importance_sampling_threshold", threshold, threshold > 0, "above 0")

    @classmethod
    def from_flags(cls, flags: object) -> LossConfig:
        """Takes the fields from the attributes of the same names; what `flags` lacks keeps its default."""
        return cls(**{f.name: getattr(flags, f.name) for f in fields(cls) if hasattr(flags, f.name)})

    @property
    def clip_high(self) -> float:
        """`epsilon_high` as the loss uses it, its default filled in."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        return CISPO_EPSILON_HIGH if self.loss_type == "cispo" else self.epsilon

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss adds `beta` times k3, and so needs the reference policy's log-probs."""
        return self.beta > 0 and not self.kl_in_reward


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def _check(name: str, value: float, fits: bool, what: str) -> None:
    if not fits:
        raise ValueError(f"{name} must be {what}, got {value}")
