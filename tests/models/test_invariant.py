"""A token's bits are the same whatever is beside it, and the numbers and gradients are those of torch's own functions."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from swift_r1.errors import UsageError
from swift_r1.models import attention, invariant
from tests.models.test_attention_blocks import segments

COUNTS = (1, 2, 3, 15, 16, 17, 70, 300)


@pytest.fixture
def same_bits():
    with invariant.invariant_forward():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_rows_product_does_not_depend_on_the_others(same_bits, dtype, bias):
    torch.manual_seed(0)
    rows = torch.randn(300, 96).to(dtype)
    layer = torch.nn.Linear(96, 200, bias=bias).to(dtype)
    with torch.no_grad():
        whole = layer(rows)
        for count in COUNTS:
            for start in (0, 300 - count):
                part = slice(start, start + count)
                assert torch.equal(layer(rows[part]), whole[part])
                assert torch.equal(layer(rows[None, part])[0], whole[part])


def test_experts_too(same_bits):
    torch.manual_seed(0)
    weight = torch.randn(3, 32, 40)
    rows = torch.randn(80, 32)
    whole = functional.grouped_mm(rows, weight, offs=torch.tensor([50, 50, 80], dtype=torch.int32))
    torch.testing.assert_close(whole[50:], rows[50:] @ weight[2])
    few = functional.grouped_mm(
        rows[49:52], weight, offs=torch.tensor([1, 1, 3], dtype=torch.int32)
    )
    assert torch.equal(few, whole[49:52])


@pytest.mark.parametrize(
    "function",
    [functional.silu, torch.sigmoid, functional.gelu, functional.softplus, functional.mish],
)
def test_the_last_numbers_are_computed_as_the_others(same_bits, function):
    numbers = torch.linspace(-3, 3, 1001)
    whole = function(numbers)
    for count in (1, 5, 33, 100):
        assert torch.equal(function(numbers[-count:]), whole[-count:])
        assert torch.equal(function(numbers[:count]), whole[:count])
    assert torch.equal(function(numbers[1:].view(500, 2)[:, 1]), whole[2::2])


def test_without_it_they_do_depend():
    """Else the tests above prove nothing on this machine."""
    numbers = torch.linspace(-3, 3, 1001)
    parts = torch.cat([functional.silu(part) for part in numbers.split(31)])
    assert not torch.equal(parts, functional.silu(numbers))


def test_gradients_are_torchs_own():
    torch.manual_seed(0)
    layer = torch.nn.Linear(96, 40)
    rows = torch.randn(70, 96, requires_grad=True)

    def gradients():
        out = functional.silu(layer(rows))
        return torch.autograd.grad(out.square().sum(), [rows, *layer.parameters()])

    expected = gradients()
    with invariant.invariant_forward():
        ours = gradients()
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 6, 530])
def test_attention_of_a_packed_row(window):
    """Behind 600 keys, of several completions, with fewer key heads: as torch's, and as a row of its own to the bit."""
    row = attention.packed_row(segments([(600, [13, 4])]), torch.device("cpu"))
    torch.manual_seed(0)
    states = [torch.randn(1, heads, 617, 16) for heads in (6, 2, 2)]

    def attended(given, packed):
        own = [one.clone().requires_grad_() for one in given]
        out, _ = attention.packed_attention(
            torch.nn.Identity(), *own, None, packed_row=packed, sliding_window=window
        )
        return [out.detach(), *torch.autograd.grad(out.square().sum(), own)]

    expected = attended(states, row)
    alone = [torch.cat([one[:, :, :600], one[:, :, 613:]], 2) for one in states]
    with invariant.invariant_forward():
        ours = attended(states, row)
        second = attended(alone, None)[0]
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert torch.equal(second[:, 600:], ours[0][:, 613:])


def test_a_single_sum_is_added_up_as_several_are(same_bits):
    numbers = torch.rand(3, 100_000)
    assert torch.equal(invariant.row_sums(numbers[:1]), invariant.row_sums(numbers)[:1])


def test_a_machine_whose_products_depend_on_a_rows_place_is_refused():
    with pytest.raises(UsageError, match="a row's place changes what a weight makes of it"):
        invariant._agreeing(
            lambda rows: rows + torch.arange(len(rows))[:, None], (8, 4), 3, torch.float32, "weight"
        )
    rounds = invariant._agreeing(
        lambda rows: rows * (1 + (len(rows) < 8)), (8, 4), 3, torch.float32, "weight"
    )
    assert rounds == (8,)  # a small tile gives other bits
