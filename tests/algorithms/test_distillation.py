"""Formulas of distillation against slow loops in float64, and what they must not depend on."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_r1.algorithms.methods.teacher import LEAST_TAIL, reverse_kl, teacher_advantages


def two(seed, vocab, rows=5, spread=2.0):
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(2, rows, vocab, generator=generator, dtype=torch.float64)
    return logits.log_softmax(-1)


def loop_kl(p, q, kept):
    """Over the `kept` tokens, and all others as one."""
    total, tail_p, tail_q = 0.0, 1.0, 1.0
    for v in kept:
        total += math.exp(p[v]) * (p[v] - q[v])
        tail_p, tail_q = tail_p - math.exp(p[v]), tail_q - math.exp(q[v])
    tail_p, tail_q = max(tail_p, LEAST_TAIL), max(tail_q, LEAST_TAIL)
    return total + tail_p * math.log(tail_p / tail_q)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 30), st.integers(1, 30), st.booleans())
def test_reverse_kl_equals_the_formula(seed, vocab, top, fewer):
    student, teacher = two(seed, vocab)
    tops, ids = teacher.topk(min(top, vocab))
    known = ids.shape[1]
    if fewer and known > 1:  # the last one is no token
        tops[:, -1], known = -torch.inf, known - 1
    found = reverse_kl(student.gather(-1, ids), tops)
    for row in range(len(student)):
        slow = loop_kl(student[row].tolist(), teacher[row].tolist(), ids[row, :known].tolist())
        assert found[row].item() == pytest.approx(slow, rel=1e-9, abs=1e-9)
    coarse = reverse_kl(student.gather(-1, ids).float(), tops.float())
    assert coarse.dtype == torch.float32
    # the logarithm of a small tail
    torch.testing.assert_close(coarse.double(), found, rtol=1e-4, atol=1e-2)


def test_gradient_by_finite_differences():
    student, teacher = two(2, 9, rows=3)
    tops, ids = teacher.topk(4)
    logits = student.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: reverse_kl(x.log_softmax(-1).gather(-1, ids), tops), (logits,)
    )


def test_a_token_advantage_is_the_teachers_log_ratio():
    torch.manual_seed(0)
    old, teacher, mask = -torch.rand(3, 4), -torch.rand(3, 4), torch.rand(3, 4) < 0.7
    old[~mask] = torch.nan
    advantages = torch.tensor([1.0, 0.0, -2.0])
    found = teacher_advantages(advantages, old, teacher, mask, 0.5)
    for i in range(3):
        for t in range(4):
            slow = (
                advantages[i].item() + 0.5 * (teacher[i, t].item() - old[i, t].item())
                if mask[i, t]
                else 0.0
            )
            assert found[i, t].item() == pytest.approx(slow, abs=1e-6)
    with pytest.raises(ValueError, match="must be"):
        teacher_advantages(advantages, old[:, :3], teacher, mask, 1.0)


def test_in_expectation_the_advantages_gradient_is_that_of_the_kl():
    """sum over y of p(y) * A(y) * d log p(y), A = log q - log p, is minus the gradient of KL(p || q)."""
    (student,), (teacher,) = two(4, 7, rows=1)
    logits = student.clone().requires_grad_()
    logps = logits.log_softmax(-1)
    nothing, mask = torch.zeros(7, dtype=torch.float64), torch.ones(7, 1, dtype=torch.bool)
    advantages = teacher_advantages(nothing, logps[:, None], teacher[:, None], mask, 1.0)[:, 0]
    (policy,) = torch.autograd.grad(
        (logps.exp().detach() * advantages * logps).sum(), logits, retain_graph=True
    )
    (kl,) = torch.autograd.grad(reverse_kl(logps, teacher), logits)
    torch.testing.assert_close(policy, -kl, rtol=1e-5, atol=1e-6)
