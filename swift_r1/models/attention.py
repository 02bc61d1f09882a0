"""Attention over a packed row: completions one after another, each seeing its prompt and itself.

A prompt that several completions share is in the row once, so that everything except attention computes it once.
Attention is exact: a completion's queries meet the keys of its prompt and then its own, at the positions they have in a
row of their own. Nothing is padded outside this module.

Where a row is spread over ranks, each has here all its tokens for a part of the heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from swift_r1.models import flash
from swift_r1.runtime.sequence_parallel import SequenceGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INDEXED = "indexed_attention"
"""Layers that choose which keys a query sees (DeepSeek-V3.2), by a mask that transformers gives to its own SDPA."""
_NAME = "swift_r1_packed"
_BLOCK = 512  # tokens of a completion whose attention is computed together


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """`n` completions and the prompt they share; or, with `n == 0`, a sequence that shares nothing."""

    # where in the row the prompt's first token is; the completions follow the prompt, one after another
    start: int
    prompt_length: int  # `P` tokens
    completions: int  # `n`
    width: int  # `C`, tokens of the longest completion, 0 without completions
    # int64 `[sum of completion lengths]`, each completion token's place in the flattened `[n, C]`
    places: Tensor


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One row of several groups, each a prompt and its completions.

    Example: the prompts `p` and `q` of 3 and 2 tokens, the first with completions of 2 tokens and 1:
        p p p a a b q q      groups [start 0, prompt 3, places [0, 1, 2]], [start 6, prompt 2, places []]
    """

    groups: tuple[PromptGroup, ...]  # in order; together they cover the row
    tokens: int
    longest: int  # tokens of the longest prompt with a completion
    spans: flash.RowSpans


def packed_row(groups: Sequence[tuple[int, Sequence[int]]], device: torch.device) -> PackedRow:
    """Returns the row of these groups on `device`.

    Args:
        groups: tokens of each group's prompt, and of its completions.
    """
    in_row = []
    start = 0
    places = flash.on_device(torch.cat([_places(lengths) for _, lengths in groups]), device)
    each = places.split([sum(lengths) for _, lengths in groups])
    for (prompt, lengths), own in zip(groups, each, strict=True):
        in_row.append(PromptGroup(start, prompt, len(lengths), max(lengths, default=0), own))
        start += prompt + len(own)
    longest = max(group.prompt_length + group.width for group in in_row)
    return PackedRow(tuple(in_row), start, longest, flash.RowSpans.of(groups, device))


def _places(lengths: Sequence[int]) -> Tensor:
    """Returns int64 `[sum of lengths]`: where the tokens of these completions stand in the flattened `[n, C]`."""
    columns = torch.arange(max(lengths, default=0))
    return (
        (torch.tensor(lengths, dtype=torch.long)[:, None] > columns).flatten().nonzero().flatten()
    )


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packed_row: PackedRow | None = None,
    sequence: SequenceGroup | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes the attention of a packed row, by the interface of transformers' attention functions.

    Args:
        query, key, value: `[1, H, S, D]`, `[1, KV, S, D]`, `[1, KV, S, V]`; `S` counts this rank's tokens.
        sliding_window: how many tokens each sees in this layer, itself among them.
        packed_row: without it the attention is SDPA, whose mask has the window.
        sequence: the ranks that share the row.

    Returns:
        `[1, S, H, V]`, and None in the place of the weights.

    Raises ValueError: on dropout, which would differ between the two forms.
    """
    if packed_row is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if dropout:
        raise ValueError("packed attention has no dropout")
    # Token by token `[S, heads, D]`, so that a completion's tokens are rows of one matrix.
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    if sequence is not None:
        query, key, value = _to_heads(sequence, packed_row, query, key, value)
    if flash.takes(query, value, packed_row.longest, sliding_window):
        out = flash.row_attention(query, key, value, packed_row.spans, scaling)
    else:
        out = torch.cat(list(_by_group(packed_row, query, key, value, scaling, sliding_window)))
    return (out if sequence is None else sequence.to_tokens(out))[None], None


def _by_group(
    row: PackedRow,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
) -> Iterator[Tensor]:
    """Yields `[L, H, V]` of each prompt and of its completions, in the order of the row."""
    whole = (query, key, value)
    for group in row.groups:
        middle = group.start + group.prompt_length
        prompt = [states[group.start : middle] for states in whole]
        if group.width:
            # A copy: what is kept of the prompt for the backward pass would keep the whole row's states with it.
            prompt = [states.clone() for states in prompt]
        yield _causal(prompt, scaling, window)

        if group.width:
            own = [states[middle : middle + len(group.places)] for states in whole]
            yield _after_prompt(group, own, prompt[1:], scaling, window)


def _to_heads(
    sequence: SequenceGroup, row: PackedRow, query: Tensor, *shared: Tensor
) -> tuple[Tensor, ...]:
    """Returns all tokens of this rank's heads, where each rank had its tokens of all heads.

    Keys and values (`shared`) with fewer heads than ranks are repeated, so that each rank has those that its queries
    meet.
    """
    copies = sequence.size // math.gcd(sequence.size, shared[0].shape[1])
    spread = (states.repeat_interleave(copies, 1) if copies > 1 else states for states in shared)
    return tuple(sequence.to_heads(states, row.tokens) for states in (query, *spread))


def _causal(sequence: Sequence[Tensor], scaling: float | None, window: int | None) -> Tensor:
    """Returns the attention `[L, H, V]` of a sequence that sees itself alone, of its queries, keys and values, each
    `[L, heads, width]`."""
    query, key, value = (states.transpose(0, 1)[None] for states in sequence)
    shares = query.shape[1] != key.shape[1]
    length = query.shape[2]
    near = None
    if window is not None and window < length:
        near = (
            torch.ones(length, length, dtype=torch.bool, device=query.device)
            .tril()
            .triu(1 - window)
        )
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=near, is_causal=near is None, scale=scaling, enable_gqa=shares
    )
    return out[0].transpose(0, 1)


def _after_prompt(
    group: PromptGroup,
    own: Sequence[Tensor],
    prompt: Sequence[Tensor],
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Returns the attention `[sum of completion lengths, H, V]` of a group's completions.

    Args:
        own: queries, keys and values of the completions, one after another, each `[sum of lengths, heads, width]`.
        prompt: keys and values of their prompt, `[P, KV, width]`.
    """
    rows = group.completions * group.width
    query, key, value = (
        _Spread.apply(states.flatten(1), group.places, rows).view(
            group.completions, group.width, *states.shape[1:]
        )
        for states in own
    )
    key, value = (
        torch.cat([seen.expand(group.completions, -1, -1, -1), states], dim=1).transpose(1, 2)
        for seen, states in zip(prompt, (key, value), strict=True)
    )

    # The query heads that share a key head follow one another as rows, so keys are not repeated for them.
    heads = query.shape[2]
    shared = key.shape[1]
    ratio = heads // shared
    query = query.unflatten(2, (shared, ratio)).permute(0, 2, 3, 1, 4)

    parts = []
    for start in range(0, group.width, _BLOCK):
        end = min(start + _BLOCK, group.width)
        # A token sees up to its own place; a mask of all tokens would grow with the square of their number.
        place = group.prompt_length + start
        last = group.prompt_length + end
        first = 0 if window is None else max(0, place - window + 1)
        near = torch.ones(end - start, last - first, dtype=torch.bool, device=query.device).tril(
            place - first
        )
        if window is not None:
            near = near.triu(place - first - window + 1)
        out = scaled_dot_product_attention(
            query[:, :, :, start:end].flatten(2, 3),
            key[:, :, first:last],
            value[:, :, first:last],
            attn_mask=near.repeat(ratio, 1),
            scale=scaling,
        )  # [n, KV, ratio * block, V]
        parts.append(out.unflatten(2, (ratio, end - start)))

    out = torch.cat(parts, 3).permute(0, 3, 1, 2, 4)
    attended: Tensor = _Collect.apply(out.reshape(rows, -1), group.places).unflatten(1, (heads, -1))
    return attended


class _Spread(torch.autograd.Function):
    """Rows `[K, *]` to their places among `rows` ones, zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(places)
        return values.new_zeros(rows, values.shape[1]).index_copy_(0, places, values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Collect(torch.autograd.Function):
    """The rows at `places`. Each is taken once, so the gradient is copied where plain indexing would add."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.rows = values.shape[0]
        return values.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros(ctx.rows, grad.shape[1]).index_copy_(
            0, ctx.saved_tensors[0], grad
        ), None


AttentionInterface.register(_NAME, packed_attention)
# Rows that are not packed get SDPA's masks.
AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def use_packed_attention(model: PreTrainedModel) -> None:
    """Lets a model with SDPA attention take packed rows too; one with another attention stays as it is."""
    config = model.config.get_text_config()
    if config._attn_implementation != "sdpa":
        return
    if getattr(config, "attn_logit_softcapping", None):
        # Gemma 2 caps attention's scores, which transformers' SDPA silently leaves out: it gets eager attention.
        config._attn_implementation = "eager"
    elif INDEXED not in (getattr(config, "layer_types", None) or ()):
        config._attn_implementation = _NAME


def takes_packed_rows(model: PreTrainedModel) -> bool:
    """Says whether the model's attention is `packed_attention`."""
    return bool(model.config.get_text_config()._attn_implementation == _NAME)
