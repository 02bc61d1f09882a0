"""The optimal token baseline against slow loops, and flags that it does not go with."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from swift_r1.algorithms.methods.optimal_baseline import token_advantages
from swift_r1.errors import UsageError
from swift_r1.flags import RlhfArguments, parse_arguments

GROUP = 4


def given(seed: int) -> dict[str, Tensor]:
    """Three groups of four completions of up to 9 tokens, some of which a tool wrote; the last group's rewards are
    equal, and one reward is not a number."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(12, 9, 5, generator=generator, dtype=torch.float64)
    p = logits.softmax(-1)
    mask = torch.arange(9) < torch.randint(1, 10, (12, 1), generator=generator)
    rewards = torch.rand(12, generator=generator, dtype=torch.float64)
    rewards[1] = math.nan
    rewards[8:] = 0.1
    return {
        "rewards": rewards,
        "old_logps": p[..., 0].log(),
        "squares": p.square().sum(-1),
        "mask": mask & (torch.rand(12, 9, generator=generator) < 0.8),
        "weights": 0.5 + torch.rand(12, 9, generator=generator, dtype=torch.float64),
    }


def loop(one: dict[str, Tensor], weighted: bool) -> list[list[float]]:
    """Token by token, with Python's floats."""
    rewards, logps, squares, mask, weights = (tensor.tolist() for tensor in one.values())
    paths = []  # of each completion, W at each of its own tokens
    for row in range(12):
        total, path = 0.0, []
        for t in range(9):
            if mask[row][t]:
                energy = 1 - 2 * math.exp(logps[row][t]) + squares[row][t]
                total += energy * (weights[row][t] ** 2 if weighted else 1.0)
                path.append(total)
        paths.append(path)
    found = [[0.0] * 9 for _ in range(12)]
    for row in range(8):  # all advantages of the last group are 0
        if math.isnan(rewards[row]):
            continue
        group = range(row // GROUP * GROUP, row // GROUP * GROUP + GROUP)
        own = [t for t in range(9) if mask[row][t]]
        for number, t in enumerate(own):
            there = [i for i in group if not math.isnan(rewards[i]) and len(paths[i]) > number]
            top = sum(rewards[i] * paths[i][number] for i in there)
            found[row][t] = rewards[row] - top / sum(paths[i][number] for i in there)
    return found


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_equals_the_formula(seed: int, weighted: bool) -> None:
    one = given(seed)
    found = token_advantages(
        one["rewards"],
        one["old_logps"],
        one["squares"],
        one["mask"],
        GROUP,
        one["weights"] if weighted else None,
    )
    torch.testing.assert_close(found, torch.tensor(loop(one, weighted)), rtol=1e-5, atol=1e-6)
    assert found[:8].abs().max() > 0.1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--loss_type real", "--loss_type real does not go with it"),
        ("--scale_rewards group", "--scale_rewards group does not go with it"),
        ("--teacher_model t", "--teacher_model does not go with it"),
        ("--num_generations 1", "makes every advantage 0"),
        ("--agent a", "--advantage_estimator optimal_token_baseline does not go with --agent"),
    ],
)
def test_flags_that_do_not_go_with_it(flags: str, message: str) -> None:
    base = "--rlhf_type grpo --model m --dataset d --reward_funcs accuracy "
    base += "--advantage_estimator optimal_token_baseline "
    with pytest.raises(UsageError, match=message):
        parse_arguments(RlhfArguments, (base + flags).split())
    assert parse_arguments(RlhfArguments, base.split()).scale_rewards == "none"
