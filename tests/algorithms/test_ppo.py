"""PPO's targets against slow loops written from the formulas: no tensor operation spans more than one token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swift_r1.algorithms.ppo import PPOConfig, ppo_targets


def make(seed: int, rows: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(rows, generator=generator, dtype=torch.float64)
    values, old, ref = (
        torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    mask = torch.rand(rows, width, generator=generator) < 0.7
    return rewards, values, old, ref, mask


def slow(
    rewards: Tensor, values: Tensor, old: Tensor, ref: Tensor, mask: Tensor, config: PPOConfig
) -> dict[str, dict]:
    """Advantages and returns by (row, column) of the trained tokens of completions with a reward."""
    tokens = {
        i: [t for t in range(mask.shape[1]) if mask[i, t]]
        for i in range(len(rewards))
        if math.isfinite(rewards[i].item())
    }
    r = {
        (i, t): -config.kl_coef * (old[i, t].item() - ref[i, t].item())
        + (rewards[i].item() if t == places[-1] else 0)
        for i, places in tokens.items()
        for t in places
    }
    if config.whiten_rewards:
        r = whitened(r, shift=False)
    advantages, returns = {}, {}
    for i, places in tokens.items():
        for number, t in enumerate(places):
            total = 0.0
            for k in range(number, len(places)):
                after = values[i, places[k + 1]].item() if k + 1 < len(places) else 0.0
                delta = r[i, places[k]] + config.gamma * after - values[i, places[k]].item()
                total += (config.gamma * config.lam) ** (k - number) * delta
            advantages[i, t], returns[i, t] = total, total + values[i, t].item()
    return {
        "advantages": whitened(advantages) if config.whiten_advantages else advantages,
        "returns": returns,
    }


def whitened(values: dict, shift: bool = True) -> dict:
    if len(set(values.values())) < 2:
        return {key: 0.0 if shift else value for key, value in values.items()}
    mean = sum(values.values()) / len(values)
    std = math.sqrt(sum((value - mean) ** 2 for value in values.values()) / (len(values) - 1))
    return {key: (value - mean * shift) / (std + 1e-4) for key, value in values.items()}


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 5),
    st.integers(1, 7),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([(1.0, 1.0), (0.9, 0.95), (1.0, 0.0)]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_targets_equal_the_loops(
    seed, rows, width, kl_coef, discount, whiten_rewards, whiten_advantages, invalid
):
    rewards, values, old, ref, mask = make(seed, rows, width)
    if invalid:
        rewards[0] = torch.nan
    config = PPOConfig(
        kl_coef=kl_coef,
        gamma=discount[0],
        lam=discount[1],
        whiten_rewards=whiten_rewards,
        whiten_advantages=whiten_advantages,
    )
    found, _ = ppo_targets(rewards, values, mask, config, old_logps=old, ref_logps=ref)
    expected = slow(rewards, values, old, ref, mask, config)
    for name, tensor in (("advantages", found.values), ("returns", found.returns)):
        assert tensor.dtype == torch.float32 and not tensor.requires_grad
        for i in range(rows):
            for t in range(width):
                assert tensor[i, t].item() == pytest.approx(
                    expected[name].get((i, t), 0.0), rel=1e-5, abs=1e-5
                )
    assert found.valid.tolist() == [math.isfinite(reward) for reward in rewards.tolist()]


def test_explained_variance_of_a_perfect_a_constant_and_a_wrong_critic() -> None:
    rewards, mask = torch.tensor([0.0, 1.0]), torch.ones(2, 3)
    right = torch.tensor([[0.0] * 3, [1.0] * 3])
    found = [
        ppo_targets(rewards, v, mask, PPOConfig(lam=1))[1]
        for v in (right, 0 * right + 0.5, 1 - right)
    ]
    assert [metrics["explained_variance"] for metrics in found] == pytest.approx([1, 0, -3])
    assert (
        found[0]["returns/mean"] == 0.5
        and found[0]["returns/std"] == 0.5
        and found[1]["values/mean"] == 0.5
    )
    assert "explained_variance" not in ppo_targets(torch.ones(2), right, mask, PPOConfig(lam=1))[1]
    assert "kl_penalty" not in found[0]
