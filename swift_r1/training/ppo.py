"""PPO's part of a round: one advantage per token, from a critic that learns beside the policy; the critic's updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swift_r1.algorithms import PPOConfig, mean_metrics, ppo_targets, sum_metrics, value_loss
from swift_r1.models.policy import MicroBatch
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.base import CriticBackend
from swift_r1.training.batch.batching import RoundBatch
from swift_r1.training.grpo import Advantages, nan_if_not_finite, of_micro_batch, trained_mask
from swift_r1.training.optimizer import LearningRate


@dataclass(frozen=True)
class TrainedCritic:
    """The critic with its optimizer, the course of its learning rate, and the settings of PPO."""

    backend: CriticBackend
    learning_rate: LearningRate
    config: PPOConfig


def token_advantages(
    batch: RoundBatch, steps: Sequence[Sequence[MicroBatch]], config: PPOConfig, ranks: Ranks
) -> tuple[Advantages, dict[str, float]]:
    """From the rewards of the whole round and the critic's values, on every rank; and what to log. Collective."""
    mask = batch.token_mask()

    def of_round(name: str) -> Tensor:
        """The micro-batches' tensors `[B, T]` of all ranks as one float32 `[N, longest]`: what is computed from it does
        not depend on how the round was split."""
        together = torch.zeros(mask.shape)
        for micro in (micro for micro_batches in steps for micro in micro_batches):
            part: Tensor = getattr(micro, name)
            together[micro.samples, : part.shape[1]] = part.float().cpu()
        return ranks.sum(together)

    kl = {name: of_round(name) for name in ("old_logps", "ref_logps")} if config.kl_coef else {}
    found = ppo_targets(batch.rewards, of_round("old_values"), mask, config, **kl)
    means = (found.advantages * mask).sum(1) / mask.sum(1).clamp(min=1)
    return Advantages(found.advantages, means, found.returns, found.valid), found.metrics


def critic_step(
    batches: Sequence[MicroBatch],
    advantages: Advantages,
    backend: CriticBackend,
    config: PPOConfig,
    learning_rate: float,
    ranks: Ranks,
    *,
    overlong_filter: bool = False,
) -> dict[str, float]:
    """Forward, value loss and backward of each micro-batch, then one update of the critic. Collective.

    Returns:
        The whole step's `value_loss`, `critic/grad_norm` (of `vf_coef` times the loss), `critic/learning_rate`,
        `clip_ratio/value`, and in float16 the `critic/loss_scale`; the same on every rank.
    """
    returns, valid = advantages.returns, advantages.valid
    assert returns is not None and valid is not None
    masks = [trained_mask(micro, overlong_filter) & of_micro_batch(valid, micro)[:, None] for micro in batches]
    normalizer = ranks.sum(torch.stack([mask.sum().double().cpu() for mask in masks]).sum())
    loss = torch.zeros((), dtype=torch.float64)
    metrics = []
    for number, (micro, mask) in enumerate(zip(batches, masks, strict=True)):
        assert micro.old_values is not None
        result = value_loss(
            micro.unflatten(backend.values(micro.inputs)),
            micro.old_values,
            of_micro_batch(returns, micro),
            mask,
            config.cliprange_value or None,
            normalizer=normalizer,
        )
        backend.backward(config.vf_coef * nan_if_not_finite(result.loss), last=number + 1 == len(batches))
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
