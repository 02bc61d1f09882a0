"""Which tokens Clip-Cov and KL-Cov choose, against slow loops; the losses are in `test_policy_loss.py`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swift_r1.algorithms.config import LossConfig
from swift_r1.algorithms.losses import marked_tokens


def step(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, advantages and trained tokens of 12 completions of up to 30; padding is not a number."""
    generator = torch.Generator().manual_seed(seed)
    trained = torch.arange(30) < torch.randint(3, 31, (12, 1), generator=generator)
    logps = -4 * torch.rand(12, 30, generator=generator).square()
    advantages = torch.randn(12, 1, generator=generator).expand(12, 30)
    return logps.masked_fill(~trained, torch.nan), advantages, trained


def slow_covariances(logps: Tensor, advantages: Tensor, trained: Tensor) -> dict[int, float]:
    """By place in the flattened step."""
    places = trained.flatten().nonzero().flatten().tolist()
    x = {place: logps.flatten()[place].item() for place in places}
    a = {place: advantages.flatten()[place].item() for place in places}
    mean_x = sum(x.values()) / len(x)
    mean_a = sum(a.values()) / len(a)
    return {place: (a[place] - mean_a) * (x[place] - mean_x) for place in places}


def places(marked: Tensor) -> set[int]:
    return set(marked.flatten().nonzero().flatten().tolist())


@pytest.mark.parametrize("ratio", [0.0002, 0.05, 1.0])
def test_kl_cov_takes_the_highest(ratio: float) -> None:
    given = step()
    found = slow_covariances(*given)
    most = sorted(found, key=lambda place: -found[place])[: max(int(ratio * len(found)), 1)]
    config = LossConfig(loss_type="kl_cov", kl_cov_ratio=ratio)
    assert places(marked_tokens(*given, config, seed=1)) == set(most)


def test_clip_cov_draws_from_those_between_the_bounds() -> None:
    given = step()
    found = slow_covariances(*given)
    between = {place for place, value in found.items() if 0.3 < value < 1.5}
    above = {place for place, value in found.items() if value >= 1.5}
    assert above and 20 < len(between) < len(found) / 2
    bounds = {"loss_type": "clip_cov", "clip_cov_lb": 0.3, "clip_cov_ub": 1.5}
    some = LossConfig(**bounds, clip_cov_ratio=0.04)
    count = int(0.04 * len(found))
    drawn = [places(marked_tokens(*given, some, seed=seed)) for seed in range(60)]
    assert all(one < between and len(one) == count for one in drawn)
    assert set().union(*drawn) == between  # every one of them sooner or later
    assert drawn[0] == places(marked_tokens(*given, some, seed=0)) != drawn[1]
    assert places(marked_tokens(*given, LossConfig(**bounds, clip_cov_ratio=1.0), 0)) == between
    far = LossConfig(loss_type="clip_cov", clip_cov_lb=50.0, clip_cov_ub=60.0)
    assert not marked_tokens(*given, far, seed=0).any()


@pytest.mark.parametrize("loss_type", ["clip_cov", "kl_cov"])
def test_nothing_is_chosen_where_nothing_is_trained(loss_type: str) -> None:
    logps, advantages, trained = step()
    marked = marked_tokens(logps, advantages, trained & False, LossConfig(loss_type=loss_type), 0)
    assert marked.shape == trained.shape and not marked.any()
