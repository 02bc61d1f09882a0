"""RMSNorm, the gated MLP's product and 16-bit attention on a CPU, in pieces that stay in its cache.

transformers writes each of the first two as half a dozen operations over the whole activation, which costs memory traffic
and leaves float32 copies for the backward pass. These functions keep only their 16-bit inputs and work block by block; the
formulas and where they round are transformers' and, for attention, those of torch's flash attention, whose 16-bit
products are slow without AMX.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from swift_r1.models import invariant

# one megabyte in float32, so that a handful of such tensors fits the second-level cache
_BLOCK_ELEMENTS = 1 << 18


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Returns `weight * hidden / rms(hidden)` over the last dimension (Zhang & Sennrich 2019, eq. 4).

    Args:
        hidden: `[.., D]`, any floating dtype; it is float32 inside.
        weight: `[D]`, of the same dtype.
        epsilon: added to the mean square.
    """
    if torch.is_inference_mode_enabled() and not invariant.is_on():
        normed = torch.nn.functional.rms_norm(hidden, weight.shape, None, epsilon)
        return normed.mul_(weight)
    out: Tensor = _RmsNorm.apply(hidden, weight, epsilon)
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns `silu(gate) * up` (Shazeer 2020, eq. 6), of equal shapes.

    Only the two inputs are kept for the backward pass.
    """
    if torch.is_inference_mode_enabled():
        return silu(gate).mul_(up)
    out: Tensor = _SwiGlu.apply(gate, up)
    return out


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, scale: float | None
) -> Tensor:
    """Returns what `scaled_dot_product_attention` does, `[n, H, R, V]`, with float32 scores and weights.

    Args:
        query, key, value: `[n, H, R, D]`, `[n, H, K, D]`, `[n, H, K, V]`, 16-bit.
        attn_mask: bool `[R, K]`, which keys each row sees.
    """
    heads = (states.flatten(0, 1) for states in (query, key, value))
    scaling = query.shape[-1] ** -0.5 if scale is None else scale
    flat = _Attention.apply(*heads, attn_mask, scaling)
    out: Tensor = flat.unflatten(0, query.shape[:2])
    return out


def _scale(rows: Tensor, epsilon: float) -> Tensor:
    """Returns 1 / rms of each row `[.., D]`, as `[.., 1]`, in float32 or wider."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=wide)
    return norm.square_().div_(rows.shape[-1]).add_(epsilon).rsqrt_()


class _RmsNorm(torch.autograd.Function):
    """Keeps the input and 1 / rms of each row."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        scale = _scale(rows, epsilon)
        out = torch.empty_like(rows)
        for block in _blocks(rows):
            normed = rows[block] * scale[block]
            torch.mul(normed.to(rows.dtype), weight, out=out[block])

        ctx.save_for_backward(hidden, weight, scale)
        return out.view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, scale = ctx.saved_tensors
        rows = hidden.reshape(-1, hidden.shape[-1])
        grads = grad.reshape(-1, hidden.shape[-1])
        to_hidden = torch.empty_like(rows)
        to_weight = torch.zeros_like(weight, dtype=scale.dtype)

        for block in _blocks(rows):
            normed = rows[block] * scale[block]
            to_weight += (normed * grads[block]).sum(0)

            # d (x / rms(x)): what is along x is taken out.
            inner = (grads[block] * weight).to(scale.dtype)
            inner -= normed * (inner * normed).mean(-1, keepdim=True)
            to_hidden[block] = inner.mul_(scale[block])

        return to_hidden.view(hidden.shape), to_weight.to(weight.dtype), None


class _SwiGlu(torch.autograd.Function):
    """Keeps the two inputs, and computes silu again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        gates = gate.reshape(-1, gate.shape[-1])
        ups = up.reshape(-1, up.shape[-1])
        out = torch.empty_like(gates)
        for block in _blocks(gates):
            torch.mul(silu(gates[block]), ups[block], out=out[block])

        return out.view(gate.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        width = grad.shape[-1]
        grads, gates, ups = (states.reshape(-1, width) for states in (grad, *ctx.saved_tensors))
        to_gate = torch.empty_like(gates)
        to_up = torch.empty_like(ups)

        for block in _blocks(gates):
            torch.mul(silu(gates[block]), grads[block], out=to_up[block])
            to_gate[block] = torch.ops.aten.silu_backward(grads[block] * ups[block], gates[block])

        return to_gate.view(grad.shape), to_up.view(grad.shape)


class _Attention(torch.autograd.Function):
    """Keeps its inputs, and computes the weights again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.scaling = scaling
        bias = _bias(mask)
        out = query.new_empty(*query.shape[:2], value.shape[2])
        for heads in _heads(query, bias):
            weights = _weights(query[heads], key[heads], bias, scaling)
            torch.bmm(weights, value[heads], out=out[heads])

        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, mask = ctx.saved_tensors
        bias = _bias(mask)
        grad = grad.contiguous()
        to_query, to_key, to_value = (torch.empty_like(one) for one in (query, key, value))
        for heads in _heads(query, bias):
            weights = _weights(query[heads], key[heads], bias, ctx.scaling)
            torch.bmm(weights.transpose(1, 2), grad[heads], out=to_value[heads])
            to_weights = torch.bmm(grad[heads], value[heads].transpose(1, 2))
            to_scores = torch._softmax_backward_data(to_weights, weights, -1, weights.dtype)
            torch.bmm(to_scores, key[heads], out=to_query[heads])
            torch.bmm(to_scores.transpose(1, 2), query[heads], out=to_key[heads])

        return to_query.mul_(ctx.scaling), to_key.mul_(ctx.scaling), to_value, None, None


def _heads(query: Tensor, bias: Tensor) -> Iterator[slice]:
    """Yields the places of `[N, R, D]` in pieces of at most `2 * _BLOCK_ELEMENTS` scores (those of a head at least)."""
    size = max(1, 2 * _BLOCK_ELEMENTS // bias.numel())
    return (slice(start, start + size) for start in range(0, len(query), size))


def _bias(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill_(~mask, float("-inf"))


def _weights(query: Tensor, key: Tensor, bias: Tensor, scaling: float) -> Tensor:
    scores = torch.baddbmm(bias, query.float(), key.float().transpose(1, 2), alpha=scaling)
    return scores.softmax(-1).to(query.dtype)


def _blocks(rows: Tensor) -> Iterator[slice]:
    """Yields the rows of `[N, D]` in pieces of at most `_BLOCK_ELEMENTS` numbers (a row at least)."""
    size = max(1, _BLOCK_ELEMENTS // rows.shape[-1])
    return (slice(start, start + size) for start in range(0, len(rows), size))
