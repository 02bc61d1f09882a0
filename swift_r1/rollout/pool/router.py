"""Requests over the servers of a pool: each goes to the least loaded one, what a lost one has not answered to the
others, or to itself when it is back, and a part of what others have not answered to one that comes."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import httpx

from swift_r1.errors import ServerUnreachable
from swift_r1.rollout.calls import OpenCalls
from swift_r1.rollout.pool.health import LOOK_S, Health
from swift_r1.rollout.pool.session import OtherWeights, ServerSession
from swift_r1.wire.protocol import RolloutOutput, RolloutRequest, ServerRefused

logger = logging.getLogger(__name__)

_REQUESTS_AT_ONCE = 256


@dataclass(eq=False, slots=True)
class _Lane:
    """What is asked of one server, from its `epoch` on. `load` counts completions under way."""

    session: ServerSession
    epoch: int
    http: httpx.AsyncClient
    load: int = 0
    answered: int = 0  # requests
    heard: float = 0.0  # when it answered last
    asked: dict[str, tuple[RolloutRequest, asyncio.Task[None]]] = field(default_factory=dict)
    watch: asyncio.Task[None] | None = None


@dataclass
class Router:
    """One `ServerPool.ask`."""

    health: Health
    requests: Sequence[RolloutRequest]
    versions: Container[int]
    on_answer: Callable[[RolloutOutput], None]
    check_going_on: Callable[[], None]
    at_once: int = sys.maxsize  # requests, for whose connections there are files
    calls: OpenCalls | None = None  # more requests, as they come

    def __post_init__(self) -> None:
        self._waiting = deque(self.requests)
        self._returned = 0
        self._known = len(self.requests)
        self._lanes: list[_Lane] = []
        self._failures: list[tuple[_Lane, Exception]] = []
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Until all is answered, with `calls` until these are closed; raises as `ServerPool.ask`."""
        loop = asyncio.get_running_loop()
        if self.calls is not None:
            self.calls.begin(partial(loop.call_soon_threadsafe, self._wake.set))
        try:
            while self._goes_on():
                self._take_calls()
                for lane in list(self._lanes):
                    if lane.session.epoch != lane.epoch:  # lost elsewhere, in a push
                        await self._leave(lane)
                await self._open_lanes()
                self._assign()
                self.health.check_any()
                self.check_going_on()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), LOOK_S)
                self._wake.clear()
                await self._take_failures()
        finally:
            if self.calls is not None:
                self.calls.end()
            for lane in list(self._lanes):
                await self._leave(lane)

    def _goes_on(self) -> bool:
        if self.calls is not None:
            return not self.calls.closed
        return bool(self._waiting) or any(lane.asked for lane in self._lanes)

    def _take_calls(self) -> None:
        more = [] if self.calls is None else self.calls.take()
        self._waiting.extend(more)
        self._known += len(more)

    async def _open_lanes(self) -> None:
        """One for each server that is ready, where there is something to ask of it."""
        known = {lane.session for lane in self._lanes}
        for session in self.health.ready:
            if session in known:
                continue
            if not self._waiting:
                await self._take_back()
            if self._waiting:
                lane = _Lane(session, session.epoch, session.client.open_async())
                lane.watch = asyncio.create_task(self._fail_when_silent(lane))
                self._lanes.append(lane)

    async def _take_back(self) -> None:
        """For a server that has come: what others were asked last waits again, so that each has its share. One that has
        answered half of its requests keeps the rest, which it has probably begun."""
        fair = sum(lane.load for lane in self._lanes) / (len(self._lanes) + 1)
        tasks = []
        for lane in self._lanes:
            while lane.answered < len(lane.asked):
                request, task = next(reversed(lane.asked.values()))
                if lane.load - request.n < fair:
                    break
                del lane.asked[request.request_id]
                lane.load -= request.n
                lane.session.generating.done()
                task.cancel()
                tasks.append(task)
                self._waiting.appendleft(request)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _assign(self) -> None:
        if self._lanes and self._returned:
            if self._returned < self._known:
                unanswered = (self._returned, self._known)
                logger.info("asking again for the %d of %d prompts that were not answered", *unanswered)
            self._returned = 0
        asked = sum(len(lane.asked) for lane in self._lanes)
        while self._waiting and asked < self.at_once:
            free = [lane for lane in self._lanes if len(lane.asked) < _REQUESTS_AT_ONCE]
            if not free:
                return
            asked += 1
            lane = min(free, key=lambda one: one.load)
            request = self._waiting.popleft()
            lane.load += request.n
            lane.session.generating.add()
            lane.asked[request.request_id] = (request, asyncio.create_task(self._ask(lane, request)))

    async def _ask(self, lane: _Lane, request: RolloutRequest) -> None:
        """An answer is taken as it comes: at any time a request waits, is asked of one lane, or is answered."""
        try:
            began = time.monotonic()
            output = await lane.session.client.answer(lane.http, request)
            lane.session.check(output, self.versions)
            lane.heard = time.monotonic()
            lane.session.paced(output, lane.heard - began)
            del lane.asked[request.request_id]
            lane.load -= request.n
            lane.answered += 1
            lane.session.generating.done()
            self.on_answer(output)
        except Exception as error:  # noqa: BLE001 - judged, or raised, where failures are taken
            self._failures.append((lane, error))
        self._wake.set()

    async def _fail_when_silent(self, lane: _Lane) -> None:
        try:
            await lane.session.client.watch(lambda: len(self._lanes), lambda: lane.heard)
        except ServerUnreachable as error:
            self._failures.append((lane, error))
            self._wake.set()

    async def _take_failures(self) -> None:
        while self._failures:  # more may come while one is judged
            lane, error = self._failures.pop(0)
            if not isinstance(error, ServerUnreachable | OtherWeights | ServerRefused):
                raise error
            if lane in self._lanes:
                await self._leave(lane)
                # It may have to ask the server who it is.
                judge = partial(lane.session.judge, error)
                await asyncio.to_thread(self.health.attempt, lane.session, lane.epoch, judge)

    async def _leave(self, lane: _Lane) -> None:
        """What the server has not answered waits again, for another one."""
        self._lanes.remove(lane)
        tasks = [task for _, task in lane.asked.values()] + ([lane.watch] if lane.watch else [])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._waiting.extendleft(request for request, _ in reversed(lane.asked.values()))
        self._returned += len(lane.asked)
        lane.session.generating.done(len(lane.asked))
        await lane.http.aclose()
