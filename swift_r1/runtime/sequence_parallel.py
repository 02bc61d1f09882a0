"""Ulysses (arXiv 2309.14509): a packed row is spread over the ranks of a group.

Each rank computes a part of the row's tokens; in attention, which needs them all, each has all of them for a part of
the heads. The group's ranks hold the same completions, and each gets the gradient of its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Consecutive ranks that share their rows; `group` is of the device's backend (gloo, NCCL)."""

    rank: int  # in the group
    size: int  # `N`
    group: dist.ProcessGroup

    def parts(self, tokens: int) -> list[int]:
        """Returns how many of a row's tokens each rank computes; they differ by one at most."""
        return [tokens // self.size + (rank < tokens % self.size) for rank in range(self.size)]

    def own(self, tokens: int) -> slice:
        """Returns the slice of a row's tokens that is this rank's."""
        parts = self.parts(tokens)
        start = sum(parts[: self.rank])
        return slice(start, start + parts[self.rank])

    def to_heads(self, states: Tensor, tokens: int) -> Tensor:
        """Exchanges `[own tokens, H, D]` for `[tokens, H / N, D]` (collective); the backward pass is `to_tokens`."""
        rows = torch.unflatten(states, 1, (self.size, -1)).transpose(0, 1).flatten(0, 1)
        return self._exchange(rows, [len(states)] * self.size, self.parts(tokens))

    def to_tokens(self, states: Tensor) -> Tensor:
        """Turns `[tokens, H / N, D]` into `[own tokens, H, D]` (collective). Backward is `to_heads` of the gradient."""
        parts = self.parts(len(states))
        rows = self._exchange(states, parts, [parts[self.rank]] * self.size)
        return torch.unflatten(rows, 0, (self.size, -1)).transpose(0, 1).flatten(1, 2)

    def together(self, values: Tensor, mine: Tensor, count: int) -> Tensor:
        """Returns all ranks' values `[count, *]`, of which `values` are those at `mine` (int64), on each rank
        (collective). Backward takes this rank's share of the gradient, since all ranks compute the same loss."""
        apply: Callable[..., Tensor] = _Together.apply
        return apply(values, mine, count, self.group)

    def _exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        apply: Callable[..., Tensor] = _Exchange.apply
        return apply(rows, sent, received, self.group)


def join_sequence_group(size: int, timeout: timedelta) -> SequenceGroup:
    """This rank's group of `size`, which divides the number of ranks. Collective."""
    group, _ = dist.new_subgroups(size, timeout=timeout)  # type: ignore[no-untyped-call]  # torch has no types here
    return SequenceGroup(dist.get_rank() % size, size, group)


class _Exchange(torch.autograd.Function):
    """Sends the k-th `sent[k]` rows to the k-th rank; `received[k]` rows come from it, in the order of the ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.sent = sent
        ctx.received = received
        ctx.group = group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchanged(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group)
    return out


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, mine: Tensor, count: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(mine)
        whole = values.new_zeros(count, *values.shape[1:]).index_copy_(0, mine, values)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None, None
