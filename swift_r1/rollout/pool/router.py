"""Requests over the servers of a pool: each goes to the least loaded one, what a lost one has not answered to the
others, or to itself when it is back, and a part of what others have not answered to one that comes."""

from __future__ import annotations

import asyncio
import heapq
import logging
import sys
from collections import deque
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from swift_r1.errors import ServerUnreachable
from swift_r1.rollout.calls import OpenCalls
from swift_r1.rollout.pool.health import LOOK_S, Connection, Health
from swift_r1.rollout.pool.session import OtherWeights, ServerSession
from swift_r1.wire.client import CONCURRENT_REQUESTS, RequestLane
from swift_r1.wire.protocol import RolloutOutput, RolloutRequest, ServerRefused

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Lane:
    """The requests that one server has in its `connection`. `load` counts completions under way, `answered` requests."""

    connection: Connection
    requests: RequestLane
    load: int = 0
    answered: int = 0

    @property
    def session(self) -> ServerSession:
        return self.connection.session


class Router:
    """One `ServerPool.ask`, on the loop of the servers. Once it is over it begins no further one.

    Args:
        at_once: the most requests, for whose connections there are files.
        on_refused: hears of each answer by other weights than those asked for.
    """

    def __init__(
        self,
        health: Health,
        calls: OpenCalls,
        versions: Container[int],
        at_once: int = sys.maxsize,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._health = health
        self._calls = calls
        self._versions = versions
        self._at_once = at_once
        self._on_refused = on_refused
        self._waiting: deque[RolloutRequest] = deque()
        self._returned = 0
        self._known = 0
        self._lanes: list[_Lane] = []
        self._failures: list[tuple[_Lane, Exception]] = []
        self._wake = asyncio.Event()

    async def run(self, on_answer: Callable[[RolloutOutput], None]) -> None:
        """Asks until the calls are closed. `on_answer` gets each output as it comes, and must not wait. Raises as
        `ServerPool.ask`."""
        self._on_answer = on_answer
        loop = asyncio.get_running_loop()
        self._calls.begin(partial(loop.call_soon_threadsafe, self._wake.set))
        try:
            while not self._calls.closed:
                self._take_calls()
                for lane in list(self._lanes):
                    if lane.connection.over:  # lost elsewhere, in a push
                        await self._leave_for_good(lane)
                self._open_lanes()
                self._assign()
                self._health.check_any()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._wake.wait()
                self._wake.clear()
                await self._take_failures()
        finally:
            self._calls.end()
            for lane in list(self._lanes):
                await self._leave(lane)

    def _take_calls(self) -> None:
        more = self._calls.take()
        self._waiting.extend(more)
        self._known += len(more)

    def _open_lanes(self) -> None:
        """One for each server that is ready, where there is something to ask of it."""
        known = {lane.connection for lane in self._lanes}
        for connection in self._health.ready:
            if connection in known:
                continue
            if not self._waiting:
                self._take_back()
            if self._waiting:
                self._lanes.append(self._lane(connection))

    def _lane(self, connection: Connection) -> _Lane:
        def failed(error: Exception) -> None:
            self._failures.append((lane, error))
            self._wake.set()

        def check(output: RolloutOutput) -> None:
            connection.session.check(output, self._versions)

        client = connection.session.client
        read = self._calls.read_image
        lane = _Lane(connection, RequestLane(client, failed, lambda: len(self._lanes), check, read))
        return lane

    def _take_back(self) -> None:
        """Makes room for a server that has come: what others were asked last waits again, so that each has its share.
        One that has answered half of its requests keeps the rest, which it has probably begun."""
        fair = sum(lane.load for lane in self._lanes) / (len(self._lanes) + 1)
        for lane in self._lanes:
            asked = lane.requests.asked
            while lane.answered < len(asked):
                task, request = next(reversed(asked.items()))
                if lane.load - request.n < fair:
                    break
                lane.requests.take_back(task)
                lane.load -= request.n
                lane.session.generating.done()
                self._waiting.appendleft(request)

    def _assign(self) -> None:
        if self._lanes and self._returned:
            if self._returned < self._known:
                unanswered = (self._returned, self._known)
                logger.info(
                    "asking again for the %d of %d prompts that were not answered", *unanswered
                )
            self._returned = 0
        asked = sum(len(lane.requests.asked) for lane in self._lanes)
        free = []
        for number, lane in enumerate(self._lanes):
            if len(lane.requests.asked) < CONCURRENT_REQUESTS:
                free.append((lane.load, number, lane))
        heapq.heapify(free)
        while self._waiting and free and asked < self._at_once:
            _, number, lane = heapq.heappop(free)
            request = self._waiting.popleft()
            asked += 1
            lane.load += request.n
            lane.session.generating.add()
            lane.requests.ask(request, partial(self._answered, lane, request.n))
            if len(lane.requests.asked) < CONCURRENT_REQUESTS:
                heapq.heappush(free, (lane.load, number, lane))

    def _answered(
        self, lane: _Lane, completions: int, output: RolloutOutput, seconds: float
    ) -> None:
        lane.session.paced(output, seconds)
        lane.load -= completions
        lane.answered += 1
        lane.session.generating.done()
        self._on_answer(output)
        self._wake.set()

    async def _take_failures(self) -> None:
        while self._failures:  # more may come while one is judged
            lane, error = self._failures.pop(0)
            if not isinstance(error, ServerUnreachable | OtherWeights | ServerRefused):
                raise error
            if lane in self._lanes:
                if isinstance(error, OtherWeights):
                    self._on_refused()
                await self._leave_for_good(lane)
                # It may have to ask the server who it is.
                judge = partial(lane.session.judge, error)
                await asyncio.to_thread(self._health.attempt, lane.connection, judge)

    async def _leave_for_good(self, lane: _Lane) -> None:
        await self._leave(lane)
        await lane.session.client.drop_connections()

    async def _leave(self, lane: _Lane) -> None:
        """Has what the server has not answered wait again, for another one."""
        self._lanes.remove(lane)
        unanswered = await lane.requests.leave()
        self._waiting.extendleft(reversed(unanswered))
        self._returned += len(unanswered)
        lane.session.generating.done(len(unanswered))
