"""Calls of reward functions: splitting a batch into calls, and finding the completion to blame where one fails.

1. Each group of a failed call is called alone, so that one bad group costs no other;
2. the completions of a failing group are called one by one, only to learn which are to blame;
3. the group is called again, whole, with those to blame replaced by a copy of a completion that is not.

So the values that count always come from a call with a whole group: a reward that compares the completions of a group
stays right, and one that returns a wrong number of values is caught instead of repaired.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swift_r1.rewards.types import InvalidReward, Item, ItemOutcome, RewardBatch, RewardColumn

LONGEST_CALL = 32  # completions that a call's time limit counts at most


@dataclass(frozen=True, slots=True)
class Call:
    """One task for a worker: reward `name` on `items`; `key` is for whoever makes the call."""

    key: Any
    name: str
    items: tuple[Item, ...]

    @property
    def size(self) -> int:
        return sum(len(item.completions) for item in self.items)


@dataclass(frozen=True, slots=True)
class Answer:
    """One outcome per item of the call, and the seconds that it took."""

    call: Call
    outcomes: list[ItemOutcome]
    seconds: float


def split_calls(name: str, groups: Mapping[int, Item], wanted: int) -> list[Call]:
    """All groups in about `wanted` calls of one or more groups, none of them long; the key is the groups' numbers."""
    if not groups:
        return []
    numbers = sorted(groups)
    per_call = math.ceil(len(numbers) / wanted)
    per_call = max(1, min(per_call, LONGEST_CALL // len(groups[numbers[0]].completions)))
    parts = [tuple(numbers[first : first + per_call]) for first in range(0, len(numbers), per_call)]
    return [Call(part, name, tuple(groups[number] for number in part)) for part in parts]


def groups_of(batch: RewardBatch) -> list[Item]:
    """The batch group by group; raises ValueError where these are not whole, or a column has another length."""
    count, size = len(batch.completions), batch.group_size
    if size < 1 or count == 0 or count % size:
        raise ValueError(f"{count} completions are not whole groups of {size}")
    wrong = [name for name, column in batch.columns.items() if len(column) != count]
    if wrong:
        raise ValueError(f"column {wrong[0]} has {len(batch.columns[wrong[0]])} values for {count} completions")
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


def column_of(name: str, outcomes: Iterable[ItemOutcome | RewardColumn], seconds: float) -> RewardColumn:
    """The column of a function from the outcomes of all groups, or its columns of several batches, in order."""
    values: list[float | None] = []
    invalid: list[InvalidReward] = []
    for outcome in outcomes:
        invalid += [replace(bad, index=len(values) + bad.index) for bad in outcome.invalid]
        values += outcome.values
    return RewardColumn(name, tuple(values), tuple(invalid), seconds)


def isolated(
    first: Iterable[Answer], groups: Sequence[Item], run: Callable[[Sequence[Call]], Iterator[Answer]]
) -> dict[tuple[str, int], ItemOutcome]:
    """The outcome of each group from each function, by the function's name and the group's number; none is a failure.

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
    for answer in run([Call(key, key[0], (groups[key[1]],)) for key in failed]):
        results[answer.call.key] = answer.outcomes[0]

    sizes = [len(group.completions) for group in groups]
    blamed: dict[tuple[str, int], dict[int, ItemOutcome]] = {
        key: {} for key, outcome in results.items() if outcome.failure is not None and outcome.isolate
    }
    probes = [
        Call((name, number, index), name, (_picked(groups[number], [index]),))
        for name, number in blamed
        for index in range(sizes[number])
    ]
    for answer in run(probes):
        name, number, index = answer.call.key
        if answer.outcomes[0].failure is not None:
            blamed[name, number][index] = answer.outcomes[0]

    again = [
        Call((name, number), name, (_without(groups[number], causes),))
        for (name, number), causes in blamed.items()
        # With none to blame it may have been the worker, and the group is tried again.
        if len(causes) < sizes[number]
    ]
    results |= {answer.call.key: answer.outcomes[0] for answer in run(again)}
    return {key: _settled(outcome, blamed.get(key, {}), sizes[key[1]]) for key, outcome in results.items()}


def _picked(item: Item, picks: Sequence[int]) -> Item:
    return Item(
        [item.completions[pick] for pick in picks],
        {name: [column[pick] for pick in picks] for name, column in item.columns.items()},
    )


def _without(group: Item, blamed: Mapping[int, ItemOutcome]) -> Item:
    """The group with the completions to blame replaced by a copy of the first that is not."""
    count = len(group.completions)
    good = next(index for index in range(count) if index not in blamed)
    return _picked(group, [good if index in blamed else index for index in range(count)])


def _settled(outcome: ItemOutcome, blamed: Mapping[int, ItemOutcome], size: int) -> ItemOutcome:
    """The outcome of a group of `size`, with the completions to blame invalid; all are where the call failed."""
    values, failures = outcome.values, dict(blamed)
    if outcome.failure is not None:
        values, failures = (math.nan,) * size, dict.fromkeys(range(size), outcome) | failures
    invalid = {bad.index: bad for bad in outcome.invalid}
    invalid |= {i: InvalidReward(i, bad.failure or "failed", bad.kind) for i, bad in failures.items()}
    return ItemOutcome(
        values=tuple(math.nan if index in invalid else value for index, value in enumerate(values)),
        invalid=tuple(invalid[index] for index in sorted(invalid)),
    )
