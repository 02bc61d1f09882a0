"""GRPO and its kin: one advantage a completion, from the rewards of its group."""

from __future__ import annotations

from collections.abc import Sequence

from swift_r1.algorithms import LossConfig, group_advantages
from swift_r1.models.policy import MicroBatch
from swift_r1.training.algorithm import Targets, Trained
from swift_r1.training.batch.batching import RoundBatch
from swift_r1.training.context import Parts
from swift_r1.training.step import TrainingBatch, before_training, needs_old_policy, rewards_after_kl, train_step


class Grpo:
    """`--rlhf_type grpo`."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.args = parts, parts.args
        self.config = LossConfig.from_flags(parts.args)
        self.trained = (Trained("loss", "grad_norm", "loss_scale", parts.backend),)

    def prepared(self, steps: Sequence[Sequence[MicroBatch]]) -> list[list[TrainingBatch]]:
        return before_training(
            steps,
            self.parts.backend,
            self.parts.reference,
            self.args.temperature,
            old_policy=needs_old_policy(self.config, self.parts.plan.optimizer_steps_per_round),
            overlong_filter=self.args.overlong_filter,
        )

    def targets(self, batch: RoundBatch, steps: Sequence[Sequence[TrainingBatch]]) -> tuple[Targets, dict[str, float]]:
        rewards, metrics = batch.rewards, {}
        if self.args.kl_in_reward:
            rewards = rewards_after_kl(rewards, steps, self.args.beta, self.parts.ranks)
            metrics["kl_penalty"] = (batch.rewards - rewards).nanmean().item()
        advantages = group_advantages(
            rewards,
            self.parts.plan.num_generations,
            estimator=self.args.advantage_estimator,
            scale_rewards=self.args.scale_rewards,
        )
        return Targets(advantages, advantages), metrics

    def step(self, micro_batches: Sequence[TrainingBatch], targets: Targets, number: int) -> dict[str, float]:
        parts = self.parts
        rate = parts.learning_rate.value
        parts.learning_rate.advance()
        return train_step(
            micro_batches, targets.advantages, parts.backend, self.config, self.args.temperature, rate, parts.ranks
        )
