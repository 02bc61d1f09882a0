"""A batch whose groups are scored as they arrive, in calls of one or more groups; what makes the calls is in `pool.py`.

Where a call fails,
1. each of its groups is called alone, so that one bad group costs no other;
2. the completions of a failing group are called one by one, only to learn which are to blame;
3. the group is called again, whole, with those to blame replaced by a copy of a completion that is not.

So the values that count always come from a call with a whole group: a reward that compares the completions of a group
stays right, and one that returns a wrong number of values is caught instead of repaired.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Self

from swift_r1.record.spans import Spans
from swift_r1.rewards.types import (
    InvalidReward,
    Item,
    ItemOutcome,
    RewardBatch,
    RewardColumn,
    RewardFlags,
)
from swift_r1.rewards.worker import load_nothing

_logger = logging.getLogger("swift_r1.rewards")

LONGEST_CALL = 32  # completions that a call's time limit counts at most
_CALLS_PER_WORKER = 8
_SLACK_SECONDS = 60.0  # of the batch deadline: for killing and replacing workers


@dataclass(frozen=True, slots=True)
class RewardCall:
    """One task for a worker: reward `name` on `items`; `key` is for whoever makes the call."""

    key: Any
    name: str
    items: tuple[Item, ...]

    @property
    def size(self) -> int:
        return sum(len(item.completions) for item in self.items)


@dataclass(frozen=True, slots=True)
class RewardAnswer:
    """One outcome per item of the call, and the seconds that it took."""

    call: RewardCall
    outcomes: list[ItemOutcome]
    seconds: float


@dataclass(frozen=True, slots=True)
class Submitted:
    """A call that was given to the workers of a pool."""

    call: RewardCall
    given: Future[tuple[list[ItemOutcome], float]]


class RewardCaller(ABC):
    """Scores batches of completions with the reward functions of a run; use it as a context manager.

    Args:
        args: the run's arguments, given to the rewards.
        names: registered names of the reward functions, in order.
        load: registers what plugins have; where workers call it, it must pickle.
        spans: get when there was something to score.
    """

    def __init__(
        self,
        args: RewardFlags,
        names: Sequence[str],
        load: Callable[[], object] = load_nothing,
        spans: Spans | None = None,
    ) -> None:
        self._args = args
        self.names = tuple(names)
        self._load = load
        self._spans = spans or Spans()
        self._lock = threading.RLock()
        self.timeout = float(args.reward_timeout)
        self.calls_at_once = int(args.reward_num_workers) * _CALLS_PER_WORKER

    at_the_end: frozenset[str] = frozenset()
    """Rewards that are called when all groups are there, in as few calls as may be."""

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def wait_ready(self) -> None:
        """Waits until the plugins are loaded and the rewards are built; the first `score` does so by itself. Raises
        UsageError: a plugin or reward fails; RunFailed: no worker is up within its deadline."""

    def submit(self, calls: Sequence[RewardCall], state: Mapping[str, int]) -> list[Submitted]:
        """Starts calls without waiting; none where they must wait for the end."""
        return []

    @abstractmethod
    def run(
        self,
        calls: Sequence[RewardCall],
        state: Mapping[str, int],
        deadline: float,
        submitted: Sequence[Submitted] = (),
    ) -> Iterator[RewardAnswer]:
        """Makes calls and waits for them and for those submitted; each gets one answer, in any order."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(self, batch: RewardBatch) -> list[RewardColumn]:
        """Returns all rewards of a batch; blocks and raises as `OpenRewardBatch` does."""
        whole = self.open(batch.trainer_state)
        whole.add(0, batch)
        return whole.result()[1]

    def open(
        self, trainer_state: Mapping[str, int], names: Sequence[str] | None = None
    ) -> OpenRewardBatch:
        """Returns a batch to which groups are added, for all functions or those of some `names`."""
        self.wait_ready()
        return OpenRewardBatch(self, self.names if names is None else names, trainer_state)


class OpenRewardBatch:
    """Takes groups in any order; the result is in the order of their numbers. The `trainer_state` of the batches added
    does not count."""

    def __init__(
        self, caller: RewardCaller, names: Sequence[str], trainer_state: Mapping[str, int]
    ) -> None:
        self._caller = caller
        self._names = names
        self._state = dict(trainer_state)
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
            names = [name for name in self._names if name not in self._caller.at_the_end]
            calls = [
                call
                for name in names
                for call in split_calls(name, groups, self._caller.calls_at_once)
            ]
            submitted = self._caller.submit(calls, self._state)
            self._submitted += submitted
            self._waits = len(submitted) < len(calls)

    def result(self) -> tuple[RewardBatch, list[RewardColumn]]:
        """Returns the whole batch, and one column per function, in the order of the names.

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

        def run(
            calls: Sequence[RewardCall], submitted: Sequence[Submitted] = ()
        ) -> Iterator[RewardAnswer]:
            nonlocal deadline
            for answer in self._caller.run(calls, self._state, deadline, submitted):
                self._spent[answer.call.name] += answer.seconds
                if answer.call.name in self._caller.at_the_end:  # computed while others waited
                    deadline += answer.seconds
                yield answer

        results = isolated(run(self._not_submitted(), self._submitted), groups, run)
        columns = []
        for name in self._names:
            column = column_of(
                name, (results[name, number] for number in range(len(groups))), self._spent[name]
            )
            _warn(column, batch)
            columns.append(column)
        return batch, columns

    def _not_submitted(self) -> list[RewardCall]:
        calls: list[RewardCall] = []
        for name in self._names:
            done = {
                number
                for one in self._submitted
                if one.call.name == name
                for number in one.call.key
            }
            rest = {number: item for number, item in self._groups.items() if number not in done}
            calls += split_calls(
                name, rest, 1 if name in self._caller.at_the_end else self._caller.calls_at_once
            )
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


def split_calls(name: str, groups: Mapping[int, Item], wanted: int) -> list[RewardCall]:
    """Returns all groups in about `wanted` calls of one or more groups, none of them long; the key is the groups'
    numbers."""
    if not groups:
        return []
    numbers = sorted(groups)
    per_call = math.ceil(len(numbers) / wanted)
    per_call = max(1, min(per_call, LONGEST_CALL // len(groups[numbers[0]].completions)))
    parts = [tuple(numbers[first : first + per_call]) for first in range(0, len(numbers), per_call)]
    return [RewardCall(part, name, tuple(groups[number] for number in part)) for part in parts]


def groups_of(batch: RewardBatch) -> list[Item]:
    """Returns the batch group by group; raises ValueError where these are not whole, or a column has another length."""
    count = len(batch.completions)
    size = batch.group_size
    if size < 1 or count == 0 or count % size:
        raise ValueError(f"{count} completions are not whole groups of {size}")
    wrong = [name for name, column in batch.columns.items() if len(column) != count]
    if wrong:
        raise ValueError(
            f"column {wrong[0]} has {len(batch.columns[wrong[0]])} values for {count} completions"
        )
    whole = Item(batch.completions, batch.columns)
    return [_picked(whole, range(first, first + size)) for first in range(0, count, size)]


def join_batches(parts: Sequence[RewardBatch], trainer_state: Mapping[str, int]) -> RewardBatch:
    """Batches of the same columns and group size as one."""
    first = parts[0]
    return RewardBatch(
        [text for part in parts for text in part.completions],
        {name: [value for part in parts for value in part.columns[name]] for name in first.columns},
        first.group_size,
        trainer_state,
    )


def column_of(
    name: str, outcomes: Iterable[ItemOutcome | RewardColumn], seconds: float
) -> RewardColumn:
    """Returns the column of a function from the outcomes of all groups, or its columns of several batches, in order."""
    values: list[float | None] = []
    invalid: list[InvalidReward] = []
    for outcome in outcomes:
        invalid += [replace(bad, index=len(values) + bad.index) for bad in outcome.invalid]
        values += outcome.values
    return RewardColumn(name, tuple(values), tuple(invalid), seconds)


def isolated(
    first: Iterable[RewardAnswer],
    groups: Sequence[Item],
    run: Callable[[Sequence[RewardCall]], Iterator[RewardAnswer]],
) -> dict[tuple[str, int], ItemOutcome]:
    """Returns the outcome of each group from each function, by the function's name and the group's number; none is a
    failure.

    Args:
        first: answers to calls whose keys are the numbers of their groups.
        groups: all groups, by number.
        run: makes further calls; each gets an answer, in any order.
    """
    results: dict[tuple[str, int], ItemOutcome] = {}
    failed: list[tuple[str, int]] = []
    for answer in first:
        alone = len(answer.outcomes) == 1
        for number, outcome in zip(answer.call.key, answer.outcomes, strict=True):
            results[answer.call.name, number] = outcome
            if outcome.failure is not None and outcome.isolate and not alone:
                failed.append((answer.call.name, number))
    for answer in run([RewardCall(key, key[0], (groups[key[1]],)) for key in failed]):
        results[answer.call.key] = answer.outcomes[0]

    sizes = [len(group.completions) for group in groups]
    blamed: dict[tuple[str, int], dict[int, ItemOutcome]] = {
        key: {}
        for key, outcome in results.items()
        if outcome.failure is not None and outcome.isolate
    }
    probes = [
        RewardCall((name, number, index), name, (_picked(groups[number], [index]),))
        for name, number in blamed
        for index in range(sizes[number])
    ]
    for answer in run(probes):
        name, number, index = answer.call.key
        if answer.outcomes[0].failure is not None:
            blamed[name, number][index] = answer.outcomes[0]

    again = [
        RewardCall((name, number), name, (_without(groups[number], causes),))
        for (name, number), causes in blamed.items()
        # With none to blame it may have been the worker, and the group is tried again.
        if len(causes) < sizes[number]
    ]
    results |= {answer.call.key: answer.outcomes[0] for answer in run(again)}
    return {
        key: _settled(outcome, blamed.get(key, {}), sizes[key[1]])
        for key, outcome in results.items()
    }


def _picked(item: Item, picks: Sequence[int]) -> Item:
    return Item(
        [item.completions[pick] for pick in picks],
        {name: [column[pick] for pick in picks] for name, column in item.columns.items()},
    )


def _without(group: Item, blamed: Mapping[int, ItemOutcome]) -> Item:
    """Returns the group with the completions to blame replaced by a copy of the first that is not."""
    count = len(group.completions)
    good = next(index for index in range(count) if index not in blamed)
    return _picked(group, [good if index in blamed else index for index in range(count)])


def _settled(outcome: ItemOutcome, blamed: Mapping[int, ItemOutcome], size: int) -> ItemOutcome:
    """Returns the outcome of a group of `size`, with the completions to blame invalid; all are where the call
    failed."""
    values = outcome.values
    failures = dict(blamed)
    if outcome.failure is not None:
        values = (math.nan,) * size
        failures = dict.fromkeys(range(size), outcome) | failures
    invalid = {bad.index: bad for bad in outcome.invalid}
    invalid |= {
        i: InvalidReward(i, bad.failure or "failed", bad.kind) for i, bad in failures.items()
    }
    return ItemOutcome(
        values=tuple(math.nan if index in invalid else value for index, value in enumerate(values)),
        invalid=tuple(invalid[index] for index in sorted(invalid)),
    )
