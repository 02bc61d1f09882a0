"""The settings of the policy's loss."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Literal, get_args

from swift_r1.algorithms.method import Distillation, Loss, with_settings
from swift_r1.algorithms.methods import DISTILLATIONS, LOSSES

ImportanceSamplingLevel = Literal["token", "sequence", "sequence_token"]
RolloutCorrection = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
DISTILLATION_LOSSES = [one for one in DISTILLATIONS.values() if one.token_loss is not None]
_LIMITS = {
    "at_least": (operator.ge, "at least"),
    "more_than": (operator.gt, "above"),
    "at_most": (operator.le, "at most"),
    "less_than": (operator.lt, "below"),
}


def check_known(name: str, value: object, known: Collection[str | None]) -> None:
    """Raises ValueError for a value that is none of those that are known."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(filter(None, known))}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
@with_settings([*LOSSES.values(), *DISTILLATION_LOSSES])
class LossConfig:
    """The flags of `swift rlhf` that decide a loss, under the same names; also those of one loss alone (`tau_pos`,
    `fipo_clip_range`), which its file in `methods/` declares. Every field may be given for every loss; a loss reads
    what its formula names. Raises ValueError: a value outside its range."""

    loss_type: str = "grpo"  # which loss, of `LOSSES`
    epsilon: float = 0.2  # the ratio is clipped from below at `1 - epsilon`
    # the ratio is clipped from above at `1 + epsilon_high`; None means `epsilon`. For `cispo` it is the cap on the
    # ratio itself; None means 5.0
    epsilon_high: float | None = None
    # a cap on the unclipped ratio, against huge ratios under negative advantages; None: no cap
    delta: float | None = None
    beta: float = 0.0  # weight of the KL to the reference policy
    teacher_kl_coef: float = 1.0  # weight of the KL to a teacher, where there is one in the loss
    entropy_coef: float = 0.0  # weight of the entropy that is subtracted from the loss
    kl_in_reward: bool = False  # the KL was subtracted from the rewards, so the loss leaves it out
    # one ratio per `token`, or one per completion (`sequence`, GSPO), whose gradient may be the token's own
    # (`sequence_token`, GSPO-token)
    importance_sampling_level: ImportanceSamplingLevel = "token"
    max_completion_length: int = 512  # `L` of `dr_grpo`, in tokens
    num_generations: int = 8  # completions in a group, which `real` compares
    # the share of trained tokens, those of highest entropy, that keep their policy loss; 1.0 keeps all
    top_entropy_quantile: float = 1.0
    # how the gap between engine and trainer is corrected; None: not at all
    rollout_importance_sampling_mode: RolloutCorrection | None = None
    # the largest weight that this correction gives
    rollout_importance_sampling_threshold: float = 2.0
    # completions with a negative advantage leave the loss where the policy has lowered their mean log-prob by more
    # than this since they were sampled; None: none
    off_policy_sequence_mask_delta: float | None = None
    # more about the gap between engine and trainer (`off_policy_metrics`)
    log_rollout_offpolicy_metrics: bool = False
    # completions were sampled with top-p or top-k, so that the engine's log-probs are those of a part of the
    # distribution
    cuts_sampling: bool = False

    def __post_init__(self) -> None:
        mode = self.rollout_importance_sampling_mode
        check_known("loss_type", self.loss_type, LOSSES)
        check_known(
            "importance_sampling_level",
            self.importance_sampling_level,
            get_args(ImportanceSamplingLevel),
        )
        check_known("rollout_importance_sampling_mode", mode, (None, *get_args(RolloutCorrection)))
        if not 0 <= self.epsilon <= 1:
            raise ValueError(f"epsilon must be from 0 to 1, got {self.epsilon}")
        if not 0 < self.top_entropy_quantile <= 1:
            raise ValueError(
                f"top_entropy_quantile must be above 0 and at most 1, got {self.top_entropy_quantile}"
            )
        limits = {item.name: item.metadata["limits"] for item in fields(self) if item.metadata}
        for name in (
            "epsilon_high",
            "beta",
            "entropy_coef",
            "teacher_kl_coef",
            "off_policy_sequence_mask_delta",
        ):
            limits[name] = {"at_least": 0}
        for name in (
            "delta",
            "max_completion_length",
            "rollout_importance_sampling_threshold",
            "num_generations",
        ):
            limits[name] = {"more_than": 0}
        for name, own in limits.items():
            number = getattr(self, name)
            for kind, limit in own.items():
                holds, word = _LIMITS.get(kind, (None, ""))
                if holds is not None and number is not None and not holds(number, limit):
                    raise ValueError(f"{name} must be {word} {limit}, got {number}")

    @property
    def clip_high(self) -> float:
        """`epsilon_high` as the loss uses it, its default filled in."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        return self.epsilon if self.loss.cap is None else self.loss.cap

    @property
    def loss(self) -> Loss:
        """The declaration of `loss_type`."""
        return LOSSES[self.loss_type]

    @property
    def level(self) -> ImportanceSamplingLevel:
        """`importance_sampling_level`, or that which the loss has by definition."""
        return self.importance_sampling_level if self.loss.limit is None else "sequence"

    @property
    def distillations(self) -> list[Distillation]:
        """Ways to learn from a teacher that add a loss of tokens, and so need the teacher's log-probs."""
        return [one for one in DISTILLATION_LOSSES if one.chosen(self)]

    @property
    def by_completion(self) -> bool:
        """Whether a number of a completion as a whole decides about its tokens."""
        by_sequence = (self.rollout_importance_sampling_mode or "").startswith("sequence")
        return (
            self.level != "token" or by_sequence or self.off_policy_sequence_mask_delta is not None
        )

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss adds `beta` times k3, and so needs the reference policy's log-probs."""
        return self.beta > 0 and not self.kl_in_reward
