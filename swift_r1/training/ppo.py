"""PPO: one advantage a token, from a critic that learns beside the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from swift_r1.algorithms import LossConfig, PPOConfig, mean_metrics, ppo_targets, sum_metrics, value_loss
from swift_r1.models.policy import MicroBatch
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.algorithm import Targets, Trained
from swift_r1.training.backends.base import CriticBackend
from swift_r1.training.batch.batching import RoundBatch
from swift_r1.training.context import Parts
from swift_r1.training.step import (
    TrainingBatch,
    before_training,
    needs_old_policy,
    of_micro_batch,
    spoilt_if_not_finite,
    train_step,
)


class Ppo:
    """`--rlhf_type ppo`."""

    def __init__(self, parts: Parts) -> None:
        assert parts.critic is not None
        self.parts, self.args, self.critic = parts, parts.args, parts.critic
        self.config = PPOConfig.from_flags(parts.args)
        # The mean over the step's tokens, for the policy as for the critic. The KL is in the rewards.
        self.loss = replace(LossConfig.from_flags(parts.args), loss_type="bnpo")
        self.trained = (
            Trained("loss", "grad_norm", "loss_scale", parts.backend),
            Trained("value_loss", "critic/grad_norm", "critic/loss_scale", parts.critic.backend),
        )

    def prepared(self, steps: Sequence[Sequence[MicroBatch]]) -> list[list[TrainingBatch]]:
        updates = self.parts.plan.optimizer_steps_per_round
        return before_training(
            steps,
            self.parts.backend,
            self.parts.reference,
            self.args.temperature,
            old_policy=self.config.kl_coef > 0 or needs_old_policy(self.loss, updates),
            overlong_filter=self.args.overlong_filter,
            critic=self.critic.backend,
        )

    def targets(self, batch: RoundBatch, steps: Sequence[Sequence[TrainingBatch]]) -> tuple[Targets, dict[str, float]]:
        mask = batch.token_mask()

        def of_round(name: str) -> Tensor:
            return whole_round([getattr(item, name) for step in steps for item in step], steps, mask, self.parts.ranks)

        kl = {name: of_round(name) for name in ("old_logps", "ref_logps")} if self.config.kl_coef else {}
        found = ppo_targets(batch.rewards, of_round("old_values"), mask, self.config, **kl)
        means = (found.advantages * mask).sum(1) / mask.sum(1).clamp(min=1)
        return Targets(found.advantages, means, found.returns, found.valid), found.metrics

    def step(self, micro_batches: Sequence[TrainingBatch], targets: Targets, number: int) -> dict[str, float]:
        """The policy's update, but while only the critic warms up, and then the critic's: one after the other, so that
        the activations of one are in memory at a time."""
        parts, critic = self.parts, self.critic
        rate, critic_rate = parts.learning_rate.value, critic.learning_rate.value
        parts.learning_rate.advance()
        critic.learning_rate.advance()
        metrics = train_step(
            micro_batches,
            targets.advantages,
            parts.backend,
            self.loss,
            self.args.temperature,
            rate,
            parts.ranks,
            frozen=number < self.args.critic_warmup_steps,
        )
        return metrics | critic_step(micro_batches, targets, critic.backend, self.config, critic_rate, parts.ranks)


def critic_step(
    batches: Sequence[TrainingBatch],
    targets: Targets,
    backend: CriticBackend,
    config: PPOConfig,
    learning_rate: float,
    ranks: Ranks,
) -> dict[str, float]:
    """Forward, value loss and backward of each micro-batch, then one update of the critic. Collective.

    Returns:
        The whole step's `value_loss`, `critic/grad_norm` (of `vf_coef` times the loss), `critic/learning_rate`,
        `clip_ratio/value`, and in float16 the `critic/loss_scale`; the same on every rank.
    """
    assert targets.returns is not None and targets.valid is not None
    masks = [batch.mask & of_micro_batch(targets.valid, batch.micro)[:, None] for batch in batches]
    normalizer = ranks.sum(torch.stack([mask.sum().double().cpu() for mask in masks]).sum())
    loss = torch.zeros((), dtype=torch.float64)
    metrics = []
    for number, (batch, mask) in enumerate(zip(batches, masks, strict=True)):
        assert batch.old_values is not None
        result = value_loss(
            batch.micro.unflatten(backend.values(batch.micro.inputs)),
            batch.old_values,
            of_micro_batch(targets.returns, batch.micro),
            mask,
            config.cliprange_value or None,
            normalizer=normalizer,
        )
        backend.backward(config.vf_coef * spoilt_if_not_finite(result.loss), last=number + 1 == len(batches))
        loss += result.loss.detach().double().cpu()
        metrics.append(result.metrics)
    scale = backend.loss_scale
    grad_norm = backend.step(learning_rate)
    names, sums = zip(*sorted(sum_metrics(metrics).items()), strict=True)
    totals = ranks.sum(torch.stack([loss, *(value.double().cpu() for value in sums)]))
    found = {"value_loss": totals[0].item(), "critic/grad_norm": grad_norm, "critic/learning_rate": learning_rate}
    if scale is not None:
        found["critic/loss_scale"] = scale
    return found | mean_metrics(dict(zip(names, totals[1:], strict=True)))


def whole_round(
    parts: Sequence[Tensor], steps: Sequence[Sequence[TrainingBatch]], mask: Tensor, ranks: Ranks
) -> Tensor:
    """This rank's micro-batches' tensors `[B, T]` and those of the others as one float32 `[N, longest]`, on every rank:
    what is computed from it does not depend on how the round was cut. Collective."""
    together = torch.zeros(mask.shape)
    for batch, part in zip((item for step in steps for item in step), parts, strict=True):
        together[batch.micro.samples, : part.shape[1]] = part.float().cpu()
    return ranks.sum(together)
