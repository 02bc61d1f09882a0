"""Reward functions in the trainer's own process, for those that need its GPU or keep a state across calls.

What is then not protected: a call that hangs hangs the run, one that crashes or takes all memory ends it, and
nothing is stripped from its environment. Nothing is called before all completions are there. Exceptions and bad values
are still invalid rewards, found completion by completion as in the pool, so a reward with a state sees some completions
more than once after it failed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from swift_r1.errors import UsageError
from swift_r1.rewards.calls import Answer, Call
from swift_r1.rewards.pool import RewardPool, Submitted
from swift_r1.rewards.worker import call_inline, end_loop, faults, load_rewards


class InlineRewards(RewardPool):
    """A `RewardPool` without processes: the same calls, made here, one after the other."""

    def _start(self) -> None:
        load_rewards(*self._initargs[:3])

    def close(self) -> None:
        end_loop()

    def wait_ready(self) -> None:
        """Says what could not be built.

        Raises:
            UsageError: a plugin or reward fails.
        """
        if found := faults():
            raise UsageError(*found)

    def submit(self, calls: Sequence[Call], state: Mapping[str, int]) -> list[Submitted]:
        """Takes none: this process has other work until all completions are there."""
        return []

    def run(self, calls: Sequence[Call], state: Mapping[str, int], deadline: float) -> Iterator[Answer]:
        for call in calls:
            started = time.perf_counter()
            with self._lock:
                outcomes = call_inline(call.name, call.items, state, self._timeout * call.size)
            yield Answer(call, outcomes, time.perf_counter() - started)


def rewards_for(args: Any, names: Sequence[str], plugins: Sequence[str] = ()) -> RewardPool:
    """The way of calling rewards that `--reward_isolation` asks for."""
    return (InlineRewards if args.reward_isolation == "inline" else RewardPool)(args, names, plugins)
