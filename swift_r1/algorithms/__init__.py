"""Advantages, losses, KL and GAE: pure functions on tensors, without I/O and without globals.

All raise ValueError on shapes that do not fit together, a value out of its range, or an argument that is missing.
Read `advantages.py` and `losses.py` beside the papers; `policy_loss.py` puts the loss together.
"""

from swift_r1.algorithms.advantages import Advantages, group_advantages, groups_without_signal, turn_advantages
from swift_r1.algorithms.aggregation import drop_truncated, loss_normalizer, mean_metrics, sum_metrics
from swift_r1.algorithms.chord import chord_mu, expert_loss
from swift_r1.algorithms.distillation import reverse_kl, teacher_advantages
from swift_r1.algorithms.losses import LossConfig, rewards_less_kl
from swift_r1.algorithms.policy_loss import LossOutput, policy_loss, top_entropy_threshold
from swift_r1.algorithms.ppo import PPOConfig, gae, ppo_targets, token_rewards, value_loss, whiten
from swift_r1.algorithms.real import real_advantages, reward_labels
from swift_r1.algorithms.rewards import from_flags
from swift_r1.algorithms.self_distillation import rlsd_advantages, rlsd_strength, sdar

__all__ = [
    "Advantages",
    "LossConfig",
    "LossOutput",
    "PPOConfig",
    "chord_mu",
    "drop_truncated",
    "expert_loss",
    "from_flags",
    "gae",
    "group_advantages",
    "groups_without_signal",
    "loss_normalizer",
    "mean_metrics",
    "policy_loss",
    "ppo_targets",
    "real_advantages",
    "reverse_kl",
    "reward_labels",
    "rewards_less_kl",
    "rlsd_advantages",
    "rlsd_strength",
    "sdar",
    "sum_metrics",
    "teacher_advantages",
    "token_rewards",
    "top_entropy_threshold",
    "turn_advantages",
    "value_loss",
    "whiten",
]
