"""A batch whose groups come one after the other, and are scored as they come."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from swift_r1.rewards.calls import LONGEST_CALL, Answer, Call, column, cut, groups_of, joined
from swift_r1.rewards.isolation import isolated
from swift_r1.rewards.types import RewardBatch, RewardColumn
from swift_r1.rewards.worker import Item

if TYPE_CHECKING:
    from swift_r1.rewards.pool import RewardPool, Submitted

_logger = logging.getLogger("swift_r1.rewards")

_SLACK_SECONDS = 60.0  # of the batch deadline: for killing and replacing workers


class OpenBatch:
    """Takes groups in any order; the result is that of the whole batch in theirs.

    Args:
        pool: calls the functions.
        names: of the functions, in order.
        timeout: seconds a completion.
        trainer_state: as of `RewardBatch`; that of the batches added does not count.
    """

    def __init__(
        self, pool: RewardPool, names: Sequence[str], timeout: float, trainer_state: Mapping[str, int]
    ) -> None:
        self._pool, self._names, self._timeout = pool, names, timeout
        self._state = dict(trainer_state)
        self._parts: dict[int, RewardBatch] = {}
        self._groups: dict[int, Item] = {}
        self._submitted: list[Submitted] = []
        self._waits = False  # the pool takes no calls before the end
        self._spent = dict.fromkeys(names, 0.0)

    def add(self, first: int, part: RewardBatch) -> None:
        """Gives the workers the groups `first`, `first + 1`, ... of the batch. Never waits for them.

        Raises:
            ValueError: not whole groups.
        """
        groups = dict(enumerate(groups_of(part), start=first))
        self._parts[first] = part
        self._groups |= groups
        calls = [call for name in self._names for call in cut(name, groups, self._pool.calls_at_once)]
        if not self._waits:
            submitted = self._pool.submit(calls, self._state)
            self._submitted += submitted
            self._waits = len(submitted) < len(calls)

    def result(self) -> tuple[RewardBatch, list[RewardColumn]]:
        """The whole batch, and one column a function, in the order of the names.

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
        count = len(batch.completions)
        deadline = time.monotonic() + _SLACK_SECONDS + self._timeout * min(2 * count, 2 * LONGEST_CALL)

        def run(calls: Sequence[Call]) -> Iterator[Answer]:
            return self._counted(self._pool.run(calls, self._state, deadline))

        early = self._counted(self._pool.collect(self._submitted, self._state, deadline))
        results = isolated(chain(early, run(self._not_submitted())), groups, run)
        columns = [
            column(name, (results[name, number] for number in range(len(groups))), batch.group_size, self._spent[name])
            for name in self._names
        ]
        for one in columns:
            _warn(one, batch)
        return batch, columns

    def _not_submitted(self) -> list[Call]:
        calls: list[Call] = []
        for name in self._names:
            done = {number for one in self._submitted if one.call.name == name for number in one.call.key}
            rest = {number: item for number, item in self._groups.items() if number not in done}
            calls += cut(name, rest, self._pool.calls_at_once)
        return calls

    def _counted(self, answers: Iterable[Answer]) -> Iterator[Answer]:
        for answer in answers:
            self._spent[answer.call.name] += answer.seconds
            yield answer


def _warn(one: RewardColumn, batch: RewardBatch) -> None:
    if one.invalid:
        first = one.invalid[0]
        prompts = batch.columns.get("prompt_id")
        where = f"prompt {prompts[first.index]}" if prompts else f"completion {first.index}"
        _logger.warning(
            "reward %s: %d of %d completions invalid, the first (%s): %s",
            *(one.name, len(one.invalid), len(one.values), where, first.cause),
        )
