"""RMSNorm, the gated MLP's product, rotary positions and the output head's softmax on a GPU, each a kernel in Triton.

Each reads its inputs once and writes its results once. `cpu_kernels.py`, `logprobs.py` and transformers have the same
formulas in torch, with the same rounding. Sums are taken in a fixed order (no atomics), so that a run can be repeated
to the bit.

Offsets are 64-bit: the logits of 33,000 tokens are 5 * 10^9 numbers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# numbers that a program works on at least: narrow rows are taken several at a time
_LEAST_TILE = 1024
_ELEMENTS = 1024  # of a program of the product
_COLUMNS = 2048  # of the logits that a program works on at a time
_LOWEST = tl.constexpr(-1e30)  # below any logit; minus infinity times zero would not be a number


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Returns `weight * hidden / rms(hidden)` over the last dimension.

    Only the input and a number a row are kept for the backward pass.

    Args:
        hidden: `[.., D]`, any floating dtype; it is float32 inside.
        weight: `[D]`.
        epsilon: added to the mean square.
    """
    out: Tensor = _RmsNorm.apply(hidden, weight, epsilon)
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns `silu(gate) * up`, of equal shapes.

    Only the two inputs are kept for the backward pass.
    """
    out: Tensor = _SwiGlu.apply(gate, up)
    return out


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns `states * cos + rotate_half(states) * sin`.

    Args:
        states: `[B, H, S, D]`.
        cos, sin: `[1 or B, S, D]`, of the same dtype.
    """
    out: Tensor = _Rotated.apply(states, cos, sin)
    return out


def softmax_statistics(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns three numbers for each row of logits, float32 `[N]` each.

    They are the largest logit, the log of the sum of exponentials beyond it, and the softmax's entropy (nats).

    Args:
        logits: contiguous float32 `[N, V]`.
    """
    largest, log_total, entropy = (logits.new_empty(len(logits)) for _ in range(3))
    _statistics[(len(logits),)](
        logits, largest, log_total, entropy, WIDTH=logits.shape[1], BLOCK=_COLUMNS, num_warps=8
    )
    return largest, log_total, entropy


def softmax_gradient(
    logits: Tensor,
    lse: Tensor,
    targets: Tensor,
    slopes: Tensor,
    per_cap: float | None,
    dtype: torch.dtype,
    entropy: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Returns the gradient `[N, V]`, in `dtype`, of `sum(slopes * log softmax(logits)[targets])` by the logits.

    Args:
        logits: contiguous float32 `[N, V]`.
        lse: float32 `[N]`, the log of each row's sum of exponentials.
        targets, slopes: `[N, W]`, int64 and float32.
        per_cap: with it, the gradient before `tanh`: times `1 - (logits * per_cap)^2`.
        entropy: float32 `[N]` twice, each row's entropy and its own slope: the gradient is that of
            `sum(slope * entropy)` too.
    """
    rows, width = logits.shape
    blocks = triton.cdiv(width, _COLUMNS)
    out = torch.empty_like(logits, dtype=dtype)
    certain, rise = (lse, lse) if entropy is None else entropy
    _gradient[(rows * blocks,)](
        logits,
        lse,
        targets.contiguous(),
        slopes.contiguous(),
        slopes.sum(-1),
        certain.contiguous(),
        rise.contiguous(),
        out,
        width,
        blocks,
        per_cap or 0.0,
        COUNT=targets.shape[1],
        CAPPED=per_cap is not None,
        RISES=entropy is not None,
        BLOCK=_COLUMNS,
        num_warps=8,
    )
    return out


class _RmsNorm(torch.autograd.Function):
    """Keeps the input and 1 / rms of each row."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        out = torch.empty_like(rows)
        scale = rows.new_empty(len(rows), dtype=torch.float32)
        lines, tile = _tile(rows)
        _norm_forward[(triton.cdiv(len(rows), lines),)](
            rows,
            weight,
            out,
            scale,
            *rows.shape,
            epsilon,
            LINES=lines,
            BLOCK=tile // lines,
            num_warps=_warps(tile),
        )
        ctx.save_for_backward(hidden, weight, scale)
        return out.view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, scale = ctx.saved_tensors
        rows, grads = (
            states.reshape(-1, states.shape[-1]).contiguous() for states in (hidden, grad)
        )
        to_hidden = torch.empty_like(rows)
        lines, tile = _tile(rows)

        # Each program adds up its rows' share of the weight's gradient, and torch adds up the shares.
        programs = min(triton.cdiv(len(rows), lines), _programs(rows.device))
        shares = scale.new_empty(programs, rows.shape[1])
        _norm_backward[(programs,)](
            grads,
            rows,
            weight,
            scale,
            to_hidden,
            shares,
            *rows.shape,
            LINES=lines,
            BLOCK=tile // lines,
            num_warps=_warps(tile),
        )
        return to_hidden.view(hidden.shape), shares.sum(0).to(weight.dtype), None


class _SwiGlu(torch.autograd.Function):
    """Keeps the two inputs, and computes silu again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.contiguous()
        up = up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        _swiglu_forward[(triton.cdiv(gate.numel(), _ELEMENTS),)](
            gate, up, out, gate.numel(), BLOCK=_ELEMENTS
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        to_gate = torch.empty_like(gate)
        to_up = torch.empty_like(up)
        _swiglu_backward[(triton.cdiv(gate.numel(), _ELEMENTS),)](
            grad.contiguous(), gate, up, to_gate, to_up, gate.numel(), BLOCK=_ELEMENTS
        )
        return to_gate, to_up


class _Rotated(torch.autograd.Function):
    """Keeps the angles alone: its backward pass turns the gradient the other way."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos = cos.contiguous()
        sin = sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _rotate(states, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, back=True), None, None


def _rotate(states: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """Returns `states [B, H, S, D]` turned by the angles, or with `back` turned the other way."""
    # Token by token, which is how the projections have written them.
    tokens = states.transpose(1, 2).contiguous()
    out = torch.empty_like(tokens)
    *rows, heads, width = tokens.shape
    block = triton.next_power_of_2(heads)
    half = triton.next_power_of_2(width // 2)
    _rotation[(rows[0] * rows[1],)](
        tokens,
        cos,
        sin,
        out,
        cos.shape[0] * cos.shape[1],
        heads,
        width // 2,
        BACK=back,
        HEADS=block,
        BLOCK=half,
        num_warps=_warps(block * half),
        enable_fp_fusion=False,
    )
    return out.transpose(1, 2)


def _tile(rows: Tensor) -> tuple[int, int]:
    """Returns how many rows a program takes at a time, and the numbers in them, both powers of two."""
    block = triton.next_power_of_2(rows.shape[1])
    lines = max(1, _LEAST_TILE // block)
    return lines, lines * block


def _warps(tile: int) -> int:
    """Returns the warps, of 32 threads each, for a program that works on so many numbers."""
    return min(16, max(4, tile // 512))


@cache
def _programs(device: torch.device) -> int:
    """Returns how many programs add up a gradient: enough to fill the GPU, and always as many, since their number
    decides the order of the sum."""
    if device.type != "cuda":
        return 3  # interpreted, in tests
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _wide(pointers, inside):
    """Reads numbers as float32, 0 outside."""
    return tl.load(pointers, inside, other=0.0).to(tl.float32)


@triton.jit
def _rounded(numbers, dtype: tl.constexpr):
    """Rounds float32 numbers to `dtype`, as torch does between two operations, and gives them back as float32."""
    return numbers.to(dtype).to(tl.float32)


@triton.jit
def _norm_forward(
    hidden,
    weight,
    out,
    scale,
    rows,
    width,
    epsilon,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norms LINES rows of `hidden [rows, width]` into `out`; `scale [rows]` gets 1 / rms of each."""
    dtype: tl.constexpr = out.dtype.element_ty
    lines = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    columns = tl.arange(0, BLOCK)
    inside = (lines < rows)[:, None] & (columns < width)[None, :]
    places = lines[:, None] * width + columns[None, :]

    states = _wide(hidden + places, inside)
    weights = _wide(weight + columns, columns < width)
    inverse = tl.rsqrt(tl.sum(states * states, 1) / width + epsilon)
    normed = _rounded(states * inverse[:, None], dtype)
    tl.store(out + places, (normed * weights[None, :]).to(dtype), inside)
    tl.store(scale + lines, inverse, lines < rows)


@triton.jit
def _norm_backward(
    grad,
    hidden,
    weight,
    scale,
    to_hidden,
    shares,
    rows,
    width,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Takes every `num_programs`-th block of LINES rows; `shares [programs, width]` gets its sum for the weight."""
    dtype: tl.constexpr = to_hidden.dtype.element_ty
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    weights = _wide(weight + columns, columns < width)
    share = tl.zeros([LINES, BLOCK], tl.float32)
    start = program * LINES

    while start < rows:
        lines = (start + tl.arange(0, LINES)).to(tl.int64)
        inside = (lines < rows)[:, None] & (columns < width)[None, :]
        places = lines[:, None] * width + columns[None, :]
        grads = _wide(grad + places, inside)
        states = _wide(hidden + places, inside)
        inverse = tl.load(scale + lines, lines < rows, other=0.0)[:, None]

        normed = states * inverse
        share += normed * grads
        inner = _rounded(grads * weights[None, :], dtype)
        along = (tl.sum(inner * normed, 1) / width)[:, None]
        tl.store(to_hidden + places, ((inner - normed * along) * inverse).to(dtype), inside)
        start += tl.num_programs(0) * LINES

    tl.store(shares + program.to(tl.int64) * width + columns, tl.sum(share, 0), columns < width)


@triton.jit
def _swiglu_forward(
    gate,
    up,
    out,
    size,
    BLOCK: tl.constexpr,
):
    """Multiplies BLOCK of `size` numbers: `silu(gate) * up`."""
    dtype: tl.constexpr = out.dtype.element_ty
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    gates = _wide(gate + places, inside)
    ups = _wide(up + places, inside)

    silu = _rounded(gates / (1 + tl.exp(-gates)), dtype)
    tl.store(out + places, (silu * ups).to(dtype), inside)


@triton.jit
def _swiglu_backward(
    grad,
    gate,
    up,
    to_gate,
    to_up,
    size,
    BLOCK: tl.constexpr,
):
    """Gives BLOCK of `size` numbers their two gradients; d silu(x) = sigmoid(x) (1 + x (1 - sigmoid(x)))."""
    dtype: tl.constexpr = to_up.dtype.element_ty
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    grads = _wide(grad + places, inside)
    gates = _wide(gate + places, inside)
    ups = _wide(up + places, inside)

    sigmoid = 1 / (1 + tl.exp(-gates))
    silu = _rounded(gates / (1 + tl.exp(-gates)), dtype)
    tl.store(to_up + places, (silu * grads).to(dtype), inside)

    inner = _rounded(grads * ups, dtype)
    slope = sigmoid * (1 + gates * (1 - sigmoid))
    tl.store(to_gate + places, (inner * slope).to(dtype), inside)


@triton.jit
def _rotation(
    states,
    cos,
    sin,
    out,
    period,
    heads,
    half,
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Turns one token of `states [tokens, heads, 2 * half]` by its angles; BACK turns it the other way.

    Angles are `[period, 2 * half]`, of `period` tokens that come again and again.
    """
    token = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = out.dtype.element_ty
    lines = tl.arange(0, HEADS)
    columns = tl.arange(0, BLOCK)
    across = columns < half

    angles = (token % period) * 2 * half + columns
    cos_left = _wide(cos + angles, across)[None, :]
    cos_right = _wide(cos + angles + half, across)[None, :]
    sin_left = _wide(sin + angles, across)[None, :]
    sin_right = _wide(sin + angles + half, across)[None, :]

    inside = (lines < heads)[:, None] & across[None, :]
    places = (token * heads + lines)[:, None] * 2 * half + columns[None, :]
    left = _wide(states + places, inside)
    right = _wide(states + places + half, inside)

    # Each product is rounded before the sum.
    if BACK:
        to_left = _rounded(right * sin_right, dtype)
        to_right = -_rounded(left * sin_left, dtype)
    else:
        to_left = -_rounded(right * sin_left, dtype)
        to_right = _rounded(left * sin_right, dtype)
    tl.store(out + places, (_rounded(left * cos_left, dtype) + to_left).to(dtype), inside)
    tl.store(out + places + half, (_rounded(right * cos_right, dtype) + to_right).to(dtype), inside)


@triton.jit
def _statistics(
    logits,
    largest,
    log_total,
    entropy,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reads one row of `logits [rows, WIDTH]` once, and writes its three numbers."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    # Each of BLOCK columns has a maximum of its own on the way, so that nothing waits for the others.
    most = tl.full([BLOCK], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)  # sum of e^(x - most)
    # sum of (x - most) e^(x - most): terms of one sign, nothing cancels
    weighted = tl.zeros([BLOCK], tl.float32)

    for start in range(0, WIDTH, BLOCK):
        places = start + columns
        value = tl.load(logits + row * WIDTH + places, places < WIDTH, other=_LOWEST)
        gap = value - most
        ratio = tl.exp(-tl.abs(gap))
        higher = gap > 0

        # Where a new maximum comes, the sums are scaled down to it.
        weighted = tl.where(higher, ratio * (weighted - gap * total), weighted + gap * ratio)
        total = tl.where(higher, ratio * total + 1, total + ratio)
        most = tl.where(higher, value, most)

    # One row of all columns: each is scaled down to the row's maximum.
    top = tl.max(most, 0)
    gap = most - top
    ratio = tl.exp(gap)
    whole = tl.sum(ratio * total, 0)
    logarithm = tl.log(whole)

    tl.store(largest + row, top)
    tl.store(log_total + row, logarithm)
    tl.store(entropy + row, logarithm - tl.sum(ratio * (weighted + gap * total), 0) / whole)


@triton.jit
def _gradient(
    logits,
    lse,
    targets,
    slopes,
    together,
    entropies,
    rises,
    out,
    width,
    blocks,
    per_cap,
    COUNT: tl.constexpr,
    CAPPED: tl.constexpr,
    RISES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes BLOCK columns of a row's gradient, of `blocks` such pieces a row.

    `targets` and `slopes` are `[rows, COUNT]`; `together [rows]` has the sum of each row's slopes. With RISES
    `entropies` and `rises` are `[rows]`: what the gradient of a row's entropy H is multiplied by.
    """
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    columns = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(logits + row * width + columns, inside, other=0.0)

    # d log p / d logits = onehot - softmax
    log_p = value - tl.load(lse + row)
    grad = -tl.load(together + row) * tl.exp(log_p)
    if RISES:  # d H / d logits = -p (log p + H)
        grad -= tl.load(rises + row) * tl.exp(log_p) * (log_p + tl.load(entropies + row))
    for number in range(COUNT):
        target = tl.load(targets + row * COUNT + number).to(tl.int32)
        grad += tl.where(columns == target, tl.load(slopes + row * COUNT + number), 0.0)

    if CAPPED:  # d tanh(x) = 1 - tanh(x)^2
        grad *= 1 - (value * per_cap) * (value * per_cap)
    tl.store(out + row * width + columns, grad.to(out.dtype.element_ty), inside)
