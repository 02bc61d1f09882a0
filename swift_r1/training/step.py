"""One optimizer step on completions that are already scored: old and reference log-probs, loss, update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swift_r1.algorithms import LossConfig, loss_normalizer, mean_metrics, policy_loss, sum_metrics
from swift_r1.training.backends.base import Backend, ReferencePolicy
from swift_r1.training.batching import RoundBatch, collate, split_micro_batches
from swift_r1.training.distributed import Ranks
from swift_r1.training.policy import MicroBatch


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A micro-batch with everything its loss needs beside the current policy; log-probs `[B, T]` float32."""

    micro: MicroBatch
    old_logps: Tensor | None
    ref_logps: Tensor | None


def deal_round(batch: RoundBatch, steps: int, micro_batches: int, ranks: Ranks) -> list[list[MicroBatch]]:
    """This rank's micro-batches of each of the round's optimizer steps.

    Consecutive completions, so whole groups where sizes allow, make a step.
    """
    lengths = (batch.prompt_lengths + batch.completion_lengths).tolist()
    size = len(batch) // steps
    dealt = []
    for start in range(0, len(batch), size):
        plan = split_micro_batches(lengths[start : start + size], ranks.world_size, micro_batches)[ranks.rank]
        dealt.append([collate(batch, [start + sample for sample in samples], ranks.device) for samples in plan])
    return dealt


def before_training(
    steps: Sequence[Sequence[MicroBatch]],
    backend: Backend,
    reference: ReferencePolicy | None,
    temperature: float,
    updates: int,
) -> list[list[TrainingBatch]]:
    """Adds what must be computed with the weights as they are before the round's first update.

    The policy's own log-probs are only computed where the policy will have changed by the time they are used:
    with one update a round they equal the training forward's.
    """
    prepared = []
    for micro_batches in steps:
        row = []
        for micro in micro_batches:
            inputs = (micro.token_ids, micro.positions, micro.targets, temperature)
            old = ref = None
            if updates > 1:
                with torch.no_grad():
                    old = micro.unflatten(backend.logprobs(*inputs).logps)
            if reference is not None:
                ref = micro.unflatten(reference.logprobs(*inputs).logps)
            row.append(TrainingBatch(micro, old, ref))
        prepared.append(row)
    return prepared


def train_step(
    batches: Sequence[TrainingBatch],
    backend: Backend,
    config: LossConfig,
    temperature: float,
    learning_rate: float,
    ranks: Ranks,
) -> dict[str, float]:
    """Forward, loss and backward of each micro-batch, then one update. Collective.

    Returns:
        The whole step's `loss`, `grad_norm`, `learning_rate`, and the loss's metrics, the same on every rank.
    """
    normalizer = ranks.sum(sum(loss_normalizer(batch.micro.mask, config) for batch in batches))
    loss = torch.zeros((), dtype=torch.float64)
    metrics = []
    for number, batch in enumerate(batches):
        micro = batch.micro
        out = backend.logprobs(micro.token_ids, micro.positions, micro.targets, temperature)
        logps = micro.unflatten(out.logps)
        result = policy_loss(
            logps,
            logps.detach() if batch.old_logps is None else batch.old_logps,
            micro.advantages,
            micro.mask,
            config,
            ref_logps=batch.ref_logps,
            rollout_logps=micro.rollout_logps,
            entropies=micro.unflatten(out.entropies),
            normalizer=normalizer,
        )
        backend.backward(result.loss, last=number + 1 == len(batches))
        loss += result.loss.detach().double().cpu()
        metrics.append(result.metrics)
    grad_norm = backend.step(learning_rate)
    names, sums = zip(*sorted(sum_metrics(metrics).items()), strict=True)
    totals = ranks.sum(torch.stack([loss, *(value.double().cpu() for value in sums)]))
    means = mean_metrics(dict(zip(names, totals[1:], strict=True)))
    return {"loss": totals[0].item(), "grad_norm": grad_norm, "learning_rate": learning_rate} | means
