"""Reward functions in worker processes that can be killed, so that no reward can hang or end a run; or in this one.

A call holds one whole group or more. Its time limit is `--reward_timeout` per completion (32 of them at most); a worker
that exceeds it is killed and replaced. What a failed call does to its groups is in `batch.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from swift_r1.errors import UsageError
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
    server_keys,
)
from swift_r1.workers.pool import NoAnswer, WorkerPool

_ASYNC_GRACE_SECONDS = 2.0  # for a worker to end a late coroutine by itself, before it is killed


class RewardPool(RewardCaller):
    """Reward functions in worker processes. Several threads may have a batch open each."""

    def __init__(
        self,
        args: RewardFlags,
        names: Sequence[str],
        load: Callable[[], object] = load_nothing,
        spans: Spans | None = None,
    ) -> None:
        super().__init__(args, names, load, spans)
        self._workers = WorkerPool(
            "reward",
            int(args.reward_num_workers),
            partial(load_rewards, args, self.names, load),
            asynchronous_rewards,
            args.reward_env,
            args.reward_memory_limit,
            server_keys(args, names),
        )
        self._asynchronous: frozenset[str] = frozenset()
        self._busy = self._spans.busy("rewards", "reward")

    def start(self) -> None:
        self._workers.start()

    def close(self) -> None:
        self._workers.close()

    def wait_ready(self) -> None:
        unbuilt, self._asynchronous = self._workers.wait_ready()
        if unbuilt:
            raise UsageError(*unbuilt)

    def submit(self, calls: Sequence[RewardCall], state: Mapping[str, int]) -> list[Submitted]:
        """Starts calls without waiting."""
        return [self._submit(call, state) for call in calls]

    def run(
        self,
        calls: Sequence[RewardCall],
        state: Mapping[str, int],
        deadline: float,
        submitted: Sequence[Submitted] = (),
    ) -> Iterator[RewardAnswer]:
        for waiting in [*submitted, *self.submit(calls, state)]:
            yield self._answer(waiting, deadline)

    def _limit(self, call: RewardCall) -> float:
        return self.timeout * min(call.size, LONGEST_CALL)

    def _submit(self, call: RewardCall, state: Mapping[str, int]) -> Submitted:
        limit = self._limit(call)
        grace = _ASYNC_GRACE_SECONDS if call.name in self._asynchronous else 0.0
        self._busy.add()
        given = self._workers.submit(
            call_reward, (call.name, call.items, dict(state), limit), limit + grace
        )
        given.add_done_callback(lambda _future: self._busy.done())
        return Submitted(call, given)

    def _answer(self, waiting: Submitted, deadline: float) -> RewardAnswer:
        call = waiting.call
        try:
            return RewardAnswer(call, *waiting.given.result(max(0.0, deadline - time.monotonic())))
        except TimeoutError:
            waiting.given.cancel()
            return _failed(call, "not reached before the deadline of the batch", "timeout")
        except NoAnswer as error:
            if error.kind == "timeout":
                limit = self._limit(call)
                return _failed(
                    call, f"no answer within {limit:g} s, worker killed", "timeout", limit
                )
            if error.kind == "memory":
                memory = float(self._args.reward_memory_limit)
                return _failed(
                    call, f"MemoryError: over --reward_memory_limit {memory:g} GiB", "memory"
                )
            return _failed(call, f"its worker process died (exit code {error.code})", "died")


def _failed(call: RewardCall, reason: str, kind: str, seconds: float = 0.0) -> RewardAnswer:
    return RewardAnswer(
        call, [ItemOutcome(failure=reason, isolate=True, kind=kind)] * len(call.items), seconds
    )


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
        unbuilt = faults()
        if unbuilt:
            raise UsageError(*unbuilt)

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
    args: RewardFlags,
    names: Sequence[str],
    load: Callable[[], object] = load_nothing,
    spans: Spans | None = None,
) -> RewardCaller:
    return (InlineRewards if args.reward_isolation == "inline" else RewardPool)(
        args, names, load, spans
    )
