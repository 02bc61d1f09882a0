"""GAE and the value loss against slow loops written from the formulas."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swift_r1.algorithms.ppo import gae, value_loss


def make(seed: int, rows: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a, b, c = (torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(3))
    return a, b, c, torch.rand(rows, width, generator=generator) < 0.7


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.9, 1.0]),
    st.sampled_from([0.0, 0.95, 1.0]),
)
def test_gae_is_the_sum_of_discounted_deltas(
    seed: int, rows: int, width: int, gamma: float, lam: float
) -> None:
    rewards, values, _, mask = make(seed, rows, width)
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    for i in range(rows):
        tokens = [t for t in range(width) if mask[i, t]]
        r = [rewards[i, t].item() for t in tokens]
        v = [values[i, t].item() for t in tokens] + [0.0]  # the terminal value
        for place, t in enumerate(tokens):
            expected = sum(
                (gamma * lam) ** (k - place) * (r[k] + gamma * v[k + 1] - v[k])
                for k in range(place, len(tokens))
            )
            assert advantages[i, t].item() == pytest.approx(expected, rel=1e-10, abs=1e-12)
            assert returns[i, t].item() == pytest.approx(expected + v[place], rel=1e-10, abs=1e-12)
    assert advantages[~mask].count_nonzero() == 0 and returns[~mask].count_nonzero() == 0


def test_gae_ignores_padding_and_gradients() -> None:
    rewards, values, _, mask = make(1, 3, 6)
    clean = gae(rewards, values, mask, 0.99, 0.9)
    nan = float("nan")
    spoilt = gae(
        rewards.masked_fill(~mask, nan),
        values.masked_fill(~mask, nan).requires_grad_(),
        mask,
        0.99,
        0.9,
    )
    for a, b in zip(clean, spoilt, strict=True):
        assert torch.equal(a, b) and not b.requires_grad
    assert gae(rewards.float(), values.float(), mask, 1, 1)[0].dtype == torch.float32
    assert gae(rewards.bfloat16(), values.bfloat16(), mask, 1, 1)[0].dtype == torch.float32


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 8), st.sampled_from([None, 0.1, 0.5])
)
def test_value_loss_equals_the_formula(
    seed: int, rows: int, width: int, clip: float | None
) -> None:
    values, old, returns, mask = make(seed, rows, width)
    losses, over = [], 0
    for i in range(rows):
        for t in range(width):
            if mask[i, t]:
                v, o, target = values[i, t].item(), old[i, t].item(), returns[i, t].item()
                worst = (v - target) ** 2
                if clip is not None:
                    clipped = (o + min(max(v - o, -clip), clip) - target) ** 2
                    over += clipped > worst
                    worst = max(worst, clipped)
                losses.append(0.5 * worst)
    expected = sum(losses) / max(1, len(losses))
    found = value_loss(values, old, returns, mask, clip)
    assert found.loss.item() == pytest.approx(expected, rel=1e-10)
    assert found.metrics["clip_ratio/value/sum"] == over and found.metrics[
        "clip_ratio/value/count"
    ] == len(losses)
    # Cut in two, with the step's number of tokens, the parts add up.
    parts = [
        value_loss(
            values[part], old[part], returns[part], mask[part], clip, normalizer=len(losses)
        ).loss
        for part in (slice(0, 1), slice(1, None))
    ]
    assert sum(part.item() for part in parts) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_value_loss_gradient_by_finite_differences(clip: float | None) -> None:
    values, old, returns, mask = make(7, 3, 5)
    spoilt = values.masked_fill(~mask, 1e3).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda v: value_loss(v, old, returns, mask, clip).loss, (spoilt,), atol=1e-6
    )
