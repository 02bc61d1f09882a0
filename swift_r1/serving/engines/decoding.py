"""Decoding many completions at once: a cache that appends in place, attention for one new token per row, weights laid out
for products with few rows, sampling."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    get_layer_types_and_kwargs,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from swift_r1.errors import UsageError
from swift_r1.models import invariant
from swift_r1.models.attention import INDEXED
from swift_r1.wire.protocol import SamplingParams

_NAME = "swift_r1_decode"
# numbers of a weight; smaller ones are read so fast that laying them out gains nothing
_LEAST_PACKED = 100_000
_ROOM = 32  # tokens by which a layer's keys and values grow
_ATTENDING = {"full_attention", "sliding_attention"}
_AS_THEY_ARE = {"linear_attention", "conv", "hybrid", INDEXED}
"""Layers that keep something else than keys and values, or more, in a cache of transformers' own."""


class AppendLayer(CacheLayerMixin):  # type: ignore[no-untyped-call] # its __init_subclass__ has no types
    """One layer's keys and values. Those of the prompts, `[G, H, P, D]`, are held once for all rows of a group; what
    the rows write, `[B, H, room, D]`, is filled up to `length` in place, and zero behind that. Room grows by
    `_ROOM` tokens, and products read all of it: a part would be copied for each of them. Those of a sliding window are
    all kept."""

    keys: Tensor
    values: Tensor
    prompt: tuple[Tensor, Tensor] | None = None
    groups: Groups

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # transformers has no types here
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = key_states
        self.values = value_states
        self.length = key_states.shape[2]
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            return key_states, value_states
        start = self.length
        self.length = self.length + key_states.shape[2]
        if self.length > self.keys.shape[2]:
            self.keys, self.values = (
                pad(side, (0, 0, 0, _ROOM)) for side in (self.keys, self.values)
            )
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        if self.prompt is None:
            return self.keys[:, :, : self.length], self.values[:, :, : self.length]
        keys = self.keys[:]
        keys.layer = self  # type: ignore[attr-defined]  # for `decode_attention`
        return keys, self.values

    def begin(self, groups: Groups) -> None:
        """The prompts are read. With `groups.shared` false a row has its own copy of its prompt."""
        self.groups = groups
        if groups.shared:
            # Each token's products read them all, and would copy what does not lie together.
            self.prompt = self.keys.contiguous(), self.values.contiguous()
            self.length = 0
            self.keys, self.values = (
                side.new_zeros((len(groups.of), side.shape[1], 0, side.shape[3]))
                for side in self.prompt
            )
        else:
            self.keys = self.keys[groups.of]
            self.values = self.values[groups.of]

    def select(self, rows: Tensor, kept: Tensor, groups: Groups) -> None:
        """Keeps the rows `[B']` in place, and the prompts `kept`."""
        self.groups = groups
        for side in (self.keys, self.values):
            side[: len(rows), :, : self.length] = side[:, :, : self.length].index_select(0, rows)
        self.keys = self.keys[: len(rows)]
        self.values = self.values[: len(rows)]
        if self.prompt is not None and len(kept) < len(self.prompt[0]):
            self.prompt = self.prompt[0].index_select(0, kept), self.prompt[1].index_select(0, kept)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.length + (0 if self.prompt is None else self.prompt[0].shape[2])

    def get_max_length(self) -> int:
        return -1


class Groups:
    """Which prompt each row continues, and the rows as a rectangle `[G, n]`, a line a prompt."""

    def __init__(self, of: Tensor, shared: bool) -> None:
        """`of` int64 `[B]`, ascending, no number left out."""
        self.of = of
        self.shared = shared
        counts = of.bincount()
        self.shape = len(counts), int(counts.max())
        before = counts.cumsum(0) - counts
        self.places = of * self.shape[1] + torch.arange(len(of), device=of.device) - before[of]

    def times(self, rows: Tensor, of_prompt: Tensor) -> Tensor:
        """`rows [B, H, R, D] @ of_prompt [G, H, D, P]`, each row with its own prompt's: `[B, H, R, P]`."""
        lines, width = self.shape
        _, heads, queries, inner = rows.shape
        full = len(rows) == lines * width
        length = of_prompt.shape[-1]
        if not full:
            rows = rows.new_zeros(lines * width, heads, queries, inner).index_copy_(
                0, self.places, rows
            )
        grouped = rows.reshape(lines, width, heads, queries, inner).transpose(1, 2)
        out = torch.matmul(grouped.reshape(lines, heads, width * queries, inner), of_prompt)
        out = out.view(lines, heads, width, queries, length).transpose(1, 2)
        out = out.reshape(lines * width, heads, queries, length)
        return out if full else out.index_select(0, self.places)


class AppendCache(Cache):
    """An `AppendLayer` for each layer that attends and does nothing else; transformers' own for the others. `config` is
    of a text model that `check_layers` accepts."""

    def __init__(self, config: PreTrainedConfig) -> None:
        own = zip(
            get_layer_types_and_kwargs(config)[0], DynamicCache(config=config).layers, strict=True
        )
        super().__init__(
            layers=[AppendLayer() if kind in _ATTENDING else layer for kind, layer in own]
        )

    def begin(self, groups: Groups) -> None:
        for layer in self.layers:
            if isinstance(layer, AppendLayer):
                layer.begin(groups)
            else:
                layer.reorder_cache(cast(torch.LongTensor, groups.of))

    def select(self, rows: Tensor, kept: Tensor, groups: Groups) -> None:
        for layer in self.layers:
            if isinstance(layer, AppendLayer):
                layer.select(rows, kept, groups)
            else:
                layer.reorder_cache(cast(torch.LongTensor, rows))

    def bytes_per_token(self) -> int:
        """Returns the bytes of one row for each token that attention reads; known once a token was read."""
        held: list[Any] = []
        for layer in self.layers:
            if isinstance(layer, AppendLayer | DynamicLayer):
                held += [layer.keys, layer.values]
            if isinstance(layer, DynamicIndexedLayer) and layer.indexer_keys is not None:
                held.append(layer.indexer_keys[:, None])
        return sum(side.shape[1] * side.shape[3] * side.itemsize for side in held)


def other_layers(config: PreTrainedConfig) -> list[str]:
    """The kinds of a text model's layers that do more than attend to what precedes them, or to a window of it."""
    return sorted(set(get_layer_types_and_kwargs(config)[0]) - _ATTENDING)


def check_layers(config: PreTrainedConfig) -> None:
    """Raises UsageError for a text model with layers that no cache here can serve."""
    unknown = [kind for kind in other_layers(config) if kind not in _AS_THEY_ARE]
    if unknown:
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
    """`query [B, H, 1, D]`; `key [B, KV, T, D]`, `value [B, KV, T, V]` as an `AppendLayer` gave them, with its prompts
    before them and its room behind -> `[B, 1, H, V]`; bool mask over the prompts' padding `[B, 1, 1, P]`, or `[1, 1, 1,
    1]` where there is none. The last `sliding_window` tokens are seen, the new one among them.

    The query heads of a key head, and for the prompt those of all rows of a group, are the rows of one matrix product.

    Raises:
        UsageError: the model made other keys of those that the layer gave.
    """
    batch, heads, _, width = query.shape
    shared = key.shape[1]
    layer = getattr(key, "layer", None)
    if layer is None:
        raise UsageError(
            f"the embedded engine cannot serve {type(module).__name__}, which changes the keys that its cache holds; "
            "use `swift rollout` with --use_vllm true"
        )
    prompt_keys, prompt_values = layer.prompt
    written = layer.length
    lost = 0 if sliding_window is None else layer.get_seq_length() - sliding_window
    if lost > 0:
        own = max(0, lost - prompt_keys.shape[2])
        key = key[:, :, own:]
        value = value[:, :, own:]
        written -= own
        prompt_keys = prompt_keys[:, :, lost:]
        prompt_values = prompt_values[:, :, lost:]
        attention_mask = None if attention_mask is None else attention_mask[..., lost:]
    read = prompt_keys.shape[2]
    groups = layer.groups
    query = query.reshape(batch, shared, heads // shared, width)
    before = groups.times(query, prompt_keys.transpose(-1, -2))
    if attention_mask is not None and attention_mask.shape[-1] == read:
        before = before.masked_fill(~attention_mask, float("-inf"))
    after = torch.matmul(query, key.transpose(-1, -2))
    after[..., written:] = float("-inf")
    scores = torch.cat([before, after], dim=-1)
    weights = (
        (scores.float() * (width**-0.5 if scaling is None else scaling)).softmax(-1).to(query.dtype)
    )
    out = torch.matmul(weights[..., read:], value) + groups.times(
        weights[..., :read], prompt_values
    )
    return out.view(batch, 1, heads, value.shape[-1]), None


AttentionInterface.register(_NAME, decode_attention)


def shares_prompts(model: PreTrainedModel) -> bool:
    """Whether every layer can use `decode_attention`: not where latent attention expands what its cache holds. Other
    models make masks from the padding, `[B, T]`."""
    config = model.config.get_text_config()
    masks = ALL_MASK_ATTENTION_FUNCTIONS.get(config._attn_implementation)
    latent = getattr(config, "kv_lora_rank", None) is not None
    return masks is ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] and not latent and not other_layers(config)


@contextmanager
def decoding(model: PreTrainedModel, shared: bool) -> Iterator[None]:
    """Uses `decode_attention` if `shared`."""
    with attending_by(model, _NAME if shared else None):
        yield


@contextmanager
def attending_by(model: PreTrainedModel, attention: str | None) -> Iterator[None]:
    """Uses the attention of this name; None: the model's own."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = attention or before
    try:
        yield
    finally:
        config._attn_implementation = before


@contextmanager
def packed_weights(model: nn.Module, rows: int) -> Iterator[None]:
    """Has the linear layers multiply by copies of their weights that are laid out for products with about so many rows.

    On a CPU a product lays its weight out anew, which for few rows takes as long as the product itself. The copies are
    there until the end, so nothing may change the weights meanwhile.
    """
    packed: list[nn.Linear] = []
    for layer in model.modules():
        if type(layer) is nn.Linear and _packs(layer):
            weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight, rows)
            layer.forward = partial(_times_packed, weight, layer.bias)  # type: ignore[method-assign]
            packed.append(layer)
    try:
        yield
    finally:
        for layer in packed:
            del layer.forward


def _packs(layer: nn.Linear) -> bool:
    """Says whether a layer gets a copy of its weight: a large one on a CPU, in a dtype that oneDNN multiplies there, and
    without a function of its own in its place; not where the trainer's products are to have the same bits."""
    dtype = layer.weight.dtype
    multiplies = dtype == torch.float32 or (
        dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    on_cpu = layer.weight.device.type == "cpu" and torch._C._has_mkldnn
    free = "forward" not in layer.__dict__ and not invariant.is_on()
    return on_cpu and multiplies and free and layer.weight.numel() >= _LEAST_PACKED


def _times_packed(weight: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return out


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
        logits = torch.where(
            seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits
        )
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
    probs = logits.softmax(-1)
    cumulative = probs.cumsum(-1)
    # Scaled by the last entry, which rounding leaves a little off 1.
    tokens = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)
    tokens = tokens.clamp_(max=logits.shape[-1] - 1)
    return tokens.squeeze(-1), probs.gather(-1, tokens).log().squeeze(-1)


def _nucleus(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits outside the `top_k` largest become -inf, then those outside the smallest set that holds `top_p` of what is
    left."""
    ordered, order = logits.sort(-1, descending=True)
    if top_k > 0:
        ordered[:, top_k:] = float("-inf")
    if top_p < 1.0:
        probs = ordered.softmax(-1)
        ordered = ordered.masked_fill(probs.cumsum(-1) - probs >= top_p, float("-inf"))
    return logits.scatter(-1, order, ordered)
