"""Advantages, losses, KL and GAE: pure functions on tensors, without I/O and without globals.

All raise ValueError on shapes that do not fit together, a value out of its range, or an argument that is missing.
Read `advantages.py` and `losses.py` beside the papers; `policy_loss.py` puts the loss together.
"""

from swift_r1.algorithms.advantages import Advantages, group_advantages, groups_without_signal
from swift_r1.algorithms.aggregation import drop_truncated, loss_normalizer, mean_metrics, sum_metrics
from swift_r1.algorithms.distillation import reverse_kl, teacher_advantages
from swift_r1.algorithms.losses import LossConfig, rewards_less_kl
from swift_r1.algorithms.policy_loss import LossOutput, policy_loss, top_entropy_threshold
from swift_r1.algorithms.ppo import PPOConfig, gae, ppo_targets, token_rewards, value_loss, whiten
from swift_r1.algorithms.rewards import from_flags

__all__ = [
    "Advantages",
    "LossConfig",
    "LossOutput",
    "PPOConfig",
    "drop_truncated",
    "from_flags",
    "gae",
    "group_advantages",
    "groups_without_signal",
    "loss_normalizer",
    "mean_metrics",
    "policy_loss",
    "ppo_targets",
    "reverse_kl",
    "rewards_less_kl",
    "sum_metrics",
    "teacher_advantages",
    "token_rewards",
    "top_entropy_threshold",
    "value_loss",
    "whiten",
]
