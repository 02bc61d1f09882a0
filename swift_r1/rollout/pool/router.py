"""Requests over the servers of a pool: each goes to the least loaded one, what a lost one has not answered to the
others, or to itself when it is back, and a part of what others have not answered to one that comes."""

from __future__ import annotations

import asyncio
import heapq
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Container, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial

from swift_r1.errors import ServerUnreachable
from swift_r1.rollout.calls import OpenCalls
from swift_r1.rollout.pool.health import LOOK_S, Health, Stay
from swift_r1.rollout.pool.session import OtherWeights, ServerSession
from swift_r1.wire.connections import KEPT, AsyncClient
from swift_r1.wire.protocol import RolloutOutput, RolloutRequest, ServerRefused

logger = logging.getLogger(__name__)

_REQUESTS_AT_ONCE = 256


@dataclass(eq=False, slots=True)
class _Lane:
    """The requests that one server has in its `stay`. `load` counts completions under way."""

    stay: Stay
    http: AsyncClient
    load: int = 0
    answered: int = 0  # requests
    heard: float = 0.0  # when it answered last
    asked: dict[str, tuple[RolloutRequest, asyncio.Task[None]]] = field(default_factory=dict)
    watch: asyncio.Task[None] | None = None

    @property
    def session(self) -> ServerSession:
        return self.stay.session


@dataclass
class Router:
    """One `ServerPool.ask`."""

    health: Health
    calls: OpenCalls
    versions: Container[int]
    on_answer: Callable[[RolloutOutput], None]
    look: Callable[[], None]
    at_once: int = sys.maxsize  # requests, for whose connections there are files
    clients: dict[ServerSession, AsyncClient] = field(default_factory=dict)  # of this event loop, for later asks too

    def __post_init__(self) -> None:
        self._waiting: deque[RolloutRequest] = deque()
        self._returned = 0
        self._known = 0
        self._lanes: list[_Lane] = []
        self._failures: list[tuple[_Lane, Exception]] = []
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Asks until the calls are closed; raises as `ServerPool.ask`."""
        loop = asyncio.get_running_loop()
        self.calls.begin(partial(loop.call_soon_threadsafe, self._wake.set))
        try:
            while not self.calls.closed:
                self._take_calls()
                for lane in list(self._lanes):
                    if lane.stay.over:  # lost elsewhere, in a push
                        await self._leave(lane, for_good=True)
                await self._open_lanes()
                self._assign()
                self.health.check_any()
                self.look()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), LOOK_S)
                self._wake.clear()
                await self._take_failures()
        finally:
            self.calls.end()
            for lane in list(self._lanes):
                await self._leave(lane)

    def _take_calls(self) -> None:
        more = self.calls.take()
        self._waiting.extend(more)
        self._known += len(more)

    async def _open_lanes(self) -> None:
        """One for each server that is ready, where there is something to ask of it."""
        known = {lane.stay for lane in self._lanes}
        for stay in self.health.ready:
            if stay in known:
                continue
            session = stay.session
            if not self._waiting:
                await self._take_back()
            if self._waiting:
                if session not in self.clients:
                    self.clients[session] = session.client.open_async()
                lane = _Lane(stay, self.clients[session])
                lane.watch = asyncio.create_task(self._fail_when_silent(lane))
                self._lanes.append(lane)

    async def _take_back(self) -> None:
        """Makes room for a server that has come: what others were asked last waits again, so that each has its share.
        One that has answered half of its requests keeps the rest, which it has probably begun."""
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
        free = [
            (lane.load, number, lane) for number, lane in enumerate(self._lanes) if len(lane.asked) < _REQUESTS_AT_ONCE
        ]
        heapq.heapify(free)
        while self._waiting and free and asked < self.at_once:
            _, number, lane = heapq.heappop(free)
            request = self._waiting.popleft()
            asked += 1
            lane.load += request.n
            lane.session.generating.add()
            lane.asked[request.request_id] = (request, asyncio.create_task(self._ask(lane, request)))
            if len(lane.asked) < _REQUESTS_AT_ONCE:
                heapq.heappush(free, (lane.load, number, lane))

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
                await self._leave(lane, for_good=True)
                # It may have to ask the server who it is.
                judge = partial(lane.session.judge, error)
                await asyncio.to_thread(self.health.attempt, lane.stay, judge)

    async def _leave(self, lane: _Lane, for_good: bool = False) -> None:
        """Has what the server has not answered wait again, for another one. Its connections are closed where it is left
        `for_good`."""
        self._lanes.remove(lane)
        tasks = [task for _, task in lane.asked.values()] + ([lane.watch] if lane.watch else [])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._waiting.extendleft(request for request, _ in reversed(lane.asked.values()))
        self._returned += len(lane.asked)
        lane.session.generating.done(len(lane.asked))
        if for_good:
            del self.clients[lane.session]
            await lane.http.aclose()


class RequestLoop:
    """An event loop, and the client of each server that was asked in it."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.clients: dict[ServerSession, AsyncClient] = {}

    def run(self, router: Router) -> None:
        self._runner.run(router.run(), context=copy_context())

    def forget(self, kept: Collection[ServerSession]) -> None:
        """Closes all connections but a few to each of the servers that are `kept`."""

        async def forget() -> None:
            for session, client in list(self.clients.items()):
                if session in kept:
                    await client.keep_few()
                else:
                    del self.clients[session]
                    await client.aclose()

        self._runner.run(forget())

    def close(self) -> None:
        self.forget(())
        self._runner.close()


class RequestLoops:
    """The event loops of a run, one for each `ServerPool.ask` that goes on at the same time: each goes on with the
    connections of one before it."""

    def __init__(self) -> None:
        self._free: list[RequestLoop] = []
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def one(self, sessions: Collection[ServerSession], at_once: int) -> Iterator[RequestLoop]:
        """Lends a loop to a thread. After an error nothing of it is used again; else the connections to `sessions` are
        kept, where there are files for them beside `at_once` requests."""
        with self._lock:
            loop = self._free.pop() if self._free else RequestLoop()
        try:
            yield loop
            loop.forget(sessions if KEPT * len(sessions) <= at_once else ())
        except BaseException:
            loop.close()
            raise
        with self._lock:
            if not self._closed:
                self._free.append(loop)
                return
        loop.close()

    def close(self) -> None:
        """Closes all loops that nobody uses, and each other one when it is given back."""
        with self._lock:
            self._closed = True
            loops = self._free
            self._free = []
        for loop in loops:
            loop.close()
