"""A key-value cache for decoding many completions at once: appended in place, rows dropped when they end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_GROWTH_TOKENS = 64


class AppendLayer(CacheLayerMixin):
    """Keys and values `[B, H, capacity, D]` of which the first `length` positions are filled.

    transformers' own dynamic layer copies everything for each new token; this one writes the token in place
    and hands out views.
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

    def select_rows(self, rows: Tensor) -> None:
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
    """One `AppendLayer` a transformer layer; full attention only."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[AppendLayer() for _ in range(num_layers)])

    def select_rows(self, rows: Tensor) -> None:
        for layer in self.layers:
            layer.select_rows(rows)


def left_padded(prompts: list[tuple[int, ...]], pad_token_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts side by side: `token_ids [B, P]` int64 padded on the left, `lengths [B]`."""
    width = max(map(len, prompts))
    rows = [[pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    return torch.tensor(rows, device=device), torch.tensor([len(prompt) for prompt in prompts], device=device)
