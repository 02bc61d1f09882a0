"""CHORD's weights and the loss of experts' answers, against slow loops."""

from __future__ import annotations

import math

import pytest
import torch

from swift_r1.algorithms.chord import chord_mu, expert_loss


def test_mu_rises_in_a_line_and_falls_along_a_cosine() -> None:
    found = [chord_mu(step, 2, 4, 0.9, 0.1) for step in range(8)]
    middle = 0.1 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4))
    assert found == pytest.approx([0, 0.45, 0.9, middle, 0.5, 1.0 - middle, 0.1, 0.1])
    assert chord_mu(0, 0, 0, 0.9, 0.1) == 0.1
    assert {chord_mu(step, 0, 200, 0.3, 0.3) for step in (0, 100, 300)} == {0.3}


@pytest.mark.parametrize("phi", [False, True])
def test_loss_and_gradient_however_it_is_cut(phi: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    logps = -torch.rand(5, 7, generator=generator, dtype=torch.float64).requires_grad_()
    mask = torch.rand(5, 7, generator=generator) < 0.6
    losses, weights = [], torch.zeros(5, 7, dtype=torch.float64)
    for i, t in mask.nonzero().tolist():
        p = math.exp(logps[i, t].item())
        weights[i, t] = p * (1 - p) if phi else 1.0
        losses.append(-logps[i, t].item() * weights[i, t].item())
    total = float(mask.sum())
    spoilt = logps.masked_fill(~mask, float("nan"))
    for parts in ([slice(0, 5)], [slice(0, 2), slice(2, 5)]):
        found = sum(
            expert_loss(spoilt[own], mask[own], enable_phi=phi, normalizer=total).loss
            for own in parts
        )
        assert found.item() == pytest.approx(sum(losses) / total, rel=1e-12)
        (gradient,) = torch.autograd.grad(found, logps, retain_graph=True)
        torch.testing.assert_close(gradient, -weights / total)
    assert expert_loss(logps, torch.zeros(5, 7)).loss.item() == 0
