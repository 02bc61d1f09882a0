"""Log-probabilities of given tokens without ever holding `[tokens, vocabulary]` logits.

All is done for a chunk of rows at a time; beyond the first few chunks the backward pass computes the logits again
instead of keeping them.

On a GPU products give float32 (where torch can) and what follows them is one kernel (where Triton is): the logits are
never rounded to the weights' dtype, nor are the terms of the head's gradient before they are added up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from swift_r1.models import invariant
from swift_r1.models.block_functions import gpu_kernels
from swift_r1.models.multimodal import NEVER
from swift_r1.models.shape import KEPT_CHUNKS, LOGITS_BYTES, gpu_logits_bytes

# torch.addmm(float32, 16-bit, 16-bit, out_dtype=float32) is there since 2.8, and takes a float32 sum since 2.11.
WIDE_PRODUCTS = torch.version.cuda is not None and TorchVersion(torch.__version__) >= "2.11"
# rows of the head whose gradient a CPU computes at a time: small beside the whole gradient
_WORDS = 8192


class LogitForm(NamedTuple):
    """What an architecture does to `hidden @ weight.T + bias`: `x -> soft_cap * tanh(scale * x / soft_cap)`."""

    scale: float = 1.0  # Cohere's `logit_scale`, or 1 / Granite's `logits_scaling`
    soft_cap: float | None = None  # Gemma's `final_logit_softcapping`, None without
    never: tuple[int, ...] = ()  # tokens that are never sampled


PLAIN = LogitForm()


class TokenLogprobs(NamedTuple):
    """`logps` float32, as the targets `[N]` or `[N, W]`; `entropies` float32 `[N]`, with a gradient where asked for."""

    logps: Tensor
    entropies: Tensor
    # int64 `[N, W]`, the targets, the likeliest tokens among them; where asked for
    likeliest: Tensor | None = None
    # float32 `[N]`, the sum of the squared probabilities of all tokens; where asked for
    squares: Tensor | None = None


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
    entropy_gradient: bool = False,
    squares: bool = False,
) -> TokenLogprobs:
    """log softmax(hidden @ weight.T + bias, over temperature) at `targets`, and the entropy (nats) of each row.

    Args:
        hidden: `[N, D]`, any floating dtype.
        weight, bias: `[V, D]` and `[V]`, of the output head.
        targets: `[N]` int64 in `[0, V)`, or `[N, W]`, several of each row.
        temperature: divides the logits, as the sampler did; > 0.
        chunk_size: rows at a time; by default equal chunks, as few as keep each within `logits_bytes`.
        top: above 0, the `top` likeliest tokens of each row, likeliest first, are targets too, after those of `[N, W]`.
        entropy_gradient: the entropies are differentiable too.
        squares: the sums of squared probabilities are in the result, without gradient.

    Returns:
        float32; the log-probs are differentiable with respect to `hidden`, `weight` and `bias`.

    Raises ValueError: on shapes that do not fit together or a temperature that is not positive.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be [N, D] and [V, D]"
        )
    if targets.shape[:1] != hidden.shape[:1] or targets.dim() > 2:
        raise ValueError(
            f"targets {tuple(targets.shape)} must be [{hidden.shape[0]}] or [{hidden.shape[0]}, W]"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")

    chunks = math.ceil(len(hidden) / max(1, logits_bytes(hidden.device) // (4 * weight.shape[0])))
    size = chunk_size or math.ceil(len(hidden) / max(1, chunks)) or 1
    wide = targets if targets.dim() == 2 else targets[:, None]
    # The backward pass of a soft cap needs the logits themselves.
    kept = KEPT_CHUNKS if torch.is_grad_enabled() and form.soft_cap is None else 0
    logps, entropies, likeliest, sums = _SelectiveLogprobs.apply(
        hidden, weight, bias, wide, form, temperature, size, kept, top, entropy_gradient, squares
    )
    more = sums if squares else None
    if top:
        return TokenLogprobs(logps, entropies, likeliest, more)
    return TokenLogprobs(logps.view_as(targets), entropies, None, more)


@cache
def logits_bytes(device: torch.device) -> int:
    """Returns how many bytes of float32 logits one chunk may occupy there."""
    if device.type != "cuda":
        return LOGITS_BYTES
    return gpu_logits_bytes(torch.cuda.get_device_properties(device).total_memory)


@contextmanager
def rounded_products() -> Iterator[None]:
    """Rounds logits to the weights' dtype while it is open, as transformers' are, on every device."""
    global WIDE_PRODUCTS
    before = WIDE_PRODUCTS
    WIDE_PRODUCTS = False
    try:
        yield
    finally:
        WIDE_PRODUCTS = before


def _wide(states: Tensor) -> bool:
    """Says whether a product of such tensors can be had in float32 without being rounded first."""
    return WIDE_PRODUCTS and states.is_cuda and states.dtype in (torch.bfloat16, torch.float16)


def chunk_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    form: LogitForm,
    temperature: float,
) -> Tensor:
    """Returns the logits over the temperature, float32 `[rows, V]`, of a chunk `[rows, D]`; they are the caller's."""
    transposed = weight.t()
    logits = (
        torch.mm(hidden, transposed, out_dtype=torch.float32)
        if _wide(hidden)
        else (hidden @ transposed).float()
    )
    if bias is not None:
        logits += bias.float()
    if form.scale != 1.0:
        logits *= form.scale
    if form.soft_cap is not None:
        logits.div_(form.soft_cap).tanh_().mul_(form.soft_cap)
    for token in form.never:
        logits[:, token] = NEVER
    return logits if temperature == 1.0 else logits.div_(temperature)


def _shifted(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Takes from logits `[rows, V]` the largest of each row; returns these `[rows, 1]`, the exponentials `[rows, V]` of
    what is left, and their sums `[rows]`."""
    largest = logits.amax(-1, keepdim=True)
    logits -= largest
    weights = logits.exp()
    return largest, weights, invariant.row_sums(weights)


def logprobs_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the log-probs float32 `[rows]` of `targets [rows]`, to the bit those that `selective_logprobs` computes on
    a CPU from such logits, float32 `[rows, V]`, over the temperature."""
    shifted = logits.clone()
    _, _, total = _shifted(shifted)
    return shifted.gather(-1, targets[:, None]).squeeze(-1) - total.log()


def _entropy_slope(p: Tensor, entropies: Tensor, slopes: Tensor) -> Tensor:
    """Returns the gradient of `sum(slopes * H)` by the logits, `[rows, V]`: d H / d logits = -p (log p + H).

    Args:
        p: `[rows, V]`, the softmax; 0 log 0 is 0.
        entropies, slopes: `[rows]`, H and what it is multiplied by.
    """
    return torch.xlogy(p, p).addcmul_(entropies[:, None], p).mul_(-slopes[:, None])


class _SelectiveLogprobs(torch.autograd.Function):
    """Keeps of the first `keep` chunks what the backward pass needs, and of the others only a number or two a row."""

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
        entropy_gradient: bool,
        squares: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows = hidden.shape[0]
        lse, totals, entropies = (hidden.new_empty(rows, dtype=torch.float32) for _ in range(3))
        targets = torch.cat([targets, targets.new_empty(rows, top)], 1)
        logps = torch.empty_like(targets, dtype=torch.float32)
        sums = hidden.new_empty(rows if squares else 0, dtype=torch.float32)
        kernels = gpu_kernels("head", hidden)
        kept: list[Tensor] = []  # logits with the kernels, else their exponentials

        for start in range(0, rows, chunk_size):
            part = slice(start, start + chunk_size)
            logits = chunk_logits(hidden[part], weight, bias, form, temperature)
            if kernels is not None:
                largest, log_total, entropies[part] = kernels.softmax_statistics(logits)
                if top:
                    targets[part, -top:] = logits.topk(top).indices
                logps[part] = (
                    logits.gather(-1, targets[part]) - largest[:, None] - log_total[:, None]
                )
                lse[part] = largest + log_total
                if squares:
                    sums[part] = (logits - lse[part, None]).mul_(2).exp_().sum(-1)
                if len(kept) < keep:
                    kept.append(logits)
                del logits  # before those of the next chunk
                continue

            largest, weights, total = _shifted(logits)
            log_total = total.log()

            if top:
                targets[part, -top:] = logits.topk(top).indices
            logps[part] = logits.gather(-1, targets[part]) - log_total[:, None]
            # H = -sum p log p; of the shifted logits, so that both terms are positive and nothing cancels.
            entropies[part] = log_total - logits.mul_(weights).sum(-1) / total
            lse[part], totals[part] = largest.squeeze(-1) + log_total, total
            if squares:
                sums[part] = weights.square().sum(-1) / total.square()
            if len(kept) < keep:
                kept.append(weights)

        ctx.save_for_backward(hidden, weight, bias, targets, lse, totals, entropies, *kept)
        ctx.form = form
        ctx.temperature = temperature
        ctx.chunk_size = chunk_size
        ctx.kernels = kernels
        ctx.entropy_gradient = entropy_gradient
        ctx.mark_non_differentiable(targets, sums, *(() if entropy_gradient else (entropies,)))
        return logps, entropies, targets, sums

    @staticmethod
    def backward(
        ctx: Any, grad_logps: Tensor, grad_entropies: Tensor, *_others: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse, totals, entropies, *kept = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Chunks add up in float32: a sum of many bf16 terms would lose the small ones.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None

        per_cap = None if ctx.form.soft_cap is None else ctx.temperature / ctx.form.soft_cap
        for number, start in enumerate(range(0, hidden.shape[0], ctx.chunk_size)):
            part = slice(start, start + ctx.chunk_size)
            inner = ctx.form.scale / ctx.temperature
            scale = grad_logps[part].float() * inner
            # each row's entropy, and what its gradient is multiplied by
            own = entropies[part]
            rise = grad_entropies[part].float() * inner if ctx.entropy_gradient else None

            again = None
            if number >= len(kept):
                again = chunk_logits(hidden[part], weight, bias, ctx.form, ctx.temperature)
            if ctx.kernels is not None:
                logits = kept[number] if again is None else again
                low = ctx.kernels.softmax_gradient(
                    logits,
                    lse[part],
                    targets[part],
                    scale,
                    per_cap,
                    weight.dtype,
                    None if rise is None else (own, rise),
                )
                del logits, again
                if grad_bias is not None:
                    grad_bias += low.sum(0, dtype=torch.float32)
            else:
                together = scale.sum(-1, keepdim=True)
                slope = None
                lift = None
                # d logp / d logits = onehot - softmax
                if again is None:
                    if rise is not None:
                        lift = _entropy_slope(kept[number] / totals[part, None], own, rise)
                    grad_logits = kept[number] * (-together / totals[part, None])
                else:
                    if per_cap is not None:
                        # d tanh(x) = 1 - tanh(x)^2
                        slope = 1 - (again * per_cap).square_()
                    p = again.sub_(lse[part, None]).exp_()
                    if rise is not None:
                        lift = _entropy_slope(p, own, rise)
                    grad_logits = p.mul_(-together)
                if lift is not None:
                    grad_logits += lift
                grad_logits.scatter_add_(-1, targets[part], scale)
                if slope is not None:
                    grad_logits *= slope
                if grad_bias is not None:
                    grad_bias += grad_logits.sum(0)
                low = grad_logits.to(weight.dtype)

            if grad_hidden is not None:
                grad_hidden[part] = low @ weight
            if grad_weight is None:
                continue
            states = hidden[part]
            if grad_weight.dtype == weight.dtype:
                grad_weight.addmm_(low.t(), states)
            elif _wide(low):
                torch.addmm(grad_weight, low.t(), states, out_dtype=torch.float32, out=grad_weight)
            else:
                for start_word in range(0, len(weight), _WORDS):
                    words = slice(start_word, start_word + _WORDS)
                    grad_weight[words] += low[:, words].t() @ states

        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, *(None,) * 8
