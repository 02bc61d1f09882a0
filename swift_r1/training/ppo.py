"""PPO's part of a round: one advantage per token, from a critic that learns beside the policy; the critic's updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from swift_r1.algorithms.advantages import Advantages
from swift_r1.algorithms.losses import LossOutput
from swift_r1.algorithms.ppo import PPOConfig, ppo_targets, value_loss
from swift_r1.models.policy import MicroBatch
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.base import Backend
from swift_r1.training.batching import RoundBatch
from swift_r1.training.grpo import of_micro_batch, of_round, update
from swift_r1.training.optimizer import LearningRate


@dataclass(frozen=True)
class TrainedCritic:
    """The critic with its optimizer, its learning rate schedule, and the settings of PPO."""

    backend: Backend
    learning_rate: LearningRate
    config: PPOConfig


def token_advantages(
    batch: RoundBatch, steps: Sequence[Sequence[MicroBatch]], config: PPOConfig, ranks: Ranks
) -> tuple[Advantages, dict[str, float]]:
    """Returns advantages from the rewards of the whole round and the critic's values, on every rank; and what to log.
    Collective."""
    names = ("old_logps", "ref_logps") if config.kl_coef else ()
    kl = {name: of_round(name, batch, steps, ranks) for name in names}
    values = of_round("old_values", batch, steps, ranks)
    return ppo_targets(batch.rewards, values, batch.token_mask(), config, **kl)


def critic_step(
    batches: Sequence[MicroBatch], advantages: Advantages, critic: TrainedCritic, ranks: Ranks
) -> dict[str, float]:
    """The critic's loss and update. Collective.

    Returns:
        As `update`, under the names `value_loss`, `critic/grad_norm` (of `vf_coef` times the loss),
        `critic/learning_rate`, `critic/loss_scale` and `clip_ratio/value`.
    """
    returns = advantages.returns
    valid = advantages.valid
    assert returns is not None and valid is not None

    def trained(micro: MicroBatch) -> Tensor:
        return micro.trained & of_micro_batch(valid, micro)[:, None]

    normalizer = ranks.sum_data(
        torch.stack([trained(micro).sum().double().cpu() for micro in batches]).sum()
    )

    def loss_of(micro: MicroBatch) -> LossOutput:
        assert micro.old_values is not None
        values = micro.unflatten(critic.backend.values(micro.inputs))
        old = micro.old_values
        mask = trained(micro)
        clip = critic.config.cliprange_value or None
        return value_loss(
            values, old, of_micro_batch(returns, micro), mask, clip, normalizer=normalizer
        )

    rate = critic.learning_rate.value
    coefficient = critic.config.vf_coef
    losses = [partial(loss_of, micro) for micro in batches]
    found = update(losses, critic.backend, rate, ranks, coefficient=coefficient)
    names = {"loss": "value_loss"} | {
        name: f"critic/{name}" for name in ("grad_norm", "learning_rate", "loss_scale")
    }
    return {names.get(name, name): value for name, value in found.items()}
