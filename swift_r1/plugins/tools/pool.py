"""Tools in worker processes that can be killed (`swift_r1.workers.pool`): whatever a tool does, the model gets a text,
and the run goes on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self

from swift_r1.data.tool_registry import sandbox_tools, server_tools
from swift_r1.errors import UsageError
from swift_r1.plugins.tools.calling import ToolAnswer, call_tool, load_tools, registered
from swift_r1.plugins.tools.parsing import ToolCall
from swift_r1.rewards.types import RewardFlags
from swift_r1.workers.pool import NoAnswer, WorkerPool

_logger = logging.getLogger("swift_r1.tools")


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Holds the limits of each call."""

    seconds: float  # after which its process is killed
    characters: int  # of an answer


class EpisodeTools(Protocol):
    """Tools that keep something from one call of a conversation to the next."""

    def names(self) -> Collection[str]: ...

    async def call(self, name: str, arguments: str) -> ToolAnswer: ...

    def close(self) -> None: ...


class EpisodeToolsOwner(Protocol):
    """What a run has them from."""

    def episode(self) -> EpisodeTools: ...


class ToolPool:
    """The workers; use it as a context manager. `load` registers the tools in each of them, and must pickle.

    They are as many as the reward workers, with the same memory limit and variables (`--reward_num_workers`,
    `--reward_memory_limit`, `--reward_env`).
    """

    def __init__(self, args: RewardFlags, limits: ToolLimits, load: Callable[[], object]) -> None:
        self._workers = WorkerPool(
            "tool",
            int(args.reward_num_workers),
            partial(load_tools, load),
            registered,
            args.reward_env,
            args.reward_memory_limit,
        )
        self._limits = limits
        self._memory = float(args.reward_memory_limit)
        self._warned: set[str] = set()
        self.running = 0  # calls that have no answer yet; each gets one within its time limit
        self._worked = 0.0

    def __enter__(self) -> Self:
        self._workers.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.close()

    def wait_ready(self, names: Collection[str]) -> None:
        """Waits for a worker. Raises UsageError where the plugins do not register these tools there; RunFailed: no
        worker is up within its deadline."""
        elsewhere = (server_tools(), sandbox_tools())
        missing = sorted(set(names).difference(*elsewhere, self._workers.wait_ready()))
        if missing:
            raise UsageError(
                f"the worker processes do not have the tools {', '.join(missing)}: plugins fail to load there"
            )

    async def call(
        self,
        calls: Sequence[ToolCall],
        names: Collection[str],
        episode: Sequence[EpisodeTools] = (),
    ) -> list[ToolAnswer]:
        """Returns the answers to the calls of a turn, which run together; `names` are those that the model may call,
        `episode` what its conversation has of its own."""
        self.running += len(calls)
        try:
            return list(
                await asyncio.gather(*(self._answer(call, names, episode) for call in calls))
            )
        finally:
            self.running -= len(calls)
            self._worked = time.monotonic()

    def worked(self) -> float:
        """Returns when a call was under way last, by the monotonic clock."""
        return time.monotonic() if self.running else self._worked

    async def _answer(
        self, call: ToolCall, names: Collection[str], episode: Sequence[EpisodeTools]
    ) -> ToolAnswer:
        if call.name not in names:
            text = f"Error: there is no tool {call.name[:100]!r}; there are {', '.join(sorted(names)) or 'none'}"
            return ToolAnswer(text, "unknown")
        own = [one for one in episode if call.name in one.names()]
        if own:
            answer = await own[0].call(call.name, call.arguments)
        else:
            answer = await self._once(call)
        if answer.cause is not None and call.name not in self._warned:
            self._warned.add(call.name)
            _logger.warning(
                "the tool %s failed: %s (told once per tool; the model gets one line)",
                call.name,
                answer.cause,
            )
        return answer

    async def _once(self, call: ToolCall) -> ToolAnswer:
        limit = self._limits.seconds
        arguments = (call.name, call.arguments, limit, self._limits.characters)
        try:
            return await asyncio.wrap_future(self._workers.submit(call_tool, arguments, limit))
        except NoAnswer as error:
            if error.kind == "timeout":
                text = f"no answer within {limit:g} s"
                return ToolAnswer(
                    f"Error: {text}", "timeout", limit, cause=f"{text}, worker killed"
                )
            if error.kind == "memory":
                cause = f"over --reward_memory_limit {self._memory:g} GiB"
                return ToolAnswer("Error: MemoryError", "error", cause=cause)
            return ToolAnswer(
                "Error: its process died", "error", cause=f"its process died ({error.code})"
            )
