"""Reward functions in worker processes that can be killed, so that no reward can hang or end a run; or in this one.

A call holds one whole group or more. Its time limit is `--reward_timeout` per completion (32 of them at most); a worker
that exceeds it is killed and replaced. What a failed call does to its groups is in `batch.py`.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, TypeVar

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from swift_r1.errors import RunFailed, UsageError
from swift_r1.record.spans import Spans
from swift_r1.rewards.batch import LONGEST_CALL, RewardAnswer, RewardCall, RewardCaller, Submitted
from swift_r1.rewards.types import ItemOutcome, RewardFlags
from swift_r1.rewards.worker import (
    asynchronous_rewards,
    call_inline,
    call_reward,
    end_loop,
    faults,
    load_nothing,
    load_rewards,
    rest,
    start_worker,
)
from swift_r1.workers.confine import MEMORY_EXIT, end_group, end_strays, end_whole
from swift_r1.workers.watchdog import WorkerWatchdog

_logger = logging.getLogger("swift_r1.rewards")
T = TypeVar("T")

START_SECONDS = 120.0  # for a worker to import the plugins
_ASYNC_GRACE_SECONDS = 2.0  # for a worker to end a late coroutine by itself, before it is killed
_LOOK_SECONDS = 0.2


class _Worker(SpawnProcess):
    def terminate(self) -> None:
        """The worker ignores SIGTERM; what it has started ends too."""
        if self.pid is not None and self.is_alive():
            end_whole([self.pid])

    def is_alive(self) -> bool:
        """Where it has ended by itself, what is left of its process group ends too."""
        alive = super().is_alive()
        if self.pid is not None and not alive:
            end_group(self.pid)
        return alive


class _Workers(SpawnContext):
    Process = _Worker


class RewardPool(RewardCaller):
    """Worker processes. Several threads may have a batch open each; where a worker's death breaks the pool down, all
    of them ask again.

    Workers start by spawn, so it does not matter what threads or libraries this process has. They import the main
    module of the program again: keep that light. `what` they work on is said in messages.
    """

    what = "reward"

    def __init__(
        self,
        args: RewardFlags,
        names: Sequence[str],
        load: Callable[[], object] = load_nothing,
        spans: Spans | None = None,
    ) -> None:
        super().__init__(args, names, load, spans)
        self._mark = secrets.token_hex(8)
        self._watchdog: WorkerWatchdog | None = None
        self._asynchronous: frozenset[str] = frozenset()
        self._pool: ProcessPool | None = None
        self._ready: ProcessFuture[tuple[list[str], frozenset[str]]] | None = None

    def start(self) -> None:
        self._watchdog = WorkerWatchdog(self._mark)
        # A new one: a pool that broke down may have forgotten calls.
        self._busy = self._spans.busy("rewards", "reward")
        self._pool = ProcessPool(
            max_workers=int(self._args.reward_num_workers),
            initializer=start_worker,
            initargs=(self._args, self.names, self._load, self._mark, self._watchdog.address),
            context=_Workers(),
        )
        self._ready = self._pool.schedule(asynchronous_rewards)

    def close(self) -> None:
        with self._lock:
            if self._pool is not None:
                self._pool.stop()  # type: ignore[no-untyped-call]  # pebble leaves it untyped
                self._pool.join()
                self._pool = None
            if self._watchdog is not None:
                self._watchdog.close()
                self._watchdog = None
                end_strays(self._mark, frozenset())  # where the watchdog was killed

    def wait_ready(self) -> None:
        if self._ready is None:
            return
        try:
            found, asynchronous = self._ready.result(timeout=START_SECONDS)
        except TimeoutError as error:
            raise RunFailed(f"no reward worker was ready within {START_SECONDS:g} s: does a plugin hang?") from error
        except (BrokenProcessPool, ProcessExpired) as error:
            raise RunFailed(f"the reward workers die while they load the plugins: {error}") from error
        self._ready = None
        if found:
            raise UsageError(*found)
        self._asynchronous = asynchronous

    def submit(self, calls: Sequence[RewardCall], state: Mapping[str, int]) -> list[Submitted]:
        """Fewer than asked, or none, where the pool broke down."""
        submitted: list[Submitted] = []
        try:
            for call in calls:
                submitted.append(self._submit(call, state))
        except RuntimeError as error:
            _logger.warning("the reward workers broke down (%s); later groups are scored at the end", error)
        return submitted

    def run(
        self,
        calls: Sequence[RewardCall],
        state: Mapping[str, int],
        deadline: float,
        submitted: Sequence[Submitted] = (),
    ) -> Iterator[RewardAnswer]:
        aborted: list[RewardCall] = []
        for one in [*submitted, *(self._submit_surely(call, state) for call in calls)]:
            answer = self._answer(one, deadline)
            if answer is None:
                aborted.append(one.call)
            else:
                yield answer
        for call in aborted:  # alone in the pool: a breakdown is its own fault now
            answer = self._answer(self._submit_surely(call, state), deadline)
            yield answer or _failed(call, "its worker process died", "died")

    def _answer(self, one: Submitted, deadline: float) -> RewardAnswer | None:
        """None for a call that ended with the pool's breakdown, whether or not the call is to blame."""
        call = one.call
        try:
            while not one.future.done():
                left = deadline - time.monotonic()
                if left <= 0:
                    one.future.cancel()  # type: ignore[no-untyped-call]  # pebble leaves it untyped
                    return _failed(call, "not reached before the deadline of the batch", "timeout")
                if not one.pool.active:  # it broke down, and may have forgotten the call
                    return None
                futures.wait([one.future], min(_LOOK_SECONDS, left))
            outcomes, seconds = one.future.result()
        except TimeoutError:
            return _failed(call, f"no answer within {one.limit:g} s, worker killed", "timeout", one.limit)
        except ProcessExpired as error:
            if error.exitcode == MEMORY_EXIT:
                limit = float(self._args.reward_memory_limit)
                return _failed(call, f"MemoryError: over --reward_memory_limit {limit:g} GiB", "memory")
            return _failed(call, f"its worker process died (exit code {error.exitcode})", "died")
        except (BrokenProcessPool, CancelledError):
            return None
        return RewardAnswer(call, outcomes, seconds)

    def _submit(self, call: RewardCall, state: Mapping[str, int]) -> Submitted:
        """Raises RuntimeError where the pool has broken down, or its watchdog is gone."""
        limit = self.timeout * min(call.size, LONGEST_CALL)
        grace = _ASYNC_GRACE_SECONDS if call.name in self._asynchronous else 0.0
        arguments = (call.name, call.items, dict(state), limit)
        future, pool = self._schedule(call_reward, arguments, limit + grace)
        return Submitted(call, future, limit, pool)

    def _submit_surely(self, call: RewardCall, state: Mapping[str, int]) -> Submitted:
        return self._surely(lambda: self._submit(call, state))

    def schedule(
        self, function: Callable[..., T], arguments: tuple[Any, ...], limit: float
    ) -> tuple[ProcessFuture[T], ProcessPool]:
        """Any call in a worker, which is killed after `limit` seconds; and the pool, which may break down under it."""
        return self._surely(lambda: self._schedule(function, arguments, limit))

    def _schedule(
        self, function: Callable[..., T], arguments: tuple[Any, ...], limit: float
    ) -> tuple[ProcessFuture[T], ProcessPool]:
        with self._lock:
            assert self._pool is not None and self._watchdog is not None, "the pool is closed"
            if not self._watchdog.alive:
                raise RuntimeError("their watchdog was killed")
            future: ProcessFuture[T] = self._pool.schedule(function, args=arguments, timeout=limit)
            busy = self._busy
            busy.add()
            future.add_done_callback(lambda _future: busy.done())
            return future, self._pool

    def _surely(self, submit: Callable[[], T]) -> T:
        with self._lock:
            try:
                return submit()
            except RuntimeError as error:  # mostly: a worker died between two calls
                _logger.warning("the %s workers broke down (%s), and are started again", self.what, error)
                self.close()
                self.start()
                return submit()


def _failed(call: RewardCall, reason: str, kind: str, seconds: float = 0.0) -> RewardAnswer:
    return RewardAnswer(call, [ItemOutcome(failure=reason, isolate=True, kind=kind)] * len(call.items), seconds)


class InlineRewards(RewardCaller):
    """Reward functions in the trainer's own process, for those that need its GPU or keep a state across calls.

    Nothing protects the run then: a call that hangs hangs it, one that crashes or takes all memory ends it, and rewards
    see the whole environment. Nothing is called before all completions are there. Exceptions and bad values are still
    invalid rewards, found completion by completion as in the pool, so a stateful reward that failed sees some
    completions again.
    """

    def start(self) -> None:
        self._busy = self._spans.busy("rewards", "reward")
        self.at_the_end = frozenset(self.names)
        load_rewards(self._args, self.names, self._load)

    def close(self) -> None:
        end_loop()

    def wait_ready(self) -> None:
        found = faults()
        if found:
            raise UsageError(*found)

    def run(
        self,
        calls: Sequence[RewardCall],
        state: Mapping[str, int],
        deadline: float,
        submitted: Sequence[Submitted] = (),
    ) -> Iterator[RewardAnswer]:
        for call in calls:
            with self._lock:
                started = time.perf_counter()
                self._busy.add()
                try:
                    outcomes = call_inline(call.name, call.items, state, self.timeout * call.size)
                finally:
                    self._busy.done()
                seconds = time.perf_counter() - started
            yield RewardAnswer(call, outcomes, seconds)
        rest()


def rewards_for(
    args: RewardFlags, names: Sequence[str], load: Callable[[], object] = load_nothing, spans: Spans | None = None
) -> RewardCaller:
    return (InlineRewards if args.reward_isolation == "inline" else RewardPool)(args, names, load, spans)
