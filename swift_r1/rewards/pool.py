"""Reward functions in worker processes that can be killed, so that no reward can hang or end a run.

A call holds one whole group or more. Its time limit is `--reward_timeout` for each of its completions (at most 32 of
them); the worker that is over it is killed and replaced. When a call fails or is late,

1. each of its groups is called alone, so that one bad group costs no other;
2. the completions of a failing group are called one by one, only to learn which are to blame;
3. the group is called again, whole, with those to blame replaced by a copy of a completion that is not.

So the values that count always come from a call with a whole group: a reward that compares the completions of a group
stays right, and one that returns a wrong number of values is caught instead of repaired. The whole of it has a
deadline too; what is not known by then is invalid.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from pebble import CONSTS, ProcessExpired, ProcessFuture, ProcessPool

from swift_r1.errors import RunFailed, UsageError
from swift_r1.rewards.confine import MEMORY_EXIT, end_group, end_strays
from swift_r1.rewards.types import InvalidReward, RewardBatch, RewardColumn
from swift_r1.rewards.worker import Item, Outcome, call_reward, faults, start_worker

_logger = logging.getLogger("swift_r1.rewards")

START_SECONDS = 120.0  # for a worker to import the plugins
_SLACK_SECONDS = 60.0  # of the batch deadline: for killing and replacing workers
_LONGEST_CALL = 32  # completions that a call's time limit counts at most
_CALLS_A_WORKER = 8
_DEADLY = frozenset(("timeout", "died", "memory"))  # kinds of failures that end a worker
CONSTS.term_timeout = 1  # seconds from SIGTERM to SIGKILL


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
    call: Call
    outcomes: list[Outcome]
    seconds: float


@dataclass(frozen=True, slots=True)
class _Task:
    """A scheduled call; `limit` in seconds."""

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


class RewardPool:
    """Scores batches of completions with the reward functions of a run; use it as a context manager.

    Workers start by spawn, so it does not matter what threads or libraries this process has. They import the main
    module of the program again: keep that light.

    Args:
        args: the run's arguments, given to the rewards; the `reward_*` ones are read from it.
        names: registered names of the reward functions, in order.
        plugins: plugin files that the workers load.
    """

    def __init__(self, args: Any, names: Sequence[str], plugins: Sequence[str] = ()) -> None:
        self._names = tuple(names)
        self._timeout = float(args.reward_timeout)
        self._workers = int(args.reward_num_workers)
        self._memory = float(args.reward_memory_limit)
        self._seen: set[int] = set()
        self._mark = secrets.token_hex(8)
        self._initargs = (args, self._names, tuple(plugins), self._mark)
        self._pool: ProcessPool | None = None
        self._ready: ProcessFuture[list[str]] | None = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all workers, whatever they are doing."""
        if self._pool is not None:
            self._worker_ids()
            self._pool.stop()
            self._pool.join()
            self._pool = None
            self._clean(frozenset(self._seen), frozenset())
            self._seen.clear()

    def wait_ready(self) -> None:
        """Waits until a worker has loaded the plugins and built the rewards; the first `score` does so by itself.

        Raises:
            UsageError: a plugin or reward fails in the worker.
            RunFailed: no worker is up within its deadline.
        """
        if self._ready is None:
            return
        try:
            found = self._ready.result(timeout=START_SECONDS)
        except TimeoutError as error:
            raise RunFailed(f"no reward worker was ready within {START_SECONDS:g} s: does a plugin hang?") from error
        except (BrokenProcessPool, ProcessExpired) as error:
            raise RunFailed(f"the reward workers die while they load the plugins: {error}") from error
        self._ready = None
        if found:
            raise UsageError(*found)

    def score(self, batch: RewardBatch) -> list[RewardColumn]:
        """All rewards of a batch, one column a function, in the order of the names.

        Blocks until everything is known or the deadline is over: `reward_timeout` x twice the completions (at most
        64), and a minute.

        Raises:
            ValueError: the batch does not consist of whole groups.
        """
        self.wait_ready()
        groups = _groups(batch)
        count = len(batch.completions)
        deadline = time.monotonic() + _SLACK_SECONDS + self._timeout * min(2 * count, 2 * _LONGEST_CALL)
        spent = dict.fromkeys(self._names, 0.0)

        def run(calls: Sequence[Call]) -> Iterator[Answer]:
            for answer in self._run(calls, batch, deadline):
                spent[answer.call.name] += answer.seconds
                yield answer

        results: dict[tuple[str, int], Outcome] = {}
        failed: list[tuple[str, int]] = []
        # 1: several groups a call, then the groups of failed calls alone
        for answer in run([call for name in self._names for call in self._first_calls(name, groups)]):
            alone = len(answer.outcomes) == 1
            for group, outcome in zip(answer.call.key, answer.outcomes, strict=True):
                results[answer.call.name, group] = outcome
                if outcome.failure is not None and outcome.isolate and not alone:
                    failed.append((answer.call.name, group))
        for answer in run([Call(key, key[0], (groups[key[1]],)) for key in failed]):
            results[answer.call.key] = answer.outcomes[0]
        # 2: completion by completion
        failed = [key for key, outcome in results.items() if outcome.failure is not None and outcome.isolate]
        probes = [
            Call((key, index), key[0], (_single(groups[key[1]], index),))
            for key in failed
            for index in range(batch.group_size)
        ]
        blamed: dict[tuple[str, int], dict[int, Outcome]] = {key: {} for key in failed}
        for answer in run(probes):
            key, index = answer.call.key
            if answer.outcomes[0].failure is not None:
                blamed[key][index] = answer.outcomes[0]
        # 3: the whole group without those to blame
        again = [
            Call(key, key[0], (_without(groups[key[1]], causes),))
            for key, causes in blamed.items()
            if len(causes) < batch.group_size  # with none to blame, it may have been the worker, and gets its chance
        ]
        final = {answer.call.key: answer.outcomes[0] for answer in run(again)}
        for key, causes in blamed.items():
            results[key] = _settled(final.get(key, results[key]), causes, batch.group_size)
        return [self._column(name, results, batch, spent[name]) for name in self._names]

    def _start(self) -> None:
        self._pool = ProcessPool(
            max_workers=self._workers,
            initializer=start_worker,
            initargs=self._initargs,
            context=multiprocessing.get_context("spawn"),  # type: ignore[arg-type]
        )
        self._ready = self._pool.schedule(faults)

    def _first_calls(self, name: str, groups: Sequence[Item]) -> Iterator[Call]:
        """Cuts the groups into calls: enough to keep the workers busy, each of a moderate size."""
        per_call = math.ceil(len(groups) / (self._workers * _CALLS_A_WORKER))
        per_call = max(1, min(per_call, _LONGEST_CALL // len(groups[0].completions)))
        for first in range(0, len(groups), per_call):
            indices = range(first, min(first + per_call, len(groups)))
            yield Call(tuple(indices), name, tuple(groups[index] for index in indices))

    def _run(self, calls: Sequence[Call], batch: RewardBatch, deadline: float) -> Iterator[Answer]:
        """Runs calls on the workers; every call gets an answer, in any order. What dead workers left ends too."""
        hurt = False
        for answer in self._run_all(calls, batch, deadline):
            hurt |= any(outcome.failure and outcome.kind in _DEADLY for outcome in answer.outcomes)
            yield answer
        if hurt:
            living = self._worker_ids()
            self._clean(frozenset(self._seen) - living, living)
            self._seen &= living

    def _worker_ids(self) -> frozenset[int]:
        """Of the processes that are there now; all that were ever seen are remembered until they are cleaned up."""
        living = frozenset(list(self._pool._pool_manager.worker_manager.workers)) if self._pool else frozenset()
        self._seen |= living
        return living

    def _clean(self, dead: frozenset[int], living: frozenset[int]) -> None:
        for worker in dead:
            end_group(worker)
        strays = end_strays(self._mark, living)
        if strays:
            _logger.warning("ended %d processes that rewards left behind", len(strays))

    def _run_all(self, calls: Sequence[Call], batch: RewardBatch, deadline: float) -> Iterator[Answer]:
        aborted: list[Call] = []
        for call, answer in self._attempt(calls, batch, deadline):
            if answer is None:
                aborted.append(call)
            else:
                yield answer
        for call in aborted:  # alone in the pool, a call can only be hurt by itself
            ((_, answer),) = self._attempt([call], batch, deadline)
            yield answer or _failed(call, "its worker process died", "died")

    def _attempt(
        self, calls: Sequence[Call], batch: RewardBatch, deadline: float
    ) -> Iterator[tuple[Call, Answer | None]]:
        """One try of each call. None is for one that the pool's breakdown ended, be the call to blame or not."""
        tasks = [self._schedule(call, batch) for call in calls]
        for call, task in zip(calls, tasks, strict=True):
            try:
                outcomes, seconds = task.result(deadline, self._worker_ids)
            except TimeoutError:
                if task.future.done():
                    yield (
                        call,
                        _failed(call, f"no answer within {task.limit:g} s, worker killed", "timeout", task.limit),
                    )
                else:
                    task.future.cancel()
                    yield call, _failed(call, "not reached before the deadline of the batch", "timeout")
            except ProcessExpired as error:
                if error.exitcode == MEMORY_EXIT:
                    yield call, _failed(call, f"MemoryError: over --reward_memory_limit {self._memory:g} GiB", "memory")
                else:
                    yield call, _failed(call, f"its worker process died (exit code {error.exitcode})", "died")
            except (BrokenProcessPool, CancelledError):
                yield call, None
            else:
                yield call, Answer(call, outcomes, seconds)

    def _schedule(self, call: Call, batch: RewardBatch) -> _Task:
        limit = self._timeout * min(call.size, _LONGEST_CALL)
        arguments = (call.name, call.items, dict(batch.trainer_state), limit)
        assert self._pool is not None, "the pool is closed"
        try:
            future = self._pool.schedule(call_reward, args=arguments, timeout=limit)
        except RuntimeError:  # it broke down: a worker died between two calls, or before it told which call it has
            _logger.warning("the reward workers broke down, and are started again")
            self.close()
            self._start()
            future = self._pool.schedule(call_reward, args=arguments, timeout=limit)
        return _Task(future, limit, self._pool)

    def _column(
        self, name: str, results: dict[tuple[str, int], Outcome], batch: RewardBatch, seconds: float
    ) -> RewardColumn:
        values: list[float | None] = []
        invalid: list[InvalidReward] = []
        size = batch.group_size
        for group in range(len(batch.completions) // size):
            outcome = results[name, group]
            if outcome.failure is not None:
                outcome = _settled(outcome, {}, size)
            values += outcome.values
            invalid += [replace(bad, index=group * size + bad.index) for bad in outcome.invalid]
        if invalid:
            first = invalid[0]
            _logger.warning(
                "reward %s: %d of %d completions invalid, the first (%s): %s",
                *(name, len(invalid), len(values), _where(batch, first.index), first.cause),
            )
        return RewardColumn(name, tuple(values), tuple(invalid), seconds)


def _failed(call: Call, reason: str, kind: str, seconds: float = 0.0) -> Answer:
    return Answer(call, [Outcome(failure=reason, isolate=True, kind=kind)] * len(call.items), seconds)


def _groups(batch: RewardBatch) -> list[Item]:
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


def _single(group: Item, index: int) -> Item:
    return Item([group.completions[index]], {name: [column[index]] for name, column in group.columns.items()})


def _without(group: Item, blamed: dict[int, Outcome]) -> Item:
    """The group with the completions to blame replaced by a copy of the first that is not."""
    good = next(index for index in range(len(group.completions)) if index not in blamed)
    picks = [good if index in blamed else index for index in range(len(group.completions))]
    return Item(
        [group.completions[pick] for pick in picks],
        {name: [column[pick] for pick in picks] for name, column in group.columns.items()},
    )


def _settled(outcome: Outcome, blamed: dict[int, Outcome], size: int) -> Outcome:
    """The outcome of a group, with the completions to blame invalid; all are where the call failed."""
    values = outcome.values if outcome.failure is None else (math.nan,) * size
    invalid = {bad.index: bad for bad in outcome.invalid}
    failures = dict(blamed)
    if outcome.failure is not None:
        failures = dict.fromkeys(range(size), outcome) | failures
    for index, failed in failures.items():
        invalid[index] = InvalidReward(index, failed.failure or "failed", failed.kind)
    return Outcome(
        values=tuple(math.nan if index in invalid else value for index, value in enumerate(values)),
        invalid=tuple(invalid[index] for index in sorted(invalid)),
    )


def _where(batch: RewardBatch, index: int) -> str:
    prompts = batch.columns.get("prompt_id")
    return f"prompt {prompts[index]}" if prompts else f"completion {index}"
