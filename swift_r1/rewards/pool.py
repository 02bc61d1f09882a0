"""Reward functions in worker processes that can be killed, so that no reward can hang or end a run.

A call holds one whole group or more. Its time limit is `--reward_timeout` for each of its completions (at most 32 of
them); the worker that is over it is killed and replaced. What a failed call does to its groups is `isolation.py`.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.context import SpawnContext, SpawnProcess
from types import TracebackType
from typing import Any, Self

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from swift_r1.errors import RunFailed, UsageError
from swift_r1.rewards.calls import LONGEST_CALL, Answer, Call, failed
from swift_r1.rewards.confine import MEMORY_EXIT, end_group, end_strays, end_whole
from swift_r1.rewards.open_batch import OpenBatch
from swift_r1.rewards.types import RewardBatch, RewardColumn
from swift_r1.rewards.watchdog import Watchdog
from swift_r1.rewards.worker import Readiness, call_reward, readiness, start_worker

_logger = logging.getLogger("swift_r1.rewards")

START_SECONDS = 120.0  # for a worker to import the plugins
_CALLS_A_WORKER = 8
_ASYNC_GRACE_SECONDS = 2.0  # for a worker to end a late coroutine by itself, before it is killed
_DEADLY = frozenset(("timeout", "died", "memory"))  # kinds of failures that end a worker


@dataclass(frozen=True, slots=True)
class Submitted:
    """A call that a worker will make, or makes; `limit` in seconds."""

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


class _Worker(SpawnProcess):
    def terminate(self) -> None:
        """Ends the worker, which ignores SIGTERM, and whatever it has started."""
        if self.pid is not None and self.is_alive():
            end_whole([self.pid])


class _Workers(SpawnContext):
    Process = _Worker


class RewardPool:
    """Scores batches of completions with the reward functions of a run; use it as a context manager.

    Several threads may have a batch open each. Where a worker's death breaks the pool down, all of them ask again.

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
        self._lock = threading.RLock()  # of what is replaced in a breakdown
        self._mark = secrets.token_hex(8)
        self._initargs = (args, self._names, tuple(plugins), self._mark)
        self._watchdog: Watchdog | None = None
        self._asynchronous: frozenset[str] = frozenset()
        self._pool: ProcessPool | None = None
        self._ready: ProcessFuture[Readiness] | None = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all workers, whatever they are doing."""
        with self._lock:
            if self._pool is not None:
                self._worker_ids()
                self._pool.stop()
                self._pool.join()
                self._pool = None
                self._clean(frozenset(self._seen), frozenset())
                self._seen.clear()
            if self._watchdog is not None:
                self._watchdog.close()
                self._watchdog = None

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
        if found.faults:
            raise UsageError(*found.faults)
        self._asynchronous = found.asynchronous

    def score(self, batch: RewardBatch) -> list[RewardColumn]:
        """All rewards of a batch, one column a function, in the order of the names; blocks as `OpenBatch.result` does.

        Raises:
            ValueError: the batch does not consist of whole groups.
        """
        whole = self.open(batch.trainer_state)
        whole.add(0, batch)
        return whole.result()[1]

    def open(self, trainer_state: Mapping[str, int], names: Sequence[str] | None = None) -> OpenBatch:
        """A batch to which groups are added as they come, for all functions or those of some `names`."""
        self.wait_ready()
        return OpenBatch(self, self._names if names is None else names, self._timeout, trainer_state)

    @property
    def calls_at_once(self) -> int:
        """Calls that a batch is cut into: enough to keep the workers busy."""
        return self._workers * _CALLS_A_WORKER

    def submit(self, calls: Sequence[Call], state: Mapping[str, int]) -> list[Submitted]:
        """Gives calls to the workers without waiting; fewer than asked, or none, where the pool broke down."""
        submitted = []
        for call in calls:
            try:
                submitted.append(self._submit(call, state))
            except RuntimeError as error:
                _logger.warning("the reward workers broke down (%s); what comes is scored at the end", error)
                break
        self._worker_ids()
        return submitted

    def run(self, calls: Sequence[Call], state: Mapping[str, int], deadline: float) -> Iterator[Answer]:
        """Makes calls and waits for them; every call gets an answer, in any order."""
        return self.collect([self._submit_surely(call, state) for call in calls], state, deadline)

    def collect(self, submitted: Sequence[Submitted], state: Mapping[str, int], deadline: float) -> Iterator[Answer]:
        """The answers to submitted calls, each has one. What dead workers left is ended after the last."""
        hurt = False
        for answer in self._collect_all(submitted, state, deadline):
            hurt |= any(outcome.failure and outcome.kind in _DEADLY for outcome in answer.outcomes)
            yield answer
        if hurt:
            with self._lock:
                living = self._worker_ids()
                self._clean(frozenset(self._seen) - living, living)
                self._seen &= living

    def _start(self) -> None:
        self._watchdog = Watchdog(self._mark)
        self._pool = ProcessPool(
            max_workers=self._workers,
            initializer=start_worker,
            initargs=(*self._initargs, self._watchdog.address),
            context=_Workers(),  # type: ignore[arg-type]
        )
        self._ready = self._pool.schedule(readiness)

    def _worker_ids(self) -> frozenset[int]:
        """Of the processes that are there now; all that were ever seen are remembered until they are cleaned up."""
        with self._lock:
            living = frozenset(list(self._pool._pool_manager.worker_manager.workers)) if self._pool else frozenset()
            self._seen |= living
            return living

    def _clean(self, dead: frozenset[int], living: frozenset[int]) -> None:
        for worker in dead:
            end_group(worker)
        strays = end_strays(self._mark, living)
        if strays:
            _logger.warning("ended %d processes that rewards left behind", len(strays))

    def _collect_all(
        self, submitted: Sequence[Submitted], state: Mapping[str, int], deadline: float
    ) -> Iterator[Answer]:
        aborted: list[Call] = []
        for one in submitted:
            answer = self._answer(one, deadline)
            if answer is None:
                aborted.append(one.call)
            else:
                yield answer
        for call in aborted:  # alone in the pool, a call can only be hurt by itself
            answer = self._answer(self._submit_surely(call, state), deadline)
            yield answer or failed(call, "its worker process died", "died")

    def _answer(self, one: Submitted, deadline: float) -> Answer | None:
        """None for a call that the pool's breakdown ended, be the call to blame or not."""
        call = one.call
        try:
            outcomes, seconds = one.result(deadline, self._worker_ids)
        except TimeoutError:
            if one.future.done():
                return failed(call, f"no answer within {one.limit:g} s, worker killed", "timeout", one.limit)
            one.future.cancel()
            return failed(call, "not reached before the deadline of the batch", "timeout")
        except ProcessExpired as error:
            if error.exitcode == MEMORY_EXIT:
                return failed(call, f"MemoryError: over --reward_memory_limit {self._memory:g} GiB", "memory")
            return failed(call, f"its worker process died (exit code {error.exitcode})", "died")
        except (BrokenProcessPool, CancelledError):
            return None
        return Answer(call, outcomes, seconds)

    def _submit(self, call: Call, state: Mapping[str, int]) -> Submitted:
        """Raises RuntimeError where the pool has broken down, or nobody watches it."""
        limit = self._timeout * min(call.size, LONGEST_CALL)
        grace = _ASYNC_GRACE_SECONDS if call.name in self._asynchronous else 0.0
        arguments = (call.name, call.items, dict(state), limit)
        with self._lock:
            assert self._pool is not None and self._watchdog is not None, "the pool is closed"
            if not self._watchdog.alive:
                raise RuntimeError("their watchdog was killed")
            future = self._pool.schedule(call_reward, args=arguments, timeout=limit + grace)
            return Submitted(call, future, limit, self._pool)

    def _submit_surely(self, call: Call, state: Mapping[str, int]) -> Submitted:
        with self._lock:
            try:
                return self._submit(call, state)
            except RuntimeError as error:  # mostly a worker died between two calls, or before it told which call it has
                _logger.warning("the reward workers broke down (%s), and are started again", error)
                self.close()
                self._start()
                return self._submit(call, state)
