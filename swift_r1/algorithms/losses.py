"""The policy's loss: ratio, token losses, rollout correction, KL, and the sum over the optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swift_r1.algorithms.aggregation import (
    check_shapes,
    counted,
    divide,
    loss_normalizer,
    loss_numerator,
    masked_metric,
    token_means,
)
from swift_r1.algorithms.config import LossConfig, RolloutCorrection
from swift_r1.algorithms.kl import k3
from swift_r1.algorithms.method import LOG_RATIO_BOUND
from swift_r1.algorithms.off_policy import WholeMeans, kept_completions, off_policy_metrics

ROLLOUT_LOG_RATIO_BOUND = 20.0
"""log(old / rollout) is kept within this: `sequence_mask` gives tokens their own weight, however large."""


@dataclass(frozen=True, slots=True)
class TokenOutcome:
    """Tells what the loss did to each token, `[B, T]`, without gradient; on padding it has no meaning."""

    ratios: Tensor  # importance ratios; at sequence level the completion's at each of its tokens
    clipped: Tensor  # int8: -1 where the ratio was clipped from below, 1 from above, else 0
    # bool: the policy's loss is over it, with a weight above 0 (the KL is over all trained tokens)
    kept: Tensor


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The result of one call of `policy_loss`.

    Example: `LossOutput(tensor(-0.5, requires_grad=True), {"ratio/sum": tensor(3.1), "ratio/count": tensor(3.0)})`
    """

    # scalar with gradient. The losses of all micro-batches and ranks **add up** to the step's loss (where gradients are
    # averaged over ranks, multiply by the number of ranks)
    loss: Tensor
    # `name/sum` and `name/count`, float64, 0-dim, no gradient; add them over micro-batches and ranks (`sum_metrics`),
    # then divide (`mean_metrics`). Names: `ratio`, `clip_ratio/low`, `clip_ratio/high`; `kl` with `ref_logps`;
    # `teacher_kl` with a teacher; `entropy` with `entropies`; with `rollout_logps` `rollout/logp_diff` (mean
    # absolute), what `off_policy_metrics` gives where asked for, and where sampling cut the distribution
    # `rollout/kept_mass`; with a rollout correction `rollout/weight` and `rollout/weight_over_threshold`; with an
    # off-policy mask `rollout/off_policy_masked`; those of `fipo` and `sdar`
    metrics: dict[str, Tensor]
    tokens: TokenOutcome | None = None  # of a policy's loss


def policy_loss(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: LossConfig,
    *,
    ref_logps: Tensor | None = None,
    rollout_logps: Tensor | None = None,
    entropies: Tensor | None = None,
    old_entropies: Tensor | None = None,
    teacher_kl: Tensor | None = None,
    teacher_logps: Tensor | None = None,
    shares: Tensor | None = None,
    whole: WholeMeans | None = None,
    marked: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    entropy_threshold: Tensor | float | None = None,
) -> LossOutput:
    """sum of (w * keep * l + beta * k3 - entropy_coef * entropy + teacher_kl_coef * teacher_kl + sdar_loss_coef * sdar)
    over trained tokens, averaged as `config.loss_type` says.

    `l` is the token's loss, `w` the rollout correction, `keep` the entropy filter and the off-policy mask. Only `logps`,
    `teacher_kl` and, with an `entropy_coef`, `entropies` get a gradient.
    Computed in float32 (float64 for float64 `logps`); what stands where `mask` is 0 has no effect, NaN included.

    Args:
        logps: `[B, T]`, a row for each completion or part of one: log-probs of its tokens under the policy.
        old_logps: `[B, T]`, under the policy as it was before the round's first step (`logps.detach()` when that
            is now); the ratio is to it.
        advantages: `[B]`, or `[B, T]` for one per token.
        mask: `[B, T]`, bool or number, not 0 on trained tokens.
        config: the loss.
        ref_logps: `[B, T]`, under the reference policy; needed where `beta > 0` and not `kl_in_reward`.
        rollout_logps: `[B, T]`, as the engine gave them; needed for a rollout correction.
        entropies: `[B, T]`, nats, of the policy at each token; needed where `entropy_coef > 0` or
            `top_entropy_quantile < 1`.
        old_entropies: `[B, T]`, those that `top_entropy_quantile` chooses by; by default `entropies`.
        teacher_kl: `[B, T]`, `reverse_kl` to a teacher's distribution at each token; None without one.
        teacher_logps: `[B, T]`, under the teacher; needed where `sdar_loss_coef > 0`.
        shares: `[B]`, which part of its completion a row is, see `loss_normalizer`; by default all of it.
        whole: what is of a completion as a whole, where rows are parts of one; by default it is of each row alone.
        marked: bool `[B, T]`, the tokens that `config.loss.marks` gives of the whole optimizer step; by default of this
            call.
        normalizer: denominator of the whole optimizer step, the sum of `loss_normalizer` over all micro-batches and
            ranks; by default this call's own.
        entropy_threshold: smallest entropy that is kept, `top_entropy_threshold` over the whole optimizer step; by
            default over this call.

    Returns:
        The loss (0, with gradient 0, where nothing is trained) and the metrics.
    """
    check_shapes(logps=logps, old_logps=old_logps, mask=mask)
    check_shapes(logps=logps, ref_logps=ref_logps, rollout_logps=rollout_logps)
    check_shapes(logps=logps, entropies=entropies, old_entropies=old_entropies)
    check_shapes(logps=logps, kl=teacher_kl, teacher_logps=teacher_logps)
    if advantages.shape not in (logps.shape, logps.shape[:1]):
        raise ValueError(
            f"advantages must be [{len(logps)}] or {tuple(logps.shape)}, got {tuple(advantages.shape)}"
        )
    trained = mask != 0
    dtype = torch.promote_types(logps.dtype, torch.float32)
    weight = trained.to(dtype)
    # Padding may hold anything; 0 in its place keeps exp and its backward pass finite.
    logps = logps.to(dtype).masked_fill(~trained, 0.0)
    old_logps = _constant(old_logps, trained, dtype)
    advantages = advantages.detach().to(dtype)
    advantages = advantages[:, None].expand_as(logps) if advantages.dim() == 1 else advantages
    advantages = advantages.masked_fill(~trained, 0.0)

    if rollout_logps is not None:
        rollout_logps = _constant(rollout_logps, trained, dtype)
    log_ratio = logps - old_logps
    limited = limited_log_ratio(log_ratio, advantages, config)
    ratio = importance_ratio(limited, weight, config, whole)
    marks: tuple[Tensor, ...] = ()
    if config.loss.marks is not None:
        if marked is None:
            marked = marked_tokens(old_logps, advantages, trained, config, seed=0)
        marks = (marked.to(trained.device),)
    token = config.loss.function(ratio, logps, advantages, config, *marks)
    per_token = token.loss
    kept = trained if token.dropped is None else trained & ~token.dropped
    low = token.clipped_low | (limited > log_ratio)
    high = token.clipped_high | (limited < log_ratio)
    metrics: dict[str, Tensor] = {
        **_ratio_metric("ratio", ratio, weight, config, shares),
        **_ratio_metric("clip_ratio/low", low, weight, config, shares),
        **_ratio_metric("clip_ratio/high", high, weight, config, shares),
    }
    for name, values in token.metrics.items():
        metrics |= masked_metric(name, values, weight)

    delta = config.off_policy_sequence_mask_delta
    if delta is not None:
        behaviour = old_logps if rollout_logps is None else rollout_logps
        keep = kept_completions(logps, behaviour, advantages, weight, delta, whole)
        per_token = per_token * keep
        kept = kept & keep
        metrics |= masked_metric("rollout/off_policy_masked", ~keep[:, 0], counted(weight, shares))

    if entropies is not None:
        entropies = entropies.to(dtype).masked_fill(~trained, 0.0)
        metrics |= masked_metric("entropy", entropies, weight)
    elif config.entropy_coef > 0:
        raise ValueError("entropy_coef above 0 needs entropies")
    if config.top_entropy_quantile < 1:
        chosen_by = entropies if old_entropies is None else old_entropies
        if chosen_by is None:
            raise ValueError("top_entropy_quantile below 1 needs entropies")
        chosen_by = _constant(chosen_by, trained, dtype)
        if entropy_threshold is None:
            entropy_threshold = top_entropy_threshold(chosen_by, mask, config.top_entropy_quantile)
        uncertain = chosen_by >= entropy_threshold
        per_token = per_token * uncertain
        kept = kept & uncertain

    if rollout_logps is not None:
        metrics |= masked_metric("rollout/logp_diff", (old_logps - rollout_logps).abs(), weight)
        if config.log_rollout_offpolicy_metrics:
            metrics |= off_policy_metrics(old_logps, rollout_logps, weight, shares, whole)
        if config.cuts_sampling:
            metrics |= masked_metric("rollout/kept_mass", (old_logps - rollout_logps).exp(), weight)
    if config.rollout_importance_sampling_mode is not None:
        if rollout_logps is None:
            raise ValueError("rollout_importance_sampling_mode needs rollout_logps")
        mode = config.rollout_importance_sampling_mode
        threshold = config.rollout_importance_sampling_threshold
        correction, over = rollout_weights(old_logps, rollout_logps, weight, mode, threshold, whole)
        per_token = per_token * correction
        kept = kept & (correction > 0)
        metrics |= masked_metric("rollout/weight", correction.expand_as(weight), weight)
        metrics |= masked_metric("rollout/weight_over_threshold", over.expand_as(weight), weight)

    if ref_logps is not None:
        ref_logps = _constant(ref_logps, trained, dtype)
        kl = k3(logps, ref_logps)
        metrics |= masked_metric("kl", kl, weight)
        if config.kl_in_loss:
            per_token = per_token + config.beta * kl
            pull = config.beta * (1 - (ref_logps - logps.detach()).exp()).abs()
            metrics |= masked_metric("kl/pull", pull, weight)
    elif config.kl_in_loss:
        raise ValueError("beta above 0 needs ref_logps")
    if config.entropy_coef > 0 and entropies is not None:
        per_token = per_token - config.entropy_coef * entropies
    for method in config.distillations:
        assert method.flag is not None and method.token_loss is not None
        if teacher_logps is None:
            raise ValueError(f"{method.flag} above 0 needs teacher_logps")
        distilled, logged = method.token_loss(
            logps, _constant(teacher_logps, trained, dtype), config
        )
        per_token = per_token + getattr(config, method.flag) * distilled
        for name, values in logged.items():
            metrics |= masked_metric(name, values, weight)

    if teacher_kl is not None:
        kl = teacher_kl.to(dtype).masked_fill(~trained, 0.0)
        metrics |= masked_metric("teacher_kl", kl.detach(), weight)
        per_token = per_token + config.teacher_kl_coef * kl

    numerator = loss_numerator(per_token, weight, config, shares)
    loss = divide(
        numerator, loss_normalizer(mask, config, shares) if normalizer is None else normalizer
    )
    clipped = high.to(torch.int8) - low.to(torch.int8)
    return LossOutput(loss, metrics, TokenOutcome(ratio.detach(), clipped, kept))


def limited_log_ratio(log_ratio: Tensor, advantages: Tensor, config: LossConfig) -> Tensor:
    """Returns log-ratios `[B, T]` of tokens as the loss has them (`Loss.limit`): of most losses as they are."""
    limit = config.loss.limit
    return log_ratio if limit is None else limit(log_ratio, advantages, config)


def importance_ratio(
    log_ratio: Tensor,
    mask: Tensor,
    config: LossConfig,
    whole: WholeMeans | None = None,
) -> Tensor:
    """`[B, T]`: exp(logp - old), or at sequence level exp of its mean over the completion's trained tokens.

    Sequence level: GSPO (arXiv 2507.18071, eq. 7); GSPO-token (eq. 14) has its value, and the gradient of the token's
    own log-prob. `mask` has the dtype of `log_ratio`; padding must be finite.
    """
    own = log_ratio
    if config.level != "token":
        mean = token_means(log_ratio, mask)
        # the gradient of a row's tokens is by its share as it is, since each adds its own loss
        if whole is not None:
            mean = mean + (whole.moved - mean).detach()
        log_ratio = mean[:, None] * mask  # 0 between trained tokens too, which `fipo` counts
    if config.level == "sequence_token":
        log_ratio = log_ratio.detach() + (own - own.detach())
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def marked_tokens(
    logps: Tensor, advantages: Tensor, trained: Tensor, config: LossConfig, seed: int
) -> Tensor:
    """The tokens of an optimizer step that its loss treats otherwise (`Loss.marks`), bool `[R, T]` on the CPU.

    Args:
        logps, advantages: `[R, T]`, of the policy before the round's first update, and of the tokens.
        trained: bool `[R, T]`; give all of the step's, or what is chosen depends on how it was cut.
        seed: of what is drawn by chance.
    """
    assert config.loss.marks is not None
    generator = torch.Generator().manual_seed(seed)
    return config.loss.marks(
        logps.detach().cpu(), advantages.cpu(), trained.cpu(), config, generator
    )


def rollout_weights(
    old_logps: Tensor,
    rollout_logps: Tensor,
    mask: Tensor,
    mode: RolloutCorrection,
    threshold: float,
    whole: WholeMeans | None = None,
) -> tuple[Tensor, Tensor]:
    """w = exp(old - rollout), the token's or the completion's (their geometric mean), kept below `threshold`.

    Engine and trainer hold the same weights, yet their log-probs differ by numerics; `w` corrects for it. Sources:
    truncated importance sampling, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (Yao et al.
    2025); masking, IcePop (Ling team 2025) and MIS (Liu et al. 2025).

    `*_truncate` gives `min(w, threshold)`. `*_mask` gives the token's w where the token's (or for `sequence_mask` the
    completion's) is at most `threshold`, else 0.

    Args:
        old_logps, rollout_logps: `[B, T]`, the trainer's under the weights that sampled, and the engine's; finite where
            masked out too.
        mask: `[B, T]`, 1 on trained tokens, dtype of `old_logps`.
        threshold: the largest weight, above 0.

    Returns:
        Weights without gradient, and bool, whether what is compared was above the threshold; each `[B, T]`, or `[B, 1]`
        where it is the same for all tokens.
    """
    log_ratio = (
        (old_logps - rollout_logps)
        .detach()
        .clamp(-ROLLOUT_LOG_RATIO_BOUND, ROLLOUT_LOG_RATIO_BOUND)
    )
    compared = log_ratio
    if mode.startswith("sequence"):
        compared = (token_means(log_ratio, mask) if whole is None else whole.gap)[:, None]
    ratio = compared.exp()
    over = compared.exp() > threshold
    weights = (
        log_ratio.exp().masked_fill(over, 0.0)
        if mode.endswith("mask")
        else ratio.clamp(max=threshold)
    )
    return weights, over


def top_entropy_threshold(entropies: Tensor, mask: Tensor, quantile: float) -> Tensor:
    """The entropy that the given share of the trained tokens reaches ("Beyond the 80/20 Rule", arXiv 2506.01939).

    Args:
        entropies, mask: of any one shape; give those of the whole optimizer step.
        quantile: share of tokens to keep, above 0 and at most 1.

    Returns:
        Scalar, at least float32; infinite (keeps nothing) where nothing is trained.
    """
    chosen = entropies.detach()[mask != 0]
    chosen = chosen.to(torch.promote_types(chosen.dtype, torch.float32)).sort().values
    if chosen.numel() == 0:
        return chosen.new_tensor(torch.inf)
    # Like torch.quantile, which refuses more than 16 million values. Rounded, since (1 - 0.55) * 20 is not quite 9
    # and the token at the edge would be kept or not by chance.
    place = round((1 - quantile) * (chosen.numel() - 1), 6)
    below = int(place)
    above = min(below + 1, chosen.numel() - 1)
    return torch.lerp(chosen[below], chosen[above], place - below)


def _constant(values: Tensor, trained: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns values without gradient, and 0 where not trained."""
    return values.detach().to(dtype).masked_fill(~trained, 0.0)


def _ratio_metric(
    name: str, values: Tensor, weight: Tensor, config: LossConfig, shares: Tensor | None
) -> dict[str, Tensor]:
    """Counts each ratio once: a token at token level, a completion with trained tokens at sequence level."""
    if config.level == "token":
        return masked_metric(name, values, weight)
    means = token_means(values.to(weight.dtype), weight)
    return masked_metric(name, means, counted(weight, shares))
