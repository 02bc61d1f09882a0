"""REAL's loss of whole groups, against its formula and autograd."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swift_r1.algorithms.config import LossConfig
from swift_r1.algorithms.losses import policy_loss
from swift_r1.algorithms.methods.real import real_advantages, reward_labels


def loop_loss(scores: Tensor, labels: Tensor, size: int, tau: float) -> Tensor:
    """The sum over groups of the paper's loss, with a gradient."""
    total = torch.zeros((), dtype=torch.float64)
    for first in range(0, len(scores), size):
        own = range(first, first + size)
        for label in (1, -1):
            terms = [torch.exp(-label * scores[i] / tau) for i in own if labels[i] == label]
            total = total + torch.log(torch.stack([torch.ones_like(total), *terms]).sum())
    return total


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 6), st.sampled_from([0.1, 0.5, 2.0])
)
def test_value_and_gradient(seed: int, groups: int, size: int, tau: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(groups * size, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.randint(-1, 2, (groups * size,), generator=generator)
    expected = loop_loss(scores, labels, size, tau)
    gradient = torch.zeros_like(scores)
    if labels.count_nonzero():
        (gradient,) = torch.autograd.grad(expected, scores)
    found, total = real_advantages(scores, labels, size, tau)
    assert total.item() == pytest.approx(size * expected.item(), rel=1e-12)
    torch.testing.assert_close(-found / size, gradient, rtol=1e-10, atol=1e-12)
    assert found.abs().max() <= size / tau
    assert not found[labels == 0].any()


def test_through_the_policy_loss_it_is_the_loss_of_the_mean_log_ratios() -> None:
    """Three groups of four, one of them in two micro-batches."""
    generator = torch.Generator().manual_seed(0)
    logps = -torch.rand(12, 5, generator=generator, dtype=torch.float64).requires_grad_()
    old = logps.detach() + 0.3 * torch.randn(12, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(12, 5, generator=generator) < 0.8
    mask[:, 0] = True
    labels = torch.tensor([1, -1, -1, 1, -1, -1, 1, -1, 0, 0, 0, 0])
    scores = ((logps - old) * mask).sum(1) / mask.sum(1)
    (expected,) = torch.autograd.grad(loop_loss(scores, labels, 4, 0.5) / 3, logps)
    advantages, _ = real_advantages(scores, labels, 4, 0.5)
    loss: Tensor = sum(
        policy_loss(
            logps[rows],
            old[rows],
            advantages[rows],
            mask[rows],
            LossConfig(loss_type="real"),
            normalizer=12.0,
        ).loss
        for rows in (slice(0, 2), slice(2, 7), slice(7, 12))
    )
    (found,) = torch.autograd.grad(loss, logps)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_labels() -> None:
    advantages = torch.tensor([0.5, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.2, 0.1, 0.0, -0.3])
    valid = torch.tensor([1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0], dtype=torch.bool)
    found = reward_labels(advantages, valid, 4).tolist()
    assert found[:4] == [1, -1, -1, 0] and found[4:8] == [0] * 4
    assert found[8:] == [0] * 4  # nothing is negative and valid


def test_huge_scores_stay_finite() -> None:
    found, total = real_advantages(torch.tensor([-900.0, 900.0]), torch.tensor([1, -1]), 2, 0.5)
    assert found.tolist() == [4.0, -4.0] and total.item() == pytest.approx(2 * 2 * 1800)
    assert math.isfinite(total.item())
