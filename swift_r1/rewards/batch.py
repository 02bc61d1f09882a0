"""A batch whose groups are scored as they arrive, and the interface of what makes the calls for it."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

from pebble import ProcessFuture, ProcessPool

from swift_r1.rewards.calls import LONGEST_CALL, Answer, Call, column_of, cut, groups_of, isolated, joined
from swift_r1.rewards.types import Item, RewardBatch, RewardColumn

_logger = logging.getLogger("swift_r1.rewards")

_SLACK_SECONDS = 60.0  # of the batch deadline: for killing and replacing workers


@dataclass(frozen=True, slots=True)
class Submitted:
    """A call that was given to the workers; `limit` in seconds."""

    call: Call
    future: ProcessFuture[Any]
    limit: float
    pool: ProcessPool

    def result(self, deadline: float, observe: Callable[[], object]) -> Any:
        """What the worker returned; `observe` is called while it is waited for.

        Raises:
            TimeoutError: the call took too long (the future is done then), or the deadline is over.
            BrokenProcessPool: the pool broke down, and perhaps forgot the call.
        """
        while True:
            observe()
            wait = min(0.2, max(0.0, deadline - time.monotonic()))
            try:
                return self.future.result(timeout=wait)
            except TimeoutError:
                if self.future.done() or time.monotonic() >= deadline:
                    raise
                if not self.pool.active:
                    raise BrokenProcessPool("the pool is gone") from None


class RewardCaller(ABC):
    """Scores batches of completions with the reward functions of a run; use it as a context manager.

    Args:
        names: registered names of the reward functions, in order.
        timeout: `--reward_timeout`, seconds per completion.
        calls_at_once: calls that a batch is cut into: enough to keep the workers busy.
    """

    def __init__(self, names: Sequence[str], timeout: float, calls_at_once: int) -> None:
        self.names, self.timeout, self.calls_at_once = tuple(names), timeout, calls_at_once

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def wait_ready(self) -> None:
        """Waits until the plugins are loaded and the rewards are built; the first `score` does so by itself.

        Raises:
            UsageError: a plugin or reward fails.
            RunFailed: no worker is up within its deadline.
        """

    @abstractmethod
    def submit(self, calls: Sequence[Call], state: Mapping[str, int]) -> list[Submitted]:
        """Starts calls without waiting; fewer than asked, or none, where they must wait for the end."""

    @abstractmethod
    def collect(self, submitted: Sequence[Submitted], state: Mapping[str, int], deadline: float) -> Iterator[Answer]:
        """The answers to submitted calls; each has one, in any order."""

    @abstractmethod
    def run(self, calls: Sequence[Call], state: Mapping[str, int], deadline: float) -> Iterator[Answer]:
        """Makes calls and waits for them; every call gets an answer, in any order."""

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
    """Takes groups in any order; the result is that of the whole batch in theirs.

    Args:
        caller: calls the functions.
        names: of the functions, in order.
        trainer_state: as of `RewardBatch`; that of the batches added does not count.
    """

    def __init__(self, caller: RewardCaller, names: Sequence[str], trainer_state: Mapping[str, int]) -> None:
        self._caller, self._names, self._state = caller, names, dict(trainer_state)
        self._parts: dict[int, RewardBatch] = {}
        self._groups: dict[int, Item] = {}
        self._submitted: list[Submitted] = []
        self._waits = False  # no calls are taken before the end
        self._spent = dict.fromkeys(names, 0.0)

    def add(self, first: int, part: RewardBatch) -> None:
        """Gives the workers the groups `first`, `first + 1`, ... of the batch. Never waits for them.

        Raises:
            ValueError: not whole groups.
        """
        groups = dict(enumerate(groups_of(part), start=first))
        self._parts[first] = part
        self._groups |= groups
        if not self._waits:
            calls = [call for name in self._names for call in cut(name, groups, self._caller.calls_at_once)]
            submitted = self._caller.submit(calls, self._state)
            self._submitted += submitted
            self._waits = len(submitted) < len(calls)

    def result(self) -> tuple[RewardBatch, list[RewardColumn]]:
        """The whole batch, and one column per function, in the order of the names.

        Blocks until everything is known or the deadline is over: `reward_timeout` x twice the completions (at most
        64), and a minute. What is not known by then is invalid.

        Raises:
            ValueError: a group was not added, or there is none.
        """
        missing = set(range(max(self._groups, default=0) + 1)) - set(self._groups)
        if missing:
            raise ValueError(f"group {min(missing)} of the batch was not added")
        batch = joined([self._parts[first] for first in sorted(self._parts)], self._state)
        groups = [self._groups[number] for number in range(len(self._groups))]
        longest = self._caller.timeout * min(2 * len(batch.completions), 2 * LONGEST_CALL)
        deadline = time.monotonic() + _SLACK_SECONDS + longest

        def run(calls: Sequence[Call]) -> Iterator[Answer]:
            return self._counted(self._caller.run(calls, self._state, deadline))

        early = self._counted(self._caller.collect(self._submitted, self._state, deadline))
        results = isolated(chain(early, run(self._not_submitted())), groups, run)
        columns = []
        for name in self._names:
            outcomes = (results[name, number] for number in range(len(groups)))
            columns.append(column_of(name, outcomes, batch.group_size, self._spent[name]))
            _warn(columns[-1], batch)
        return batch, columns

    def _not_submitted(self) -> list[Call]:
        calls: list[Call] = []
        for name in self._names:
            done = {number for one in self._submitted if one.call.name == name for number in one.call.key}
            rest = {number: item for number, item in self._groups.items() if number not in done}
            calls += cut(name, rest, self._caller.calls_at_once)
        return calls

    def _counted(self, answers: Iterable[Answer]) -> Iterator[Answer]:
        for answer in answers:
            self._spent[answer.call.name] += answer.seconds
            yield answer


def _warn(column: RewardColumn, batch: RewardBatch) -> None:
    if column.invalid:
        first = column.invalid[0]
        prompts = batch.columns.get("prompt_id")
        where = f"prompt {prompts[first.index]}" if prompts else f"completion {first.index}"
        _logger.warning(
            "reward %s: %d of %d completions invalid, the first (%s): %s",
            *(column.name, len(column.invalid), len(column.values), where, first.cause),
        )
