"""What a teacher's log-probs of the policy's own tokens change, against slow loops."""

from __future__ import annotations

import math

import pytest
import torch

from swift_r1.algorithms.methods.rlsd import rlsd_advantages, rlsd_strength
from swift_r1.algorithms.methods.sdar import sdar


@pytest.mark.parametrize("negative_only", [False, True])
def test_rlsd_moves_an_advantage_between_the_tokens_and_never_turns_it(negative_only: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(4, 6, generator=generator, dtype=torch.float64)
    teacher = old + 0.3 * torch.randn(4, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 6, generator=generator) < 0.7
    teacher[~mask] = float("nan")
    teacher[0, mask[0].nonzero()[0]] = -1e9  # as a token that the teacher could not say
    advantages = torch.tensor([1.5, -0.5, 0.0, 0.2], dtype=torch.float64)
    found = rlsd_advantages(
        advantages, old, teacher, mask, strength=0.7, clip_range=0.2, negative_only=negative_only
    )
    for i, t in torch.cartesian_prod(torch.arange(4), torch.arange(6)).tolist():
        a, weight = advantages[i].item(), 1.0
        if mask[i, t] and (a < 0 or not negative_only):
            gap = math.copysign(1, a) * (a != 0) * (teacher[i, t] - old[i, t]).item()
            weight = 0.3 + 0.7 * min(max(math.exp(min(gap, 50)), 0.8), 1.2)
        assert found[i, t].item() == pytest.approx(a * weight * mask[i, t].item(), rel=1e-12)
    plain = rlsd_advantages(advantages, old, teacher, mask, strength=0.0, clip_range=0.2)
    torch.testing.assert_close(plain, advantages[:, None] * mask)


def test_the_strength_rises_and_falls_in_lines() -> None:
    assert [rlsd_strength(step, 0.5, 2, 4) for step in range(8)] == [
        0,
        0.25,
        0.5,
        0.375,
        0.25,
        0.125,
        0,
        0,
    ]
    assert rlsd_strength(1000, 0.5, 0, 0) == 0.5


def test_sdar_pulls_where_the_teacher_is_surer() -> None:
    logps = torch.tensor([[-1.0, -1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[-0.5, -1.0, -3.0]], dtype=torch.float64)
    loss, logged = sdar(logps, teacher, 5.0)
    gates = [1 / (1 + math.exp(-5 * gap)) for gap in (0.5, 0.0, -2.0)]
    assert loss[0].tolist() == pytest.approx([gates[0] * 0.5, 0.0, gates[2] * -2.0])
    (gradient,) = torch.autograd.grad(loss.sum(), logps)
    assert gradient[0].tolist() == pytest.approx([-gate for gate in gates])
    assert logged["sdar/gate_active_ratio"].tolist() == [[True, False, False]]
