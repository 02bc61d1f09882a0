"""Decoding many completions at once: a cache that appends in place, attention for one new token per row, sampling."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, get_layer_types_and_kwargs
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from swift_r1.errors import UsageError
from swift_r1.wire.protocol import SamplingParams

_NAME = "swift_r1_decode"
_GROWTH_TOKENS = 64
_ATTENDING = {"full_attention", "sliding_attention"}
_STATEFUL = {"linear_attention", "conv"}  # with a state of fixed size in place of keys and values


class AppendLayer(CacheLayerMixin):  # type: ignore[no-untyped-call] # its __init_subclass__ has no types
    """Keys and values `[B, H, capacity, D]`, of which the first `length` positions are filled. transformers' own
    dynamic layer copies everything for each new token; this one writes in place. Those of a sliding window are all
    kept."""

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # transformers has no types here
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = key_states.new_empty((*key_states.shape[:2], 0, key_states.shape[3]))
        self.values = value_states.new_empty((*value_states.shape[:2], 0, value_states.shape[3]))
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        if end > self.keys.shape[2]:
            capacity = max(end, self.keys.shape[2] * 3 // 2) + _GROWTH_TOKENS
            self.keys, self.values = self._grown(self.keys, capacity), self._grown(self.values, capacity)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _grown(self, old: Tensor, capacity: int) -> Tensor:
        new = old.new_empty((*old.shape[:2], capacity, old.shape[3]))
        new[:, :, : self.length] = old[:, :, : self.length]
        return new

    def reorder_cache(self, rows: Tensor) -> None:
        """Keeps (or repeats) the given batch rows, `rows` int64 `[B']`."""
        self.keys = self.keys[:, :, : self.length].index_select(0, rows)
        self.values = self.values[:, :, : self.length].index_select(0, rows)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


class AppendCache(Cache):
    """An `AppendLayer` for each layer that attends; transformers' own for one that keeps a state instead. `config` is
    of a text model that `check_layers` accepts."""

    def __init__(self, config: PreTrainedConfig) -> None:
        own = zip(get_layer_types_and_kwargs(config)[0], DynamicCache(config=config).layers, strict=True)
        super().__init__(layers=[AppendLayer() if kind in _ATTENDING else layer for kind, layer in own])

    def bytes_per_token(self) -> int:
        """Of one row, for each token that attention reads; known once a token was read."""
        held = [side for layer in self.layers if isinstance(layer, AppendLayer) for side in (layer.keys, layer.values)]
        return sum(side.shape[1] * side.shape[3] * side.itemsize for side in held)


def other_layers(config: PreTrainedConfig) -> list[str]:
    """The kinds of a text model's layers that do more than attend to what precedes them, or to a window of it."""
    return sorted(set(get_layer_types_and_kwargs(config)[0]) - _ATTENDING)


def check_layers(config: PreTrainedConfig) -> None:
    """Raises UsageError for a text model with layers that no cache here can serve."""
    if unknown := [kind for kind in other_layers(config) if kind not in _STATEFUL]:
        raise UsageError(
            f"the embedded engine has no cache for the {', '.join(unknown)} layers of {config.model_type}; use `swift "
            "rollout` with --use_vllm true"
        )


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
    `[B, 1, H, V]`. The last `sliding_window` tokens are seen, the new one among them.

    transformers' SDPA path repeats keys and values where there is a mask. Here the query heads of a key head become the
    rows of one matrix product.
    """
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
def decoding(model: PreTrainedModel) -> Iterator[bool]:
    """Uses `decode_attention` where every layer can; yields whether: masks are then `[B, 1, 1, T]`. Other models make
    masks from the padding, `[B, T]`."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    sdpa_masks = ALL_MASK_ATTENTION_FUNCTIONS.get(before) is ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    takes = sdpa_masks and not other_layers(config)
    if takes:
        config._attn_implementation = _NAME
    try:
        yield takes
    finally:
        config._attn_implementation = before


def uniform_streams(seeds: Sequence[int], length: int) -> Tensor:
    """`[B, length]` float32 uniforms in [0, 1); row b depends on `seeds[b]` alone."""
    rows = torch.empty(len(seeds), length)
    generator = torch.Generator()
    for row, seed in zip(rows, seeds, strict=True):
        generator.manual_seed(seed)
        row.uniform_(generator=generator)
    return rows


def sample(
    logits: Tensor, uniforms: Tensor, sampling: SamplingParams, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draws one token per row of `logits [B, V]` by inverting the cumulative distribution at `uniforms [B]` in [0, 1);
    temperature 0 takes the most likely token. `seen` bool `[B, V]` are the tokens that the penalty is for.

    Returns:
        `tokens [B]` int64 and `logprobs [B]` float32: natural logs under the distribution after penalty, temperature,
        min-p, top-k and top-p (greedy: at temperature 1, uncut).
    """
    logits = logits.float()
    if seen is not None:  # CTRL (arXiv 1909.05858): away from the token, whatever the logit's sign
        penalty = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if sampling.temperature == 0.0:
        tokens = logits.argmax(-1)
        return tokens, logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    if sampling.min_p > 0:
        least = logits.amax(-1, keepdim=True) + math.log(sampling.min_p)
        logits = logits.masked_fill(logits < least, float("-inf"))
    if sampling.top_k > 0 or sampling.top_p < 1.0:
        logits = _nucleus(logits, sampling.top_k, sampling.top_p)
    logprobs = logits.log_softmax(-1)
    cumulative = logprobs.exp().cumsum(-1)
    # Scaled by the last entry, which rounding leaves a little off 1.
    tokens = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)
    tokens = tokens.clamp_(max=logits.shape[-1] - 1)
    return tokens.squeeze(-1), logprobs.gather(-1, tokens).squeeze(-1)


def _nucleus(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits outside the `top_k` largest, or outside the smallest set of mass `top_p`, become -inf."""
    ordered, order = logits.sort(-1, descending=True)
    drop = torch.zeros_like(ordered, dtype=torch.bool)
    if top_k > 0:
        drop[:, top_k:] = True
    if top_p < 1.0:
        probs = ordered.softmax(-1)
        drop |= probs.cumsum(-1) - probs >= top_p
    return logits.masked_fill(drop.scatter(-1, order, drop), float("-inf"))
