"""Completions that share a prompt attend in blocks: the same numbers and gradients whatever the size of a block."""

from __future__ import annotations

import pytest
import torch

from swift_r1.models import attention


def segments(groups: list[tuple[int, list[int]]]) -> list[attention.Segment]:
    """Returns prompts of these lengths, each with its completions."""
    found: list[attention.Segment] = []
    for prompt, completions in groups:
        number = len(found)
        found += [
            attention.Segment(prompt),
            *(attention.Segment(one, number) for one in completions),
        ]
    return found


@pytest.mark.parametrize("window", [None, 6])
def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    row = attention.packed_row(segments([(7, [13, 4, 11])]), torch.device("cpu"))
    torch.manual_seed(0)
    states = [torch.randn(1, heads, 7 + 28, 8, dtype=torch.float64) for heads in (4, 2, 2)]

    def attended() -> list[torch.Tensor]:
        own = [one.clone().requires_grad_() for one in states]
        out, _ = attention.packed_attention(
            torch.nn.Identity(), *own, None, packed_row=row, sliding_window=window
        )
        out.square().sum().backward()
        return [out.detach(), *(one.grad for one in own if one.grad is not None)]

    whole = attended()
    for size in (1, 5, 13):
        monkeypatch.setattr(attention, "_BLOCK", size)
        for one, other in zip(attended(), whole, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_blocks_keep_no_more_for_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    row = attention.packed_row(segments([(64, [64, 60])]), torch.device("cpu"))
    states = [
        torch.randn(1, heads, row.tokens, 64, dtype=dtype, requires_grad=True)
        for heads in (4, 2, 2)
    ]

    def kept(block: int) -> int:
        monkeypatch.setattr(attention, "_BLOCK", block)
        storages: dict[int, int] = {}

        def pack(one: torch.Tensor) -> torch.Tensor:
            storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
            return one

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
            attention.packed_attention(torch.nn.Identity(), *states, None, packed_row=row)
        return sum(storages.values())

    assert kept(8) < 1.3 * kept(64)
