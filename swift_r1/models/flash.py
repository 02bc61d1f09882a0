"""A group's attention by torch's own FlashAttention (arXiv 2307.08691), which a GPU has for 16-bit heads.

A completion's queries meet their own sequence and their prompt in two calls, and the softmax is put together from what
each call says of its part: nothing is copied or padded. Where every query of the group meets the prompt, the group's
completions are one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

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


def group_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor,
    after: Tensor | None,
    prompt_length: int,
    longest: int,
    scaling: float | None,
) -> Tensor:
    """`query [L, H, D]`, `key` and `value [L, KV, D]` of a prompt and its completions, one after another, to
    `[L, H, D]`.

    Args:
        spans: int32 `[n + 2]`, where the prompt and each completion begin, and the last ends.
        after: int32 `[2]`, 0 and the tokens of all completions; None where there are none.
        longest: tokens of the longest of them.
    """
    apply: Callable[..., Tensor] = _GroupAttention.apply
    return apply(query, key, value, spans, after, prompt_length, longest, scaling)


class _GroupAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        spans: Tensor,
        after: Tensor | None,
        prompt: int,
        longest: int,
        scaling: float | None,
    ) -> Tensor:
        out, lse, *state = _forward(query, key, value, spans, spans, longest, longest, True, scaling)
        if after is not None:
            rest = query.shape[0] - prompt
            far, far_lse, *_ = _forward(
                query[prompt:], key[:prompt], value[:prompt], after, spans[:2], rest, prompt, False, scaling
            )
            # softmax over both = each one's, weighted by its share of the sum of exponentials
            both = torch.logaddexp(lse[:, prompt:], far_lse)
            shares = ((one - both).exp().t()[:, :, None] for one in (lse[:, prompt:], far_lse))
            out[prompt:] = sum(share * part for share, part in zip(shares, (out[prompt:], far), strict=True))
            lse[:, prompt:] = both
        ctx.save_for_backward(query, key, value, out, lse, spans, after, *state)
        ctx.numbers = prompt, longest, scaling
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, spans, after, *state = ctx.saved_tensors
        prompt, longest, scaling = ctx.numbers
        grad = grad.contiguous()
        # With the whole softmax's `out` and `lse`, each part of the keys gives its own share of the gradient.
        grads = _backward(grad, query, key, value, out, lse, spans, spans, longest, longest, True, state, scaling)
        if after is not None:
            rest = query.shape[0] - prompt
            parts = (query[prompt:], key[:prompt], value[:prompt], out[prompt:], lse[:, prompt:].contiguous())
            far = _backward(grad[prompt:], *parts, after, spans[:2], rest, prompt, False, state, scaling)
            for whole, part, place in zip(grads, far, (slice(prompt, None), slice(prompt), slice(prompt)), strict=True):
                whole[place] += part
        return *grads, *(None,) * 5


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Tensor,
    keys: Tensor,
    most_queries: int,
    most_keys: int,
    causal: bool,
    scaling: float | None,
) -> tuple[Tensor, ...]:
    """The output `[L, H, D]`, the log of the sum of exponentials (float32 `[H, L]`), and the kernel's own state."""
    out, lse, rng, unused, _ = torch.ops.aten._flash_attention_forward(
        query, key, value, queries, keys, most_queries, most_keys, 0.0, causal, False, scale=scaling
    )
    return out, lse, rng, unused


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    queries: Tensor,
    keys: Tensor,
    most_queries: int,
    most_keys: int,
    causal: bool,
    state: list[Tensor],
    scaling: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        *(grad, query, key, value, out, lse, queries, keys, most_queries, most_keys, 0.0, causal, *state), scale=scaling
    )
    return found
