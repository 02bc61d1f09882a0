"""A batch whose groups are scored as they arrive, and the interface of what makes the calls for it."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pebble import ProcessFuture, ProcessPool

from swift_r1.rewards.calls import LONGEST_CALL, Answer, Call, column_of, groups_of, isolated, join_batches, split_calls
from swift_r1.rewards.types import Item, RewardBatch, RewardColumn, RewardFlags
from swift_r1.rewards.worker import load_nothing

_logger = logging.getLogger("swift_r1.rewards")

_CALLS_PER_WORKER = 8
_SLACK_SECONDS = 60.0  # of the batch deadline: for killing and replacing workers


@dataclass(frozen=True, slots=True)
class Submitted:
    """A call that was given to the workers of a pool; `limit` in seconds."""

    call: Call
    future: ProcessFuture[Any]
    limit: float
    pool: ProcessPool


class RewardCaller(ABC):
    """Scores batches of completions with the reward functions of a run; use it as a context manager.

    Args:
        args: the run's arguments, given to the rewards.
        names: registered names of the reward functions, in order.
        load: registers what plugins have; where workers call it, it must pickle.
    """

    def __init__(self, args: RewardFlags, names: Sequence[str], load: Callable[[], object] = load_nothing) -> None:
        self._args, self.names, self._load = args, tuple(names), load
        self._lock = threading.RLock()
        self.timeout = float(args.reward_timeout)
        self.calls_at_once = int(args.reward_num_workers) * _CALLS_PER_WORKER

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def wait_ready(self) -> None:
        """Waits until the plugins are loaded and the rewards are built; the first `score` does so by itself. Raises
        UsageError: a plugin or reward fails; RunFailed: no worker is up within its deadline."""

    def submit(self, calls: Sequence[Call], state: Mapping[str, int]) -> list[Submitted]:
        """Starts calls without waiting; fewer than asked, or none, where they must wait for the end."""
        return []

    @abstractmethod
    def run(
        self, calls: Sequence[Call], state: Mapping[str, int], deadline: float, submitted: Sequence[Submitted] = ()
    ) -> Iterator[Answer]:
        """Makes calls and waits for them and for those submitted; each gets one answer, in any order."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(self, batch: RewardBatch) -> list[RewardColumn]:
        """All rewards of a batch; blocks and raises as `OpenRewardBatch` does."""
        whole = self.open(batch.trainer_state)
        whole.add(0, batch)
        return whole.result()[1]

    def open(self, trainer_state: Mapping[str, int], names: Sequence[str] | None = None) -> OpenRewardBatch:
        """A batch to which groups are added, for all functions or those of some `names`."""
        self.wait_ready()
        return OpenRewardBatch(self, self.names if names is None else names, trainer_state)


class OpenRewardBatch:
    """Takes groups in any order; the result is in the order of their numbers. The `trainer_state` of the batches added
    does not count."""

    def __init__(self, caller: RewardCaller, names: Sequence[str], trainer_state: Mapping[str, int]) -> None:
        self._caller, self._names, self._state = caller, names, dict(trainer_state)
        self._parts: dict[int, RewardBatch] = {}
        self._groups: dict[int, Item] = {}
        self._submitted: list[Submitted] = []
        self._waits = False  # no calls are taken before the end
        self._spent = dict.fromkeys(names, 0.0)

    def add(self, first: int, part: RewardBatch) -> None:
        """Gives the workers groups `first`, `first + 1`, ... of the batch, and does not wait for them."""
        groups = dict(enumerate(groups_of(part), start=first))
        self._parts[first] = part
        self._groups |= groups
        if not self._waits:
            calls = [call for name in self._names for call in split_calls(name, groups, self._caller.calls_at_once)]
            submitted = self._caller.submit(calls, self._state)
            self._submitted += submitted
            self._waits = len(submitted) < len(calls)

    def result(self) -> tuple[RewardBatch, list[RewardColumn]]:
        """The whole batch, and one column per function, in the order of the names.

        Blocks until everything is known or the deadline is over: `reward_timeout` x twice the completions (at most 64),
        and a minute. What is not known by then is invalid. Raises ValueError: a group was not added, or there is none.
        """
        missing = set(range(max(self._groups, default=0) + 1)) - set(self._groups)
        if missing:
            raise ValueError(f"group {min(missing)} of the batch was not added")
        batch = join_batches([self._parts[first] for first in sorted(self._parts)], self._state)
        groups = [self._groups[number] for number in range(len(self._groups))]
        longest = self._caller.timeout * min(2 * len(batch.completions), 2 * LONGEST_CALL)
        deadline = time.monotonic() + _SLACK_SECONDS + longest

        def run(calls: Sequence[Call], submitted: Sequence[Submitted] = ()) -> Iterator[Answer]:
            for answer in self._caller.run(calls, self._state, deadline, submitted):
                self._spent[answer.call.name] += answer.seconds
                yield answer

        results = isolated(run(self._not_submitted(), self._submitted), groups, run)
        columns = []
        for name in self._names:
            column = column_of(name, (results[name, number] for number in range(len(groups))), self._spent[name])
            _warn(column, batch)
            columns.append(column)
        return batch, columns

    def _not_submitted(self) -> list[Call]:
        calls: list[Call] = []
        for name in self._names:
            done = {number for one in self._submitted if one.call.name == name for number in one.call.key}
            rest = {number: item for number, item in self._groups.items() if number not in done}
            calls += split_calls(name, rest, self._caller.calls_at_once)
        return calls


def _warn(column: RewardColumn, batch: RewardBatch) -> None:
    if column.invalid:
        first = column.invalid[0]
        prompts = batch.columns.get("prompt_id")
        where = f"prompt {prompts[first.index]}" if prompts else f"completion {first.index}"
        _logger.warning(
            "reward %s: %d of %d completions invalid, the first (%s): %s",
            *(column.name, len(column.invalid), len(column.values), where, first.cause),
        )
