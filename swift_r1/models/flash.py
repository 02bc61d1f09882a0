"""A packed row's attention by torch's own FlashAttention (arXiv 2307.08691), which a GPU has for 16-bit heads.

Every query meets its own sequence in one call for the whole row, and completions meet their prompt in a second one. The
softmax is put together from what each call says of its part: nothing is copied or padded, and there are two calls
however many groups there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor


def takes(query: Tensor, value: Tensor, length: int, window: int | None) -> bool:
    """Whether the kernel computes heads `[.., D]` and `[.., V]` of sequences of `length` tokens, of which each sees
    `window` (None: all)."""
    near = window is not None and window < length
    fits = query.dtype in (torch.float16, torch.bfloat16) and not near and _fits(query, value)
    return fits and query.is_cuda and _has_kernel(query.device)


@cache
def _has_kernel(device: torch.device) -> bool:
    """Whether torch is built with it, and the GPU is of Ampere's generation or a later one."""
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def _fits(query: Tensor, value: Tensor) -> bool:
    width = query.shape[-1]
    return width == value.shape[-1] and width % 8 == 0 and width <= 256


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy of values on a CPU that nothing waits for."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


class SequenceBounds(NamedTuple):
    """Which tokens of a row are sequences, for one call: int32, where each begins and the last ends, on the device."""

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int

    @staticmethod
    def of(queries: Sequence[int], keys: Sequence[int], device: torch.device) -> SequenceBounds:
        """Returns those of sequences with so many queries and keys each; none of either is fine."""
        ends = torch.tensor([list(accumulate(lengths, initial=0)) for lengths in (queries, keys)], dtype=torch.int32)
        starts = on_device(ends, device)
        # For one query each the kernel has a way of its own, in which no sequence may be without one.
        return SequenceBounds(starts[0], starts[1], max(2, *queries), max(keys))


class RowSpans(NamedTuple):
    own: SequenceBounds  # prompts and completions, each a sequence
    # Of each group its completions' queries with its prompt's keys, as one sequence, since every query meets all of
    # them; before it the prompt's queries without keys, behind it the completions' keys without queries. None where no
    # prompt is shared.
    far: SequenceBounds | None

    @staticmethod
    def of(groups: Sequence[tuple[int, Sequence[int]]], device: torch.device) -> RowSpans:
        """Returns those of a row, from the lengths of its prompts and of the completions of each."""
        own = [length for prompt, lengths in groups for length in (prompt, *lengths)]
        queries = [length for prompt, lengths in groups for length in (prompt, sum(lengths), 0)]
        keys = [length for prompt, lengths in groups for length in (0, prompt, sum(lengths))]
        shares = any(sum(lengths) for _, lengths in groups)
        return RowSpans(
            SequenceBounds.of(own, own, device), SequenceBounds.of(queries, keys, device) if shares else None
        )


def row_attention(query: Tensor, key: Tensor, value: Tensor, spans: RowSpans, scaling: float | None) -> Tensor:
    """`query [S, H, D]`, `key` and `value [S, KV, D]` of a packed row, to `[S, H, D]`."""
    apply: Callable[..., Tensor] = _RowAttention.apply
    return apply(query, key, value, spans, scaling)


class _RowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, spans: RowSpans, scaling: float | None) -> Tensor:
        out, lse, *state = _forward(query, key, value, spans.own, True, scaling)
        if spans.far is not None:
            far, far_lse, *_ = _forward(query, key, value, spans.far, False, scaling)
            # The kernel says infinity where a query meets no key, and its output is zero there.
            far_lse.masked_fill_(far_lse == math.inf, -math.inf)
            # softmax over both = each one's, weighted by its share of the sum of exponentials
            both = torch.logaddexp(lse, far_lse)
            own_share, far_share = ((one - both).exp().t()[:, :, None] for one in (lse, far_lse))
            out = torch.addcmul(out * own_share, far, far_share).to(out.dtype)
            lse = both
        ctx.save_for_backward(query, key, value, out, lse, *state)
        ctx.spans = spans
        ctx.scaling = scaling
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grad = grad.contiguous()
        # With the whole softmax's `out` and `lse`, each part of the keys gives its own share of the gradient.
        grads = _backward(grad, *saved, spans=ctx.spans.own, causal=True, scaling=ctx.scaling)
        if ctx.spans.far is not None:
            for whole, part in zip(
                grads, _backward(grad, *saved, spans=ctx.spans.far, causal=False, scaling=ctx.scaling), strict=True
            ):
                whole += part
        return *grads, None, None


def _forward(
    query: Tensor, key: Tensor, value: Tensor, spans: SequenceBounds, causal: bool, scaling: float | None
) -> tuple[Tensor, ...]:
    """The output `[S, H, D]`, the log of the sum of exponentials (float32 `[H, S]`), and the kernel's own state."""
    out, lse, rng, unused, _ = torch.ops.aten._flash_attention_forward(
        query, key, value, *spans, 0.0, causal, False, scale=scaling
    )
    return out, lse, rng, unused


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *state: Tensor,
    spans: SequenceBounds,
    causal: bool,
    scaling: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad, query, key, value, out, lse, *spans, 0.0, causal, *state, scale=scaling
    )
    return found
