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

from swift_r1.inference.engines.kv_cache import other_layers

_NAME = "swift_r1_decode"


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`query [B, H, 1, D]`; `key [B, KV, T, D]`, `value [B, KV, T, V]`; bool mask `[B, 1, 1, T]` or None ->
    `[B, 1, H, V]`. The last `sliding_window` tokens are seen, the new one among them."""
    batch, heads, length, width = query.shape
    if length > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if sliding_window is not None:
        key, value = key[:, :, -sliding_window:], value[:, :, -sliding_window:]
        attention_mask = None if attention_mask is None else attention_mask[..., -sliding_window:]
    shared = key.shape[1]
    scores = torch.matmul(query.reshape(batch, shared, heads // shared, width), key.transpose(-1, -2))
    scores = scores.float() * (width**-0.5 if scaling is None else scaling)
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, float("-inf"))
    weights = scores.softmax(-1).to(query.dtype)
    return torch.matmul(weights, value).view(batch, 1, heads, value.shape[-1]), None


AttentionInterface.register(_NAME, decode_attention)


@contextmanager
def decoding(model: nn.Module) -> Iterator[bool]:
    """Uses `decode_attention` where every layer can, which the context tells: those take one mask `[B, 1, 1, T]`.

    Others keep their own attention (one that takes other masks than SDPA's, layers that do not attend), and make masks
    of what is padding, `[B, T]`.
    """
    config = model.config.get_text_config()
    before = config._attn_implementation
    takes = ALL_MASK_ATTENTION_FUNCTIONS.get(before) is ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] and not other_layers(
        config
    )
    if takes:
        config._attn_implementation = _NAME
    try:
        yield takes
    finally:
        config._attn_implementation = before
