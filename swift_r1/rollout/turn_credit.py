"""What is added to the advantages of single turns of episodes, by their rewards and the states that they began in."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Sequence
from itertools import chain, groupby
from typing import TYPE_CHECKING, TypeVar

from swift_r1.algorithms.advantages import turn_advantages
from swift_r1.algorithms.methods import ESTIMATORS
from swift_r1.rollout.trajectory import Trajectory

if TYPE_CHECKING:
    from swift_r1.flags.run import RunFlags

_T = TypeVar("_T")


def turn_credit(trajectories: Sequence[Trajectory], args: RunFlags) -> list[list[float]] | None:
    """Returns for each trajectory (whole groups, one after another) what is added to the advantage of each of its turns;
    nothing for one without a valid reward, which counts for no other. None where all of an episode has one advantage."""
    if not args.credits_turns:
        return None
    of_turns = ESTIMATORS[args.advantage_estimator].of_turns
    groups = [list(group) for _, group in groupby(trajectories, key=lambda one: one.group)]
    scale = str(args.scale_rewards)
    if of_turns is None:
        rewards = [[_valid(one, one.turn_rewards) for one in group] for group in groups]
        found = turn_advantages(rewards, scale)  # type: ignore[arg-type]  # checked by the parser
        return list(chain.from_iterable(found))
    rewards = [[_valid(one, _rewards(one)) for one in group] for group in groups]
    states = [[_valid(one, states_of(one)) for one in group] for group in groups]
    return list(chain.from_iterable(of_turns(rewards, states, scale, args)))


def _valid(one: Trajectory, values: Sequence[_T]) -> Sequence[_T]:
    return () if math.isnan(one.objective) else values


def _rewards(one: Trajectory) -> Sequence[float]:
    """Returns the rewards of turns; where nobody gave any, the last turn has the episode's."""
    turns = len(one.turns)
    return one.turn_rewards or [0.0] * (turns - 1) + [one.objective] * min(turns, 1)


def states_of(one: Trajectory) -> list[Hashable]:
    """Returns what each turn began with: the messages that its call read more than the one before it. None where that is
    not known."""
    states: list[Hashable] = [None] * len(one.turns)
    for turn, step in enumerate(one.steps):
        if step["said"] is not None:
            read = [(message.get("role"), message.get("content")) for message in step["read"]]
            states[turn] = json.dumps(read, sort_keys=True)
    return states
