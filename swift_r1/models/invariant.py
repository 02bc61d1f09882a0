"""A CPU's forward passes with the same bits for a token whatever is computed beside it (`--batch_invariant true`).

A library chooses how it adds up by the sizes that it is given, so a token's numbers depend in their last bits on how
many rows there are. Here matrix products take rows in tiles of a few fixed sizes, attention takes queries and keys so,
by the places that the keys have in their own sequence, and functions whose last numbers are computed in another way
than the others (torch's vectors and what is left over) get numbers enough that none are left over. Norms and softmaxes
add up a row by its width alone as they are.

What this builds on is checked on this machine for each shape of a weight when it is first met: all places of a tile
give the same bits, and small tiles are taken only where they give those of the largest.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel
from torch.nn.functional import pad

from swift_r1.errors import UsageError

_TILES = (256, 64, 32, 16)  # rows of a product
_GRAIN = 32768  # numbers below which torch computes a function of each on one thread (`at::internal::GRAIN_SIZE`)
_UNROLLED = 64  # numbers that such a function takes at a time at most, in any dtype
_KEYS = 512  # that torch's attention on a CPU takes at a time
_QUERIES = (32, 8)  # that it takes at a time, where there are no more than `_MOST_QUERIES`
_MOST_QUERIES = 160
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

_libraries: list[Library] = []
_tiles: dict[tuple[Any, ...], tuple[int, ...]] = {}
"""Rows of the tiles that give the same bits, by what was checked."""


def is_on() -> bool:
    """Says whether forward passes of this process are computed so."""
    return bool(_libraries)


@contextmanager
def invariant_forward() -> Iterator[None]:
    """Computes forward passes on a CPU so while it is open, in the whole process."""
    # torch has no types here
    library: Any = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for name, ours in _FUNCTIONS.items():
            own = partial(get_kernel(f"aten::{name}", "CPU").call_boxed, _CPU)
            library.impl(name, partial(ours, own), "CPU")
    _libraries.append(library)
    try:
        yield
    finally:
        _libraries.remove(library)
        library._destroy()


def _in_backward() -> bool:
    """Says whether a gradient is being computed, whose bits nothing is compared with; not a layer's forward pass again
    (gradient checkpointing)."""
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()


def _mm(own: Callable[..., Tensor], rows: Tensor, weight: Tensor) -> Tensor:
    return own(rows, weight) if _in_backward() else _product(rows, weight)


def _addmm(
    own: Callable[..., Tensor],
    bias: Tensor,
    rows: Tensor,
    weight: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    if _in_backward():
        return own(bias, rows, weight, beta=beta, alpha=alpha)
    if bias.dim() == 1 and beta == alpha == 1:
        return _product(rows, weight, bias)
    return torch.add(bias * beta, _product(rows, weight), alpha=alpha)


def _grouped_mm(
    own: Callable[..., Tensor],
    rows: Tensor,
    weight: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes the experts' products: `rows [N, D]`, one expert's after another, `weight [E, D, F]`."""
    if _in_backward() or offs is None or weight.dim() != 3 or rows.dim() != 2:
        return own(rows, weight, offs, bias, out_dtype)
    out = rows.new_zeros(len(rows), weight.shape[-1])
    start = 0
    for expert, end in enumerate(offs.tolist()):
        if end > start:
            out[start:end] = _product(rows[start:end], weight[expert])
        start = end
    return out


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns `rows [M, K] @ weight [K, N] + bias [N]`."""
    count = len(rows)
    out = rows.new_empty(count, weight.shape[1])
    if not out.numel():
        return out
    if not rows.shape[1]:
        return out.copy_(bias) if bias is not None else out.zero_()
    rows = rows.contiguous()
    tiles = _tiles_of(weight, bias)
    start = 0
    while start < count:
        left = count - start
        size = next((one for one in tiles if one <= left), tiles[-1])
        tile = rows[start : start + size]
        if size <= left:
            _multiply(tile, weight, bias, out[start : start + size])
        else:
            whole = out.new_empty(size, weight.shape[1])
            _multiply(pad(tile, (0, 0, 0, size - left)), weight, bias, whole)
            out[start:] = whole[:left]
        start += size
    return out


def _multiply(tile: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.ops.aten.mm.out(tile, weight, out=out)
    else:
        torch.ops.aten.addmm.out(bias, tile, weight, out=out)


def _tiles_of(weight: Tensor, bias: Tensor | None) -> tuple[int, ...]:
    """Returns how many rows a tile of a product with such a weight may have. Raises as `_agreeing`."""
    threads = torch.get_num_threads()
    shape = (*weight.shape, weight.stride(0) == 1, weight.dtype, bias is None, threads)
    if shape not in _tiles:

        def product(rows: Tensor) -> Tensor:
            out = rows.new_empty(len(rows), weight.shape[1])
            _multiply(rows, weight, bias, out)
            return out

        what = f"weight of {weight.shape[0]} by {weight.shape[1]}"
        _tiles[shape] = _agreeing(product, _TILES, weight.shape[0], weight.dtype, what)
    return _tiles[shape]


def _agreeing(
    compute: Callable[[Tensor], Tensor],
    sizes: Sequence[int],
    width: int,
    dtype: torch.dtype,
    what: str,
) -> tuple[int, ...]:
    """Returns the sizes of tiles, the largest of which is first, that give the same bits. Raises UsageError where a
    row's place in it matters."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sizes[0], width, generator=generator).to(dtype)
    alike = compute(rows[:1].repeat(sizes[0], 1))
    if not torch.equal(alike, alike[:1].expand_as(alike)):
        raise UsageError(
            f"--batch_invariant true: on this machine a row's place changes what a {what} makes of it"
        )
    whole = compute(rows)
    return tuple(
        size
        for size in sizes
        if torch.equal(torch.cat([compute(part) for part in torch.split(rows, size)]), whole)
    )


def _of_each(own: Callable[..., Tensor], numbers: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Computes a function of each number, of so many that every thread has whole vectors."""
    count = numbers.numel()
    if _in_backward() or not count:
        return own(numbers, *args, **kwargs)
    threads = min(torch.get_num_threads(), -(-count // _GRAIN))
    more = -count % (threads * _UNROLLED)
    if not more and numbers.is_contiguous():
        return own(numbers, *args, **kwargs)
    return own(pad(numbers.flatten(), (0, more)), *args, **kwargs)[:count].view(numbers.shape)


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "mm": _mm,
    "addmm": _addmm,
    "_grouped_mm": _grouped_mm,
    **dict.fromkeys(("silu", "sigmoid", "gelu", "softplus", "mish", "elu"), _of_each),
}
"""torch's functions that depend on what else they are given, and ours in their place."""


def row_sums(numbers: Tensor) -> Tensor:
    """Returns `numbers [N, V].sum(-1)`. Threads share the sum of one row alone, so it is added up as two are."""
    if is_on() and len(numbers) == 1:
        return torch.cat([numbers, numbers]).sum(-1)[:1]
    return numbers.sum(-1)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    places: Tensor,
    scaling: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Returns causal attention `[B, C, H, D]`, in float32 inside.

    Args:
        query: `[B, C, H, D]`, tokens of `B` sequences.
        key, value: `[B, KV, T, D]`, of all tokens of each sequence from its first on; finite numbers behind them.
        places: int64 `[B, C]` or `[1, C]`, where in its sequence each query's token is, ascending.
        scaling: of the scores; None: `D ** -0.5`.
        window: how many tokens each sees, itself among them; None: all before it.
    """
    shared = key.shape[1]
    ratio = query.shape[2] // shared
    # The query heads that share a key head follow one another, token by token.
    heads = torch.unflatten(query, 2, (shared, ratio)).permute(0, 2, 1, 3, 4)
    rows = heads.flatten(2, 3).float()
    key = key.float()
    value = value.float()
    behind = whole_blocks(key.shape[2]) - key.shape[2]
    if behind:
        key, value = (pad(states, (0, 0, 0, behind)) for states in (key, value))
    at = places.repeat_interleave(ratio, 1)
    tiles = _query_tiles(rows.shape[-1])
    parts = []
    for start in range(0, rows.shape[2], _MOST_QUERIES):
        part = rows[:, :, start : start + _MOST_QUERIES]
        own = at[:, start : start + _MOST_QUERIES]
        there = part.shape[2]
        more = -there % (tiles[-1] if there <= tiles[-1] else tiles[0])
        part = pad(part, (0, 0, 0, more))
        own = torch.cat([own, own[:, -1:].expand(-1, more)], 1)
        first = 0 if window is None else max(0, int(own.min()) - window + 1) // _KEYS * _KEYS
        last = (int(own.max()) // _KEYS + 1) * _KEYS
        columns = torch.arange(first, last)
        hidden = columns > own[..., None]
        if window is not None:
            hidden |= columns <= own[..., None] - window
        out = _attend(part, key[:, :, first:last], value[:, :, first:last], hidden, scaling)
        parts.append(out[:, :, :there])
    out = torch.unflatten(torch.cat(parts, 2), 2, (-1, ratio)).permute(0, 2, 1, 3, 4)
    return out.flatten(2, 3).to(query.dtype)


def whole_blocks(tokens: int) -> int:
    """Returns how many keys the blocks of so many tokens hold."""
    return -(-tokens // _KEYS) * _KEYS


def _attend(
    rows: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scaling: float | None
) -> Tensor:
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None]
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rows, key, value, 0.0, False, attn_mask=mask, scale=scaling
    )[0]
    return out


def _query_tiles(width: int) -> tuple[int, ...]:
    """Returns how many queries of heads so wide may be computed together. Raises as `_agreeing`."""
    shape = ("attention", width)
    if shape not in _tiles:
        generator = torch.Generator().manual_seed(1)
        key, value = torch.randn(2, 1, 1, 2 * _KEYS, width, generator=generator)
        hidden = (torch.arange(2 * _KEYS) > _KEYS + 100).expand(1, 1, -1)

        def attended(rows: Tensor) -> Tensor:
            seen = hidden.expand(1, len(rows), -1)
            return _attend(rows[None, None], key, value, seen, None)[0, 0]

        what = f"head of {width}"
        _tiles[shape] = _agreeing(attended, _QUERIES, width, torch.float32, what)
    return _tiles[shape]
