"""A key-value cache for decoding many completions at once: appended in place, rows dropped when they end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, get_layer_types_and_kwargs

from swift_r1.errors import UsageError

_GROWTH_TOKENS = 64
_ATTENDING = {"full_attention", "sliding_attention"}
_OTHERS = {"linear_attention", "conv"}
"""Layers with a state of one size in place of keys and values, for which transformers' own cache serves."""


class AppendLayer(CacheLayerMixin):
    """Keys and values `[B, H, capacity, D]` of which the first `length` positions are filled.

    transformers' own dynamic layer copies everything for each new token; this one writes the token in place
    and hands out views. Those of a sliding window are all kept: attention leaves out what is too far back.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
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
            self.keys = self._grown(self.keys, capacity)
            self.values = self._grown(self.values, capacity)
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
        # Only what is filled is worth copying.
        self.keys = self.keys[:, :, : self.length].index_select(0, rows)
        self.values = self.values[:, :, : self.length].index_select(0, rows)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


class AppendCache(Cache):
    """An `AppendLayer` for each layer that attends; transformers' own for one that keeps a state instead.

    Args:
        config: of a text model that `check_layers` accepts.
    """

    def __init__(self, config: Any) -> None:
        own = zip(get_layer_types_and_kwargs(config)[0], DynamicCache(config=config).layers, strict=True)
        super().__init__(layers=[AppendLayer() if kind in _ATTENDING else layer for kind, layer in own])

    def select_rows(self, rows: Tensor) -> None:
        self.reorder_cache(rows)

    def bytes_a_token(self) -> int:
        """Of one row, for each token that attention reads; what the layers hold now tells it."""
        held = [side for layer in self.layers if isinstance(layer, AppendLayer) for side in (layer.keys, layer.values)]
        return sum(side.shape[1] * side.shape[3] * side.itemsize for side in held)


def other_layers(config: Any) -> list[str]:
    """The kinds of a text model's layers that do anything but attend to what is before them, or to a window of it."""
    return sorted(set(get_layer_types_and_kwargs(config)[0]) - _ATTENDING)


def check_layers(config: Any) -> None:
    """Refuses a text model some of whose layers keep what no cache here holds.

    Raises:
        UsageError: naming them.
    """
    if unknown := [kind for kind in other_layers(config) if kind not in _OTHERS]:
        raise UsageError(
            f"the embedded engine has no cache for the {', '.join(unknown)} layers of {config.model_type}; use `swift "
            "rollout` with --use_vllm true"
        )


def left_padded(prompts: list[tuple[int, ...]], pad_token_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts side by side: `token_ids [B, P]` int64 padded on the left, `lengths [B]`."""
    width = max(map(len, prompts))
    rows = [[pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    return torch.tensor(rows, device=device), torch.tensor([len(prompt) for prompt in prompts], device=device)
