"""Tools in worker processes that can be killed, as rewards are (`swift_r1.rewards.pool`): whatever a tool does, the
model gets a text, and the run goes on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Self

from pebble import ProcessExpired

from swift_r1.errors import RunFailed, UsageError
from swift_r1.plugins.tools.calling import ToolAnswer, call_tool, registered
from swift_r1.plugins.tools.parsing import ToolCall
from swift_r1.rewards.pool import START_SECONDS, RewardPool
from swift_r1.rewards.types import RewardFlags
from swift_r1.workers.confine import MEMORY_EXIT

_logger = logging.getLogger("swift_r1.tools")
_LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Of each call."""

    seconds: float  # after which its process is killed
    characters: int  # of an answer


class ToolPool:
    """The workers; use it as a context manager. `load` registers the tools in each of them, and must pickle.

    They are as many as the reward workers, with the same memory limit and variables (`--reward_num_workers`,
    `--reward_memory_limit`, `--reward_env`).
    """

    def __init__(self, args: RewardFlags, limits: ToolLimits, load: Callable[[], object]) -> None:
        self._pool = RewardPool(args, (), load)
        self._limits = limits
        self._pool.what = "tool"
        self._memory = float(args.reward_memory_limit)
        self._told: set[str] = set()
        self.running = 0  # calls that have no answer yet; each gets one within its time limit
        self._worked = 0.0

    def __enter__(self) -> Self:
        self._pool.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def wait_ready(self, names: Collection[str]) -> None:
        """Waits for a worker. Raises UsageError where the plugins do not register these tools there; RunFailed: no
        worker is up within its deadline."""
        try:
            found = self._pool.schedule(registered, (), START_SECONDS)[0].result(START_SECONDS)
        except (TimeoutError, BrokenProcessPool, ProcessExpired) as error:
            raise RunFailed(f"no tool worker came up within {START_SECONDS:g} s: {error}") from error
        missing = sorted(set(names).difference(found))
        if missing:
            raise UsageError(
                f"the worker processes do not have the tools {', '.join(missing)}: plugins fail to load there"
            )

    async def call(self, calls: Sequence[ToolCall], names: Collection[str]) -> list[ToolAnswer]:
        """The answers to the calls of a turn, which run together; `names` are those that the model may call."""
        self.running += len(calls)
        try:
            return list(await asyncio.gather(*(self._answer(call, names) for call in calls)))
        finally:
            self.running -= len(calls)
            self._worked = time.monotonic()

    def worked(self) -> float:
        """When a call was under way last, by the monotonic clock."""
        return time.monotonic() if self.running else self._worked

    async def _answer(self, call: ToolCall, names: Collection[str]) -> ToolAnswer:
        if call.name not in names:
            text = f"Error: there is no tool {call.name[:100]!r}; there are {', '.join(sorted(names)) or 'none'}"
            return ToolAnswer(text, "unknown")
        answer = await self._once(call) or await self._once(call)  # a breakdown of the pool is another call's fault
        answer = answer or ToolAnswer("Error: its process died", "error", cause="its worker process died")
        if answer.cause is not None and call.name not in self._told:
            self._told.add(call.name)
            _logger.warning(
                "the tool %s failed: %s (told once per tool; the model gets one line)", call.name, answer.cause
            )
        return answer

    async def _once(self, call: ToolCall) -> ToolAnswer | None:
        """None for a call that ended with the pool's breakdown."""
        limit = self._limits.seconds
        future, pool = self._pool.schedule(
            call_tool, (call.name, call.arguments, limit, self._limits.characters), limit
        )
        done = asyncio.wrap_future(future)
        while not done.done():
            if not pool.active:  # it broke down, and may have forgotten the call
                return None
            await asyncio.wait([done], timeout=_LOOK_SECONDS)
        try:
            return await done
        except TimeoutError:
            text = f"no answer within {limit:g} s"
            return ToolAnswer(f"Error: {text}", "timeout", limit, cause=f"{text}, worker killed")
        except ProcessExpired as error:
            if error.exitcode == MEMORY_EXIT:
                cause = f"over --reward_memory_limit {self._memory:g} GiB"
                return ToolAnswer("Error: MemoryError", "error", cause=cause)
            return ToolAnswer("Error: its process died", "error", cause=f"its process died ({error.exitcode})")
        except (BrokenProcessPool, CancelledError, asyncio.CancelledError):
            if not future.done():
                raise  # this task is cancelled, not the call
            return None
