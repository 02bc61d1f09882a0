"""One optimizer step on completions that are already scored: old and reference log-probs, loss, update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swift_r1.algorithms import (
    LossConfig,
    drop_truncated,
    loss_normalizer,
    mean_metrics,
    policy_loss,
    rewards_less_kl,
    sum_metrics,
    top_entropy_threshold,
)
from swift_r1.algorithms.aggregation import masked_metric
from swift_r1.models.logprobs import TokenLogprobs
from swift_r1.models.policy import MicroBatch
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.base import Backend, CriticBackend, ReferencePolicy
from swift_r1.training.batch.batching import Batching, RoundBatch, split_step


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A micro-batch with everything its loss needs beside the current policy and the advantages.

    Attributes:
        mask: `[B, T]` bool, True on trained tokens: all of a completion's, or none (`--overlong_filter`).
        old_logps, old_entropies: `[B, T]` float32, of the policy before the round's first update; None where nothing
            needs them.
        ref_logps: `[B, T]` float32, None without a reference policy.
        old_values: `[B, T]` float32, of the critic before the round's first update; None without a critic.
    """

    micro: MicroBatch
    mask: Tensor
    old_logps: Tensor | None
    old_entropies: Tensor | None
    ref_logps: Tensor | None
    old_values: Tensor | None = None


def deal_round(batch: RoundBatch, steps: int, cut: Batching, ranks: Ranks) -> list[list[MicroBatch]]:
    """This rank's micro-batches of each of the round's optimizer steps.

    Consecutive completions, so whole groups where sizes allow, make a step.
    """
    size = len(batch) // steps
    return [split_step(batch, range(start, start + size), cut, ranks) for start in range(0, len(batch), size)]


def needs_old_policy(config: LossConfig, updates: int) -> bool:
    """Whether a round of `updates` optimizer steps needs a forward pass before its first one.

    With one update the training forward gives the old log-probs, so nothing is computed twice, and a ratio to the
    engine's has no use for them; but the KL in the reward comes before the advantages, and the entropy threshold before
    the first backward pass.
    """
    before_update = updates > 1 and not config.ratio_to_behaviour
    return before_update or config.kl_in_reward or config.top_entropy_quantile < 1


def before_training(
    steps: Sequence[Sequence[MicroBatch]],
    backend: Backend,
    reference: ReferencePolicy | None,
    temperature: float,
    *,
    old_policy: bool,
    overlong_filter: bool = False,
    critic: CriticBackend | None = None,
) -> list[list[TrainingBatch]]:
    """Adds what must be computed with the weights as they are before the round's first update. Collective.

    Args:
        critic: of PPO; its values are computed.
        old_policy: compute the policy's own log-probs and entropies, see `needs_old_policy`.
        overlong_filter: leave truncated completions out of the loss.
    """
    prepared = []
    for batches in training_batches(steps, overlong_filter):
        row = []
        for batch in batches:
            micro, old, entropies, ref, values = batch.micro, None, None, None, None
            if old_policy:
                with torch.no_grad():
                    old, entropies = map(micro.unflatten, _logprobs(backend, micro, temperature))
            if reference is not None:
                ref = micro.unflatten(_logprobs(reference, micro, temperature).logps)
            if critic is not None:
                with torch.no_grad():
                    values = micro.unflatten(critic.values(micro.inputs))
            row.append(replace(batch, old_logps=old, old_entropies=entropies, ref_logps=ref, old_values=values))
        prepared.append(row)
    return prepared


def training_batches(steps: Sequence[Sequence[MicroBatch]], overlong_filter: bool) -> list[list[TrainingBatch]]:
    """The micro-batches with their masks, and no log-probs yet."""
    return [
        [
            TrainingBatch(
                micro, drop_truncated(micro.mask, micro.truncated) if overlong_filter else micro.mask, None, None, None
            )
            for micro in micro_batches
        ]
        for micro_batches in steps
    ]


def rewards_after_kl(rewards: Tensor, steps: Sequence[Sequence[TrainingBatch]], beta: float, ranks: Ranks) -> Tensor:
    """`--kl_in_reward`: the round's rewards `[N]` less `beta` times the KL of each completion, on every rank.

    Each rank computes the KL of its own completions. The KL is over all of a completion's tokens, also of one that
    `--overlong_filter` leaves out of the loss: its reward counts in the group's baseline. Collective.
    """
    penalties = torch.zeros(len(rewards), dtype=torch.float64)
    for batch in (batch for batches in steps for batch in batches):
        micro = batch.micro
        assert batch.old_logps is not None and batch.ref_logps is not None
        nothing = torch.zeros(len(micro.samples), dtype=torch.float64, device=micro.mask.device)
        less = rewards_less_kl(nothing, batch.old_logps, batch.ref_logps, micro.mask, beta)
        penalties[micro.samples] = less.cpu()
    return (rewards + ranks.sum(penalties)).to(rewards.dtype)


def entropy_threshold(batches: Sequence[TrainingBatch], quantile: float, ranks: Ranks) -> Tensor:
    """The entropy (float32 scalar) from which on a token of this optimizer step is trained, the same on every rank.

    Of the trained tokens of all micro-batches and ranks, under the policy before the round's first update.
    Collective.
    """
    entropies = [batch.old_entropies[batch.mask] for batch in batches if batch.old_entropies is not None]
    everyones = ranks.gather(torch.cat(entropies).cpu())
    mine = None
    if everyones is not None:
        together = torch.cat(everyones)
        mine = [top_entropy_threshold(together, torch.ones_like(together), quantile)[None]]
    return ranks.broadcast(mine)[0][0]


def train_step(
    batches: Sequence[TrainingBatch],
    advantages: Tensor,
    backend: Backend,
    config: LossConfig,
    temperature: float,
    learning_rate: float,
    ranks: Ranks,
    frozen: bool = False,
) -> dict[str, float]:
    """Forward, loss and backward of each micro-batch, then one update. Collective.

    Args:
        advantages: float32 `[N]`, of the whole round; or `[N, longest]`, one a token.
        frozen: the policy is only looked at: no backward pass and no update, gradient norm and rate 0.

    Returns:
        The whole step's `loss`, `grad_norm` (where one is not finite nothing was updated), `learning_rate`, the loss's
        metrics, in float16 the `loss_scale` that this step used, each rank's `micro_batches` and the `tokens_computed`
        of all of them (prompts, completions and padding that went through the model for the gradient); the same on
        every rank.
    """
    normalizer = ranks.sum(sum(loss_normalizer(batch.mask, config) for batch in batches))
    filtered = config.top_entropy_quantile < 1
    threshold = entropy_threshold(batches, config.top_entropy_quantile, ranks) if filtered else None
    loss = torch.zeros((), dtype=torch.float64)
    metrics = []
    for number, batch in enumerate(batches):
        micro = batch.micro
        with torch.set_grad_enabled(not frozen):
            out = _logprobs(backend, micro, temperature)
        logps, entropies = micro.unflatten(out.logps), micro.unflatten(out.entropies)
        result = policy_loss(
            logps,
            logps.detach() if batch.old_logps is None else batch.old_logps,
            of_micro_batch(advantages, micro),
            batch.mask,
            config,
            ref_logps=batch.ref_logps,
            rollout_logps=micro.rollout_logps,
            # The filter and its threshold must see the same numbers, or a token at the edge falls by rounding.
            entropies=batch.old_entropies if filtered else entropies,
            normalizer=normalizer,
            entropy_threshold=threshold,
        )
        if not frozen:
            backend.backward(spoilt_if_not_finite(result.loss), last=number + 1 == len(batches))
        loss += result.loss.detach().double().cpu()
        metrics.append(result.metrics | masked_metric("entropy", entropies, batch.mask.to(entropies.dtype)))
    scale = backend.loss_scale
    grad_norm, learning_rate = (0.0, 0.0) if frozen else (backend.step(learning_rate), learning_rate)
    names, sums = zip(*sorted(sum_metrics(metrics).items()), strict=True)
    computed = torch.tensor(sum(batch.micro.inputs.token_ids.numel() for batch in batches), dtype=torch.float64)
    totals = ranks.sum(torch.stack([loss, computed, *(value.double().cpu() for value in sums)]))
    means = mean_metrics(dict(zip(names, totals[2:], strict=True)))
    if threshold is not None and threshold.isfinite():
        means["entropy/threshold"] = threshold.item()
    if scale is not None:
        means["loss_scale"] = scale
    means |= {"micro_batches": float(len(batches)), "tokens_computed": totals[1].item()}
    return {"loss": totals[0].item(), "grad_norm": grad_norm, "learning_rate": learning_rate} | means


def spoilt_if_not_finite(loss: Tensor) -> Tensor:
    """A loss that is not finite must give a gradient that is not, whatever the rank: then all leave the update out."""
    return loss if loss.isfinite() else loss * math.nan


def of_micro_batch(of_round: Tensor, micro: MicroBatch) -> Tensor:
    """The rows of a round's tensor, `[N]` or `[N, longest]`, that a micro-batch is on: `[B]` or `[B, T]`."""
    rows = of_round[micro.samples]
    return (rows if rows.dim() == 1 else rows[:, : micro.mask.shape[1]]).to(micro.mask.device)


def _logprobs(policy: Backend | ReferencePolicy, micro: MicroBatch, temperature: float) -> TokenLogprobs:
    return policy.logprobs(micro.inputs, temperature)
