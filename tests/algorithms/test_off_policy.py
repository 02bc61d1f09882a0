"""The gap between trainer and engine, against slow loops."""

import math
from statistics import mean

import pytest
import torch

from swift_r1.algorithms.aggregation import mean_metrics, sum_metrics
from swift_r1.algorithms.off_policy import (
    completion_weights,
    kept_completions,
    off_policy_metrics,
    weight_metrics,
)


def given(rows=5, width=7):
    generator = torch.Generator().manual_seed(2)
    logps = -torch.randn(rows, width, generator=generator, dtype=torch.float64).abs()
    rollout = logps + 0.3 * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, width, generator=generator) < 0.7
    mask[3] = False
    return logps.masked_fill(~mask, 0.0), rollout.masked_fill(~mask, 0.0), mask.double()


def test_metrics():
    logps, rollout, mask = given()
    rows = [
        [(p, q) for p, q, own in zip(*row, strict=True) if own]
        for row in zip(logps, rollout, mask, strict=True)
    ]
    rows = [[(float(p), float(q)) for p, q in row] for row in rows if row]
    gaps = [p - q for row in rows for p, q in row]
    own, engines = (
        [mean(p for p, _ in row) for row in rows],
        [mean(q for _, q in row) for row in rows],
    )
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
    parts = [
        off_policy_metrics(*(one[rows] for one in (logps, rollout, mask)))
        for rows in (slice(2), slice(2, 5))
    ]
    for found in (whole, sum_metrics(parts)):  # however the step is cut
        found = mean_metrics(found)
        assert found == pytest.approx(
            {f"rollout/{name}": value for name, value in expected.items()}
        )


def test_weights_and_effective_sample_sizes():
    logps, rollout, mask = given()
    rows = [
        [math.exp(p - q) for p, q, own in zip(*row, strict=True) if own]
        for row in zip(logps.tolist(), rollout.tolist(), mask.tolist(), strict=True)
    ]
    rows = [row for row in rows if row]
    tokens, products = [w for row in rows for w in row], [math.prod(row) for row in rows]

    def kish(weights):
        return sum(weights) ** 2 / sum(w * w for w in weights) / len(weights)

    expected = {
        "rollout/ratio_mean": mean(tokens),
        "rollout/ratio_max": max(tokens),
        "rollout/ess_token": kish(tokens),
        "rollout/ess_seq": kish(products),
        "rollout/k3_kl_step": mean([w - 1 - math.log(w) for w in tokens]),
    }
    whole = completion_weights(logps, rollout, mask)
    parts = [
        completion_weights(*(one[rows] for one in (logps, rollout, mask)))
        for rows in (slice(2), slice(2, 5))
    ]
    for found in (whole, torch.cat(parts, 1)):  # however the step is cut
        assert weight_metrics(found) == pytest.approx(expected)
    assert weight_metrics(completion_weights(logps, rollout, 0 * mask)) == {}


def test_effective_sample_sizes_of_long_completions():
    """Products of many ratios are far out of a float's range, their shares are not."""
    rollout = torch.full((3, 4000), -1.0, dtype=torch.float64)
    logps = rollout + torch.tensor([[-0.5], [-0.5], [-3.0]])
    found = weight_metrics(completion_weights(logps, rollout, torch.ones(3, 4000)))
    assert found["rollout/ess_seq"] == pytest.approx(2 / 3)
    assert found["rollout/ratio_max"] == pytest.approx(math.exp(-0.5))
    logps[0] += 0.01  # 40 nats more in all: one completion is left
    found = weight_metrics(completion_weights(logps, rollout, torch.ones(3, 4000)))
    assert found["rollout/ess_seq"] == pytest.approx(1 / 3)


def test_a_completion_is_left_out_where_its_advantage_is_negative_and_its_probability_fell():
    logps = torch.tensor([[-1.0, -2.0, 0.0]] * 4)
    behaviour = torch.tensor(
        [[-0.5, -1.5, 0.0], [-0.5, -1.5, 0.0], [-0.9, -2.0, 0.0], [-2.0, -2.0, 0.0]]
    )
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0])[:, None].expand(4, 3)
    mask = torch.tensor([[1.0, 1.0, 0.0]] * 4)
    assert kept_completions(logps, behaviour, advantages, mask, 0.1).flatten().tolist() == [
        False,
        True,
        True,
        True,
    ]
