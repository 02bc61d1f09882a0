"""The embedded engine with the bits of the trainer's forward passes (`--batch_invariant true`).

Prompts are read as the trainer reads them, packed in one row. From then on every row has its own keys and values, each at
the token's place in its sequence, since `models/invariant.py` takes them in blocks by these places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from swift_r1.errors import UsageError
from swift_r1.models import invariant
from swift_r1.models.attention import Segment, packed_row, takes_packed_rows
from swift_r1.models.logprobs import chunk_logits, logprobs_of
from swift_r1.models.multimodal import decoder_of
from swift_r1.models.policy import logit_form
from swift_r1.models.vision import PromptWithImages
from swift_r1.models.weights import output_head
from swift_r1.serving.engines.decoding import attending_by, shares_prompts
from swift_r1.serving.engines.transformers import TransformersEngine
from swift_r1.wire.protocol import SamplingParams

_NAME = "swift_r1_placed"
_BY_LENGTH = ("dynamic", "longrope")
"""Rotary positions whose frequencies are those of the longest sequence in the batch."""


class InvariantEngine(TransformersEngine):
    """Generates with `model`, while `invariant_forward` is open. Raises UsageError: for a model that attends in other
    ways, or reads images."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        vision: Any = None,
    ) -> None:
        super().__init__(model, tokenizer, eos_token_ids, pad_token_id, vision)
        why = ""
        if vision is not None:
            why = "rows have images"
        elif not takes_packed_rows(model) or not shares_prompts(model):
            why = f"{type(model).__name__} has layers or attention of another kind than those that are proven"
        elif any(kind in str(getattr(self.config, "rope_parameters", "")) for kind in _BY_LENGTH):
            why = f"{type(model).__name__} turns positions by the longest sequence that is computed"
        if why:
            raise UsageError(f"--batch_invariant true: {why}")

    @property
    def _shares(self) -> bool:
        return False

    def _read_prompts(
        self, prompts: list[PromptWithImages], room: int
    ) -> tuple[Tensor, PlacedCache]:
        different = list(dict.fromkeys(prompts))
        lengths = [len(prompt.token_ids) for prompt in different]
        device = self.model.device
        token_ids = torch.tensor([[one for prompt in different for one in prompt.token_ids]])
        row = packed_row([Segment(length) for length in lengths], device)
        places = torch.cat([torch.arange(length) for length in lengths])
        cache = PlacedCache(self.config.num_hidden_layers)
        states = self._states(token_ids, places[None], cache, packed_row=row, sequence=None)
        where = {prompt: number for number, prompt in enumerate(different)}
        of = [where[prompt] for prompt in prompts]
        cache.begin(lengths, of, room)
        last = torch.tensor(lengths).cumsum(0) - 1
        return self._logits(states[0, last])[of], cache

    def _next_logits(self, tokens: Tensor, state: PlacedCache) -> Tensor:
        with attending_by(self.model, _NAME):
            states = self._states(tokens[:, None], state.ends[:, None], state)
        state.ends += 1
        return self._logits(states[:, 0])

    def _states(
        self, token_ids: Tensor, positions: Tensor, cache: PlacedCache, **more: Any
    ) -> Tensor:
        """Returns the last hidden states `[R, S, hidden]`."""
        mask = token_ids.new_zeros(1, 1, 1, 1, dtype=torch.bool)  # as it is: none is made
        states: Tensor = decoder_of(self.model)(
            input_ids=token_ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            **more,
        ).last_hidden_state
        return states

    def _logits(self, states: Tensor) -> Tensor:
        head: Any = output_head(self.model)
        form = logit_form(self.model.config)
        return chunk_logits(states, head.weight, getattr(head, "bias", None), form, 1.0)

    def _sample(
        self, logits: Tensor, uniforms: Tensor, sampling: SamplingParams, seen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        heat = sampling.temperature or 1.0
        tokens, chosen = super()._sample(logits, uniforms, sampling, seen)
        if seen is None and sampling.min_p == 0 and sampling.top_k <= 0 and sampling.top_p == 1:
            chosen = logprobs_of(logits if heat == 1 else logits / heat, tokens)
        return tokens, chosen


class PlacedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call] # its __init_subclass__ has no types
    """One layer's keys and values `[B, KV, T, D]`, zero where no token is yet; of the prompts first as a packed row has
    them, `[1, KV, S, D]`."""

    keys: Tensor
    values: Tensor
    ends: Tensor | None

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # transformers has no types here
        self.ends = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = key_states
        self.values = value_states
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.ends is None:
            self.lazy_initialization(key_states, value_states)
            return key_states, value_states
        rows = torch.arange(len(self.ends))
        self.keys[rows, :, self.ends] = key_states[:, :, 0]
        self.values[rows, :, self.ends] = value_states[:, :, 0]
        keys = self.keys[:]
        keys.ends = self.ends  # type: ignore[attr-defined]  # for `placed_attention`
        return keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return 0 if self.ends is None else int(self.ends.max())

    def get_max_length(self) -> int:
        return -1


class PlacedCache(Cache):
    """A `PlacedLayer` each for so many layers, and where in its row each sequence's next token goes: `ends`, int64
    `[B]`."""

    ends: Tensor

    def __init__(self, count: int) -> None:
        super().__init__(layers=[PlacedLayer() for _ in range(count)])

    def begin(self, lengths: Sequence[int], of: Sequence[int], room: int) -> None:
        """Gives each row, which continues the prompt of this number, its own copy and room for `room` tokens more;
        `lengths` are the prompts'."""
        self.ends = torch.tensor([lengths[one] for one in of])
        whole = invariant.whole_blocks(max(lengths) + room)
        starts = [sum(lengths[:one]) for one in range(len(lengths))]
        for layer in self._placed():
            packed = (layer.keys, layer.values)
            layer.keys, layer.values = (
                side.new_zeros(len(of), side.shape[1], whole, side.shape[3]) for side in packed
            )
            for held, side in zip((layer.keys, layer.values), packed, strict=True):
                for row, prompt in enumerate(of):
                    own = slice(starts[prompt], starts[prompt] + lengths[prompt])
                    held[row, :, : lengths[prompt]] = side[0, :, own]
            layer.ends = self.ends

    def select_rows(self, rows: Tensor) -> None:
        """Keeps the rows `[B']`."""
        self.ends = self.ends[rows]
        for layer in self._placed():
            layer.keys = layer.keys[rows]
            layer.values = layer.values[rows]
            layer.ends = self.ends

    def bytes_per_token(self) -> int:
        held = [side for layer in self._placed() for side in (layer.keys, layer.values)]
        return sum(side.shape[1] * side.shape[3] * side.itemsize for side in held)

    def _placed(self) -> list[PlacedLayer]:
        return [layer for layer in self.layers if isinstance(layer, PlacedLayer)]


def placed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes `[B, 1, H, V]` of `query [B, H, 1, D]`, with keys and values as a `PlacedLayer` gave them. Raises
    UsageError: the model made others of them."""
    ends = getattr(key, "ends", None)
    if ends is None:
        raise UsageError(
            f"--batch_invariant true: {type(module).__name__} changes the keys that its cache holds"
        )
    rows = query.transpose(1, 2)
    return invariant.attention(rows, key, value, ends[:, None], scaling, sliding_window), None


AttentionInterface.register(_NAME, placed_attention)
