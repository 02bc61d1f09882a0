"""Log-probabilities of given tokens without ever holding `[tokens, vocabulary]` logits.

All is done for a chunk of rows at a time; beyond the first few chunks the backward pass computes the logits again
instead of keeping them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swift_r1.models.shape import KEPT_CHUNKS, LOGITS_BYTES

_WORDS = 8192  # rows of the head whose gradient is computed at a time: small beside the whole gradient


class LogitForm(NamedTuple):
    """What an architecture does to `hidden @ weight.T + bias`: `x -> soft_cap * tanh(scale * x / soft_cap)`."""

    scale: float = 1.0  # Cohere's `logit_scale`, or 1 / Granite's `logits_scaling`
    soft_cap: float | None = None  # Gemma's `final_logit_softcapping`, None without


PLAIN = LogitForm()


class TokenLogprobs(NamedTuple):
    """`logps` float32, as the targets `[N]` or `[N, W]`; `entropies` float32 `[N]`, without gradient."""

    logps: Tensor
    entropies: Tensor
    likeliest: Tensor | None = None  # int64 `[N, W]`, the targets, the likeliest tokens among them; where asked for


def selective_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    form: LogitForm = PLAIN,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    top: int = 0,
) -> TokenLogprobs:
    """log softmax(hidden @ weight.T + bias, over temperature) at `targets`, and the entropy (nats) of each row.

    Args:
        hidden: `[N, D]`, any floating dtype.
        weight, bias: `[V, D]` and `[V]`, of the output head.
        targets: `[N]` int64 in `[0, V)`, or `[N, W]`, several of each row.
        temperature: divides the logits, as the sampler did; > 0.
        chunk_size: rows at a time; by default equal chunks, as few as keep each within `LOGITS_BYTES`.
        top: above 0, the `top` likeliest tokens of each row, likeliest first, are targets too, after those of `[N, W]`.

    Returns:
        float32; the log-probs are differentiable with respect to `hidden`, `weight` and `bias`.

    Raises ValueError: on shapes that do not fit together or a temperature that is not positive.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be [N, D] and [V, D]")
    if targets.shape[:1] != hidden.shape[:1] or targets.dim() > 2:
        raise ValueError(f"targets {tuple(targets.shape)} must be [{hidden.shape[0]}] or [{hidden.shape[0]}, W]")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    chunks = math.ceil(len(hidden) / max(1, LOGITS_BYTES // (4 * weight.shape[0])))
    size = chunk_size or math.ceil(len(hidden) / max(1, chunks)) or 1
    wide = targets if targets.dim() == 2 else targets[:, None]
    apply: Callable[..., tuple[Tensor, Tensor, Tensor]] = _SelectiveLogprobs.apply
    kept = KEPT_CHUNKS if torch.is_grad_enabled() and form.soft_cap is None else 0
    logps, entropies, likeliest = apply(hidden, weight, bias, wide, form, temperature, size, kept, top)
    if top:
        return TokenLogprobs(logps, entropies, likeliest)
    return TokenLogprobs(logps.view_as(targets), entropies)


def _chunk_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, form: LogitForm, temperature: float) -> Tensor:
    logits = (hidden @ weight.t()).float()
    if bias is not None:
        logits += bias.float()
    if form.scale != 1.0:
        logits *= form.scale
    if form.soft_cap is not None:
        logits.div_(form.soft_cap).tanh_().mul_(form.soft_cap)
    return logits if temperature == 1.0 else logits.div_(temperature)


class _SelectiveLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        form: LogitForm,
        temperature: float,
        chunk_size: int,
        keep: int,
        top: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = hidden.shape[0]
        lse, totals, entropies = (hidden.new_empty(rows, dtype=torch.float32) for _ in range(3))
        targets = torch.cat([targets, targets.new_empty(rows, top)], 1)
        logps = torch.empty_like(targets, dtype=torch.float32)
        kept: list[Tensor] = []
        for start in range(0, rows, chunk_size):
            part = slice(start, start + chunk_size)
            logits = _chunk_logits(hidden[part], weight, bias, form, temperature)
            largest = logits.amax(-1, keepdim=True)
            logits -= largest
            weights = logits.exp()
            total = weights.sum(-1)
            log_total = total.log()
            if top:
                targets[part, -top:] = logits.topk(top).indices
            logps[part] = logits.gather(-1, targets[part]) - log_total[:, None]
            # H = -sum p log p; of the shifted logits, so that both terms are positive and nothing cancels.
            entropies[part] = log_total - logits.mul_(weights).sum(-1) / total
            lse[part], totals[part] = largest.squeeze(-1) + log_total, total
            if len(kept) < keep:
                kept.append(weights)
        ctx.save_for_backward(hidden, weight, bias, targets, lse, totals, *kept)
        ctx.form, ctx.temperature, ctx.chunk_size = form, temperature, chunk_size
        ctx.mark_non_differentiable(entropies, targets)
        return logps, entropies, targets

    @staticmethod
    def backward(ctx: Any, grad_logps: Tensor, *_others: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse, totals, *kept = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Chunks add up in float32: a sum of many bf16 terms would lose the small ones.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        for number, start in enumerate(range(0, hidden.shape[0], ctx.chunk_size)):
            part = slice(start, start + ctx.chunk_size)
            scale = grad_logps[part].float() * (ctx.form.scale / ctx.temperature)
            together = scale.sum(-1, keepdim=True)
            slope = None
            # d logp / d logits = onehot - softmax
            if number < len(kept):
                grad_logits = kept[number] * (-together / totals[part, None])
            else:
                logits = _chunk_logits(hidden[part], weight, bias, ctx.form, ctx.temperature)
                if ctx.form.soft_cap is not None:
                    # d tanh(x) = 1 - tanh(x)^2
                    slope = 1 - (logits * (ctx.temperature / ctx.form.soft_cap)).square_()
                grad_logits = logits.sub_(lse[part, None]).exp_().mul_(-together)
            grad_logits.scatter_add_(-1, targets[part], scale)
            if slope is not None:
                grad_logits *= slope
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            low = grad_logits.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = low @ weight
            if grad_weight is not None and grad_weight.dtype == weight.dtype:
                grad_weight.addmm_(low.t(), hidden[part])
            elif grad_weight is not None:
                for start_word in range(0, len(weight), _WORDS):
                    words = slice(start_word, start_word + _WORDS)
                    grad_weight[words] += low[:, words].t() @ hidden[part]
        low_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        low_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, low_weight, low_bias, *(None,) * 6
