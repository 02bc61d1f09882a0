"""Attention for one new token a row, without repeating keys for the query heads that share them.

transformers' SDPA path repeats keys and values wherever there is a mask. Here the query heads of a key head
become the rows of one matrix product, so keys and values are read once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

_NAME = "swift_r1_decode"


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`query [B, H, 1, D]`; `key`, `value [B, KV, T, D]`; bool mask `[B, 1, 1, T]` or None -> `[B, 1, H, D]`."""
    batch, heads, length, width = query.shape
    if length > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    shared = key.shape[1]
    scores = torch.matmul(query.reshape(batch, shared, heads // shared, width), key.transpose(-1, -2))
    scores = scores.float() * (width**-0.5 if scaling is None else scaling)
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, float("-inf"))
    weights = scores.softmax(-1).to(query.dtype)
    return torch.matmul(weights, value).view(batch, 1, heads, width), None


AttentionInterface.register(_NAME, decode_attention)


@contextmanager
def decoding(model: nn.Module) -> Iterator[None]:
    """Uses `decode_attention` in a model whose attention takes SDPA's masks; others keep their own."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    if ALL_MASK_ATTENTION_FUNCTIONS.get(before) is not ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]:
        yield
        return
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before
