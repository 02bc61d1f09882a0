"""Advantages against slow loops written from the formulas."""

from __future__ import annotations

import math
import statistics
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_r1.algorithms.advantages import (
    ScaleRewards,
    group_advantages,
    groups_without_signal,
    turn_advantages,
)
from swift_r1.algorithms.kl import rewards_less_kl
from swift_r1.algorithms.methods import ESTIMATORS
from swift_r1.algorithms.methods.gigpo import gigpo_advantages
from swift_r1.errors import UsageError
from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.rlhf import RlhfArguments

NAN = float("nan")


def loop_advantages(rewards: list[float], n: int, estimator: str, scale: str) -> list[float]:
    valid_batch = [r for r in rewards if not math.isnan(r)]
    groups = [rewards[i : i + n] for i in range(0, len(rewards), n)]

    def std(values: list[float]) -> float:
        return statistics.stdev(values) if len(values) > 1 else 0.0

    centred: list[float] = []
    for group in groups:
        valid = [r for r in group if not math.isnan(r)]
        for i, r in enumerate(group):
            others = [x for j, x in enumerate(group) if j != i and not math.isnan(x)]
            if math.isnan(r):
                centred.append(NAN)
            elif estimator == "rloo":
                centred.append(r - statistics.fmean(others) if others else 0.0)
            elif estimator == "reinforce_plus_plus":
                centred.append(r - statistics.fmean(valid_batch))
            else:
                centred.append(r - statistics.fmean(valid))

    result: list[float] = []
    for index, a in enumerate(centred):
        group = [r for r in groups[index // n] if not math.isnan(r)]
        if math.isnan(a):
            result.append(0.0)
        elif scale == "none":
            result.append(a)
        elif estimator.startswith("reinforce_plus_plus"):
            result.append(a / (std([c for c in centred if not math.isnan(c)]) + 1e-4))
        elif scale == "batch":
            result.append(a / (std(valid_batch) + 1e-4))
        else:
            result.append(a / (std(group) + 1e-4))
    return result


rewards_and_groups = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        st.integers(1, 5).flatmap(
            lambda groups: st.lists(
                st.one_of(
                    st.sampled_from([0.0, 1.0, 0.1, 0.5, NAN]),
                    st.floats(-10, 10, width=32).map(lambda x: round(x, 3)),
                ),
                min_size=groups * n,
                max_size=groups * n,
            )
        ),
        st.just(n),
    )
)


@settings(max_examples=100, deadline=None)
@given(
    rewards_and_groups, st.sampled_from(list(ESTIMATORS)), st.sampled_from(get_args(ScaleRewards))
)
def test_equals_the_formula(
    case: tuple[list[float], int], estimator: str, scale: ScaleRewards
) -> None:
    rewards, n = case
    expected = loop_advantages(rewards, n, estimator, scale)
    double = group_advantages(
        torch.tensor(rewards, dtype=torch.float64), n, estimator=estimator, scale_rewards=scale
    )
    assert double.dtype == torch.float64
    assert double.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    single = group_advantages(torch.tensor(rewards), n, estimator=estimator, scale_rewards=scale)
    assert single.dtype == torch.float32
    rounded = loop_advantages(torch.tensor(rewards).tolist(), n, estimator, scale)
    assert single.tolist() == pytest.approx(rounded, rel=1e-6, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.floats(-100, 100, width=32),
    st.integers(1, 9),
    st.sampled_from(list(ESTIMATORS)),
    st.sampled_from(get_args(ScaleRewards)),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_equal_rewards_give_exact_zeros(
    value: float, n: int, estimator: str, scale: ScaleRewards, dtype: torch.dtype
) -> None:
    rewards = torch.full((2 * n,), value, dtype=dtype)
    assert (
        group_advantages(rewards, n, estimator=estimator, scale_rewards=scale).count_nonzero() == 0
    )
    # whose baseline is the batch: an all-right group is better than it
    if estimator != "reinforce_plus_plus":
        rewards = torch.cat([rewards, torch.tensor([0.0, NAN, 1.0] * n, dtype=dtype)])
        assert (
            group_advantages(rewards, n, estimator=estimator, scale_rewards=scale)[
                : 2 * n
            ].count_nonzero()
            == 0
        )


def test_worked_by_hand() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    std = math.sqrt(1 / 3)
    by_hand = {
        ("grpo", "group"): 0.5 / (std + 1e-4),
        ("grpo", "none"): 0.5,
        ("rloo", "none"): 2 / 3,
        ("reinforce_plus_plus", "group"): 0.5 / (std + 1e-4),
    }
    for (estimator, scale), first in by_hand.items():
        advantages = group_advantages(rewards, 4, estimator=estimator, scale_rewards=scale)  # type: ignore[arg-type]
        assert advantages.tolist() == pytest.approx([first, -first, -first, first])


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
def test_an_invalid_reward_changes_no_other(estimator: str) -> None:
    with_invalid = group_advantages(
        torch.tensor([1.0, NAN, 0.0, 2.0, float("inf"), 5.0]), 6, estimator=estimator
    )
    without = group_advantages(torch.tensor([1.0, 0.0, 2.0, 5.0]), 4, estimator=estimator)
    assert with_invalid.tolist() == [without[0], 0, without[1], without[2], 0, without[3]]


def test_groups_without_signal() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, NAN, 1.0, NAN, NAN])
    assert groups_without_signal(rewards, 2).tolist() == [True, False, True, True]


def test_rewards_less_kl() -> None:
    logps = torch.tensor([[-1.0, -2.0, NAN], [-0.5, -0.5, -0.5]])
    ref = torch.tensor([[-1.5, -1.0, -7.0], [-1.0, -2.0, -3.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    less = rewards_less_kl(torch.tensor([1.0, NAN]), logps, ref, mask, beta=0.1)
    assert less[0].item() == pytest.approx(1.0 - 0.1 * (0.5 - 1.0))
    assert less[1].isnan()
    with pytest.raises(ValueError, match="must be"):
        rewards_less_kl(torch.zeros(3), logps, ref, mask, 0.1)


TURN = st.tuples(st.sampled_from([0.0, 1.0, -0.3]), st.sampled_from("abc"))  # reward, state


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.lists(TURN, max_size=4), min_size=1, max_size=3), min_size=1, max_size=2),
    st.sampled_from(get_args(ScaleRewards)),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_turns_of_equal_states_are_compared(
    groups: list[list[list[tuple[float, str]]]], scale: str, gamma: float
) -> None:
    """GiGPO (arXiv 2505.10978) by loops over pairs of turns."""
    rewards = [[[reward for reward, _ in episode] for episode in group] for group in groups]
    states = [[[state for _, state in episode] for episode in group] for group in groups]
    found = gigpo_advantages(rewards, states, scale, 0.7, gamma)

    def back(episode: list[tuple[float, str]], turn: int) -> float:
        return sum(gamma ** (j - turn) * episode[j][0] for j in range(turn, len(episode)))

    everything = [back(e, k) for group in groups for e in group for k in range(len(e))]
    for group, own in zip(groups, found, strict=True):
        for episode, values in zip(group, own, strict=True):
            assert len(values) == len(episode)
            for turn, value in enumerate(values):
                same = [
                    back(other, k)
                    for other in group
                    for k in range(len(other))
                    if other[k][1] == episode[turn][1]
                ]
                difference = back(episode, turn) - statistics.fmean(same)
                if len(same) < 2 or max(same) - min(same) < 1e-12:
                    assert abs(value) < 1e-8
                    continue
                over = {"group": same, "batch": everything}.get(scale)
                divisor = 1.0 if over is None else statistics.stdev(over) + 1e-4
                assert value == pytest.approx(0.7 * difference / divisor, abs=1e-9)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "gigpo compares turns, and there is one"),
        (
            "--gym_env e --advantage_per turn --advantage_estimator reinforce_plus_plus",
            "--advantage_per turn compares the turns of a group",
        ),
    ],
)
def test_flags_that_do_not_go_with_advantages_of_turns(flags: str, message: str) -> None:
    base = "--rlhf_type grpo --model m --dataset d --reward_funcs accuracy --advantage_estimator gigpo "
    with pytest.raises(UsageError, match=message):
        parse_arguments(RlhfArguments, (base + flags).split())
    args = parse_arguments(RlhfArguments, (base + "--tools t --gigpo_gamma 1").split())
    assert args.scale_rewards == "group" and args.credits_turns and args.gigpo_gamma == 1
    gym = parse_arguments(
        RlhfArguments,
        (base + "--gym_env e --advantage_estimator grpo --advantage_per turn").split(),
    )
    assert gym.credits_turns and gym.counts_by_turns


def test_turns_get_the_normalised_rewards_of_what_follows() -> None:
    """GRPO's process supervision (arXiv 2402.03300, 4.1.3): over all turns of a group, then the sum to the end."""
    groups = [[[1.0, 0.0, 2.0], [0.5]], [[3.0], [], [5.0, 4.0]], [[1.0, 1.0], [1.0]]]
    for scale in get_args(ScaleRewards):
        found = turn_advantages(groups, scale)
        everything = [reward for group in groups for episode in group for reward in episode]
        for group, own in zip(groups, found, strict=True):
            rewards = [reward for episode in group for reward in episode]
            over = {"group": rewards, "batch": everything}.get(scale)
            divisor = 1.0 if over is None else statistics.stdev(over) + 1e-4
            for episode, values in zip(group, own, strict=True):
                normal = [(reward - statistics.fmean(rewards)) / divisor for reward in episode]
                assert values == pytest.approx([sum(normal[turn:]) for turn in range(len(normal))])
        assert found[2] == [[0.0, 0.0], [0.0]]
