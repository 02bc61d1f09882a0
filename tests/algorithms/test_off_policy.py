"""The gap between trainer and engine, against slow loops."""

import math
from statistics import mean

import pytest
import torch

from swift_r1.algorithms import mean_metrics, sum_metrics
from swift_r1.algorithms.off_policy import kept_completions, off_policy_metrics


def given(rows=5, width=7):
    generator = torch.Generator().manual_seed(2)
    logps = -torch.randn(rows, width, generator=generator, dtype=torch.float64).abs()
    rollout = logps + 0.3 * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, width, generator=generator) < 0.7
    mask[3] = False
    return logps.masked_fill(~mask, 0.0), rollout.masked_fill(~mask, 0.0), mask.double()


def test_metrics():
    logps, rollout, mask = given()
    rows = [[(p, q) for p, q, own in zip(*row, strict=True) if own] for row in zip(logps, rollout, mask, strict=True)]
    rows = [[(float(p), float(q)) for p, q in row] for row in rows if row]
    gaps = [p - q for row in rows for p, q in row]
    own, engines = [mean(p for p, _ in row) for row in rows], [mean(q for _, q in row) for row in rows]
    differences = [q - p for p, q in zip(own, engines, strict=True)]
    expected = {
        "kl": -mean(gaps),
        "k3_kl": mean(math.exp(gap) - gap - 1 for gap in gaps),
        "chi2_token": mean(math.exp(gap) ** 2 for gap in gaps) - 1,
        "chi2_seq": mean(math.exp(-one) ** 2 for one in differences) - 1,
        "training_ppl": mean(math.exp(-one) for one in own),
        "rollout_ppl": mean(math.exp(-one) for one in engines),
        "log_ppl_diff": mean(differences),
        "log_ppl_abs_diff": mean(map(abs, differences)),
        "ppl_ratio": mean(map(math.exp, differences)),
    }
    whole = off_policy_metrics(logps, rollout, mask)
    parts = [off_policy_metrics(*(one[rows] for one in (logps, rollout, mask))) for rows in (slice(2), slice(2, 5))]
    for found in (whole, sum_metrics(parts)):  # however the step is cut
        found = mean_metrics(found)
        assert found == pytest.approx({f"rollout/{name}": value for name, value in expected.items()})


def test_a_completion_is_left_out_where_its_advantage_is_negative_and_its_probability_fell():
    logps = torch.tensor([[-1.0, -2.0, 0.0]] * 4)
    behaviour = torch.tensor([[-0.5, -1.5, 0.0], [-0.5, -1.5, 0.0], [-0.9, -2.0, 0.0], [-2.0, -2.0, 0.0]])
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0])[:, None].expand(4, 3)
    mask = torch.tensor([[1.0, 1.0, 0.0]] * 4)
    assert kept_completions(logps, behaviour, advantages, mask, 0.1).flatten().tolist() == [False, True, True, True]
