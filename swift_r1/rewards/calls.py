"""Calls of reward functions as data: what is asked, what came back, and how groups are cut and put together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swift_r1.rewards.types import InvalidReward, RewardBatch, RewardColumn
from swift_r1.rewards.worker import Item, Outcome

LONGEST_CALL = 32  # completions that a call's time limit counts at most


@dataclass(frozen=True, slots=True)
class Call:
    """One task for a worker: reward `name` on `items`; `key` is the caller's."""

    key: Any
    name: str
    items: tuple[Item, ...]

    @property
    def size(self) -> int:
        return sum(len(item.completions) for item in self.items)


@dataclass(frozen=True, slots=True)
class Answer:
    """One outcome an item of the call, and the seconds that it took."""

    call: Call
    outcomes: list[Outcome]
    seconds: float


def failed(call: Call, reason: str, kind: str, seconds: float = 0.0) -> Answer:
    return Answer(call, [Outcome(failure=reason, isolate=True, kind=kind)] * len(call.items), seconds)


def cut(name: str, groups: Mapping[int, Item], wanted: int) -> list[Call]:
    """All groups in about `wanted` calls of one or more groups, none of them long; the key is the groups' numbers."""
    if not groups:
        return []
    numbers = sorted(groups)
    per_call = math.ceil(len(numbers) / wanted)
    per_call = max(1, min(per_call, LONGEST_CALL // len(groups[numbers[0]].completions)))
    parts = [tuple(numbers[first : first + per_call]) for first in range(0, len(numbers), per_call)]
    return [Call(part, name, tuple(groups[number] for number in part)) for part in parts]


def groups_of(batch: RewardBatch) -> list[Item]:
    """The batch group by group.

    Raises:
        ValueError: it does not consist of whole groups, or a column is not as long as it.
    """
    count, size = len(batch.completions), batch.group_size
    if size < 1 or count == 0 or count % size:
        raise ValueError(f"{count} completions are not whole groups of {size}")
    wrong = [name for name, column in batch.columns.items() if len(column) != count]
    if wrong:
        raise ValueError(f"column {wrong[0]} has {len(batch.columns[wrong[0]])} values for {count} completions")
    return [
        Item(
            list(batch.completions[first : first + size]),
            {name: list(column[first : first + size]) for name, column in batch.columns.items()},
        )
        for first in range(0, count, size)
    ]


def single(group: Item, index: int) -> Item:
    return Item([group.completions[index]], {name: [column[index]] for name, column in group.columns.items()})


def without(group: Item, blamed: Mapping[int, Outcome]) -> Item:
    """The group with the completions to blame replaced by a copy of the first that is not."""
    good = next(index for index in range(len(group.completions)) if index not in blamed)
    picks = [good if index in blamed else index for index in range(len(group.completions))]
    return Item(
        [group.completions[pick] for pick in picks],
        {name: [column[pick] for pick in picks] for name, column in group.columns.items()},
    )


def settled(outcome: Outcome, blamed: Mapping[int, Outcome], size: int) -> Outcome:
    """The outcome of a group of `size`, with the completions to blame invalid; all are where the call failed."""
    values = outcome.values if outcome.failure is None else (math.nan,) * size
    invalid = {bad.index: bad for bad in outcome.invalid}
    failures = dict(blamed)
    if outcome.failure is not None:
        failures = dict.fromkeys(range(size), outcome) | failures
    for index, failure in failures.items():
        invalid[index] = InvalidReward(index, failure.failure or "failed", failure.kind)
    return Outcome(
        values=tuple(math.nan if index in invalid else value for index, value in enumerate(values)),
        invalid=tuple(invalid[index] for index in sorted(invalid)),
    )


def column(name: str, outcomes: Iterable[Outcome], size: int, seconds: float) -> RewardColumn:
    """The column of a function from the outcomes of all groups (of `size` completions), in order."""
    values: list[float | None] = []
    invalid: list[InvalidReward] = []
    for outcome in outcomes:
        if outcome.failure is not None:
            outcome = settled(outcome, {}, size)
        invalid += [replace(bad, index=len(values) + bad.index) for bad in outcome.invalid]
        values += outcome.values
    return RewardColumn(name, tuple(values), tuple(invalid), seconds)


def joined(parts: Sequence[RewardBatch], trainer_state: Mapping[str, int]) -> RewardBatch:
    """Batches of the same columns and group size as one."""
    first = parts[0]
    return RewardBatch(
        [text for part in parts for text in part.completions],
        {name: [value for part in parts for value in part.columns[name]] for name in first.columns},
        first.group_size,
        trainer_state,
    )
