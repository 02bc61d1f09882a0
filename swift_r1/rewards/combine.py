"""The reward of a completion, from what the reward functions said."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from swift_r1.rewards.types import RewardColumn

_STD_EPSILON = 1e-4  # as where advantages are divided


class Totals(NamedTuple):
    """Of `N` completions: the weighted sum of the rewards, and what advantages are computed from."""

    rewards: tuple[float, ...]
    objectives: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Composition:
    """How the rewards of several functions become one.

    Attributes:
        weights: one a function, in their order.
        renormalize: where functions have no opinion (None), the weights of the others grow so that their sum stays;
            without it they stay as they are and None adds nothing (ms-swift's behaviour).
        aggregation: `sum_then_normalize` leaves all scaling to the advantages. `normalize_then_sum` (GDPO) sums what
            each function gave after subtracting its mean and dividing by its standard deviation in the group.
        truncated_reward: the reward of a completion that was cut off, whatever the functions said.
        missing_eos_penalty: subtracted from the reward of such a completion.
    """

    weights: tuple[float, ...]
    renormalize: bool = False
    aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    truncated_reward: float | None = None
    missing_eos_penalty: float | None = None

    @classmethod
    def from_flags(cls, args: Any) -> Composition:
        """From the run's arguments."""
        return cls(
            tuple(args.reward_weights or ()),
            args.renormalize_reward_weights,
            args.multi_objective_aggregation,
            args.truncated_reward,
            args.missing_eos_penalty,
        )

    def __call__(self, columns: Sequence[RewardColumn], truncated: Sequence[bool], group_size: int) -> Totals:
        """Totals of `N` completions.

        NaN marks a completion without a usable reward: one that any function could not score, or that none had an
        opinion on.

        Args:
            columns: one a function, each with `N` values.
            truncated: `N`, whether the completion was cut off.
            group_size: completions a prompt; divides `N`.
        """
        rewards = self._sums([column.values for column in columns])
        if self.truncated_reward is not None:
            value = self.truncated_reward
            rewards = tuple(value if cut else reward for reward, cut in zip(rewards, truncated, strict=True))
        if self.missing_eos_penalty is not None:
            penalty = self.missing_eos_penalty
            rewards = tuple(reward - penalty * cut for reward, cut in zip(rewards, truncated, strict=True))
        if self.aggregation == "sum_then_normalize":
            return Totals(rewards, rewards)
        return Totals(rewards, self._sums([_normalized(column.values, group_size) for column in columns]))

    def _sums(self, columns: Sequence[Sequence[float | None]]) -> tuple[float, ...]:
        return tuple(self._sum(row) for row in zip(*columns, strict=True))

    def _sum(self, values: Sequence[float | None]) -> float:
        pairs = [(weight, value) for value, weight in zip(values, self.weights, strict=True) if value is not None]
        if not pairs:
            return math.nan
        total = math.fsum(weight * value for weight, value in pairs)
        there = math.fsum(weight for weight, _ in pairs)
        if self.renormalize and len(pairs) < len(values) and there:
            return total * math.fsum(self.weights) / there
        return total


def _normalized(values: Sequence[float | None], size: int) -> list[float | None]:
    """Each value less its group's mean, divided by its group's sample standard deviation + 1e-4; None and NaN stay."""
    result: list[float | None] = []
    for first in range(0, len(values), size):
        group = values[first : first + size]
        known = [value for value in group if value is not None and not math.isnan(value)]
        if not known or min(known) == max(known):
            result += [value if value is None or math.isnan(value) else 0.0 for value in group]
            continue
        mean = math.fsum(known) / len(known)
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in known) / (len(known) - 1))
        result += [None if value is None else (value - mean) / (std + _STD_EPSILON) for value in group]
    return result
