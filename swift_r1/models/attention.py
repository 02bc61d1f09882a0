"""Attention over a packed row: sequences one after another, each seeing itself and what it goes on from.

Tokens that several sequences begin with (a prompt of several completions, the history of an agent's calls) are in the
row once, so that everything except attention computes them once. The row is a tree of segments, in which a segment's
queries meet the keys of all segments above it and then its own, at the positions they have in a row of their own. So
attention is exact, and nothing is padded outside this module.

Where a row is spread over ranks, each has here all its tokens for a part of the heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from swift_r1.models import cpu_kernels, flash, invariant
from swift_r1.runtime.sequence_parallel import SequenceGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INDEXED = "indexed_attention"
"""Layers that choose which keys a query sees (DeepSeek-V3.2), by a mask that transformers gives to its own SDPA."""
_NAME = "swift_r1_packed"
_BLOCK = 128  # tokens of a segment whose attention is computed together


class Segment(NamedTuple):
    """Tokens one after another in a row, and the number of the segment that they go on from; -1: from none."""

    length: int
    parent: int = -1


@dataclass(frozen=True, slots=True)
class Siblings:
    """`n` segments that go on from the same tokens; or one that goes on from none, with an empty `before`."""

    before: tuple[slice, ...]  # where in the row the tokens are that they go on from, `P` in all
    own: slice | Tensor  # where theirs are, one segment after another: `K` of them, int64
    count: int  # `n`
    width: int  # `C`, tokens of the longest
    places: Tensor  # int64 `[K]`, each token's place in the flattened `[n, C]`
    continued: bool  # whether others go on from it; of one that goes on from none

    @property
    def length_before(self) -> int:
        return sum(one.stop - one.start for one in self.before)


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One row of trees of segments, each segment before those that go on from it.

    Example: the prompts `p` and `q` of 3 and 2 tokens, the first with completions `a` of 2 tokens and `b` of 1:
        p p p a a b q q      segments (3, -1), (2, 0), (1, 0), (2, -1)
        groups [before (), own 0:3], [before (0:3), own 3:6, places [0, 1, 2]], [before (), own 6:8]
    """

    groups: tuple[Siblings, ...]  # together they cover the row
    # int64 `[S]`, where the row's tokens are among those of the groups; None: in the same order
    order: Tensor | None
    tokens: int
    longest: int  # tokens of the longest sequence
    spans: flash.RowSpans


def packed_row(segments: Sequence[Segment], device: torch.device) -> PackedRow:
    """Returns the row of these segments on `device`. Each stands behind its parent and what else goes on from that
    before it: depth first."""
    slices: list[slice] = []
    paths: list[tuple[slice, ...]] = []  # of each segment, itself included
    children: dict[int, list[int]] = {}  # by number, roots under their own negative one
    for number, one in enumerate(segments):
        start = slices[-1].stop if slices else 0
        slices.append(slice(start, start + one.length))
        above = paths[one.parent] if one.parent >= 0 else ()
        paths.append((*above, slices[-1]))
        children.setdefault(one.parent if one.parent >= 0 else -1 - number, []).append(number)
    lengths = {parent: [segments[one].length for one in own] for parent, own in children.items()}
    places = flash.on_device(torch.cat([_places(one) for one in lengths.values()]), device)
    each = places.split([sum(one) for one in lengths.values()])
    parts = [_together([slices[one] for one in own]) for own in children.values()]
    groups = tuple(
        Siblings(
            before=paths[parent] if parent >= 0 else (),
            own=part if isinstance(part, slice) else flash.on_device(part, device),
            count=len(own),
            width=max(lengths[parent]),
            places=at,
            continued=parent < 0 and own[0] in children,
        )
        for (parent, own), part, at in zip(children.items(), parts, each, strict=True)
    )
    return PackedRow(
        groups,
        _order_of(parts, device),
        slices[-1].stop,
        max(sum(one.stop - one.start for one in path) for path in paths),
        flash.RowSpans.of(segments, device),
    )


def _together(parts: Sequence[slice]) -> slice | Tensor:
    """Returns the places of all parts, as a slice where nothing stands between them."""
    if all(one.stop == following.start for one, following in pairwise(parts)):
        return slice(parts[0].start, parts[-1].stop)
    return torch.cat([torch.arange(one.start, one.stop) for one in parts])


def _order_of(parts: Sequence[slice | Tensor], device: torch.device) -> Tensor | None:
    """Returns where the tokens of a row are among those of its groups; None where they are in order."""
    if all(isinstance(one, slice) for one in parts):
        return None  # each begins where the one before it ends, since rows are depth first
    among = torch.cat(
        [torch.arange(one.start, one.stop) if isinstance(one, slice) else one for one in parts]
    )
    return flash.on_device(among.argsort(), device)


def _places(lengths: Sequence[int]) -> Tensor:
    """Returns int64 `[sum of lengths]`: where the tokens of these segments stand in the flattened `[n, C]`."""
    columns = torch.arange(max(lengths))
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
        packed_row: without it the attention is SDPA, whose mask has the window; rows are then padded on the right
            where forward passes are invariant.
        sequence: the ranks that share the row.

    Returns:
        `[1, S, H, V]`, and None in the place of the weights.

    Raises ValueError: on dropout, which would differ between the two forms.
    """
    if packed_row is None:
        if invariant.is_on():
            places = torch.arange(query.shape[2])[None]
            rows = query.transpose(1, 2)
            return invariant.attention(rows, key, value, places, scaling, sliding_window), None
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
        if packed_row.order is not None:
            out = _Collect.apply(out.flatten(1), packed_row.order).view_as(out)
    return (out if sequence is None else sequence.to_tokens(out))[None], None


def _by_group(
    row: PackedRow,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
) -> Iterator[Tensor]:
    """Yields `[K, H, V]` of each group."""
    whole = (query, key, value)
    for group in row.groups:
        own = [_rows(states, group.own) for states in whole]
        if group.before and group.width:
            seen = [torch.cat([states[part] for part in group.before]) for states in (key, value)]
            yield _behind(group, own, seen, scaling, window)
        elif not group.before:
            if group.continued:
                # A copy: what is kept of it for the backward pass would keep the whole row's states with it.
                own = [states.clone() for states in own]
            yield _causal(own, scaling, window)


def _rows(states: Tensor, places: slice | Tensor) -> Tensor:
    """Returns the tokens' states `[K, heads, width]` of `[S, heads, width]`."""
    if isinstance(places, slice):
        return states[places]
    taken: Tensor = _Collect.apply(states.flatten(1), places).unflatten(1, states.shape[1:])
    return taken


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
    length = query.shape[2]
    if invariant.is_on():
        places = torch.arange(length)[None]
        return invariant.attention(sequence[0][None], key, value, places, scaling, window)[0]
    if _in_pieces(query) or (window is not None and window < length):
        return _seen(sequence[0][None], key, value, scaling, window)[0]
    shares = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=shares
    )
    return out[0].transpose(0, 1)


def _in_pieces(query: Tensor) -> bool:
    """Says whether attention is computed by `cpu_kernels.py`."""
    return query.device.type == "cpu" and query.dtype == torch.bfloat16


def _behind(
    group: Siblings,
    own: Sequence[Tensor],
    before: Sequence[Tensor],
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Returns the attention `[K, H, V]` of a group's segments.

    Args:
        own: their queries, keys and values, each `[K, heads, width]`.
        before: keys and values of what they go on from, `[P, KV, width]`.
    """
    rows = group.count * group.width
    query, key, value = (
        _Spread.apply(states.flatten(1), group.places, rows).view(
            group.count, group.width, *states.shape[1:]
        )
        for states in own
    )
    key, value = (
        torch.cat([seen.expand(group.count, -1, -1, -1), states], dim=1).transpose(1, 2)
        for seen, states in zip(before, (key, value), strict=True)
    )

    if invariant.is_on():
        places = torch.arange(group.length_before, group.length_before + group.width)[None]
        spread = invariant.attention(query, key, value, places, scaling, window)
    else:
        spread = _seen(query, key, value, scaling, window)
    return _from_places(spread, group)


def _seen(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """Returns the attention `[n, C, H, V]` of tokens each of which sees what precedes it.

    Args:
        query: `[n, C, H, D]`.
        key, value: `[n, KV, P + C, D]`, `[n, KV, P + C, V]`.
    """
    width = query.shape[1]
    before = key.shape[2] - width
    # The query heads that share a key head follow one another as rows, so keys are not repeated for them.
    shared = key.shape[1]
    ratio = query.shape[2] // shared
    query = query.unflatten(2, (shared, ratio)).permute(0, 2, 3, 1, 4)
    attend: Any = scaled_dot_product_attention
    if _in_pieces(query):
        attend = cpu_kernels.attention
        # Else each block would copy the keys that it sees, and keep them for the backward pass.
        key, value = key.contiguous(), value.contiguous()
    parts = []
    for start in range(0, width, _BLOCK):
        end = min(start + _BLOCK, width)
        # A token sees up to its own place; a mask of all tokens would grow with the square of their number.
        place = before + start
        last = before + end
        first = 0 if window is None else max(0, place - window + 1)
        near = torch.ones(end - start, last - first, dtype=torch.bool, device=query.device).tril(
            place - first
        )
        if window is not None:
            near = near.triu(place - first - window + 1)
        out = attend(
            query[:, :, :, start:end].flatten(2, 3),
            key[:, :, first:last],
            value[:, :, first:last],
            attn_mask=near.repeat(ratio, 1),
            scale=scaling,
        )  # [n, KV, ratio * block, V]
        parts.append(out.unflatten(2, (ratio, end - start)))

    return torch.cat(parts, 3).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _from_places(spread: Tensor, group: Siblings) -> Tensor:
    """Returns `[K, H, V]` of `[n, C, H, V]`."""
    flat = spread.reshape(group.count * group.width, -1)
    collected: Tensor = _Collect.apply(flat, group.places).unflatten(1, spread.shape[2:])
    return collected


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
