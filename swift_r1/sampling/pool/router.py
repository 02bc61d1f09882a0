"""Requests over the servers of a fleet: each goes to the least loaded one, and what a lost one has not answered to the
others."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import httpx

from swift_r1.errors import ServerUnreachable
from swift_r1.sampling.pool.session import GIVEN_UP, OtherWeights, ServerLost
from swift_r1.wire.http_errors import ServerRefused
from swift_r1.wire.protocol import RolloutOutput, RolloutRequest

if TYPE_CHECKING:
    from swift_r1.sampling.pool.health import Member, Roster

_REQUESTS_AT_ONCE = 256
_TELL_EVERY_S = 2.0


@dataclass(eq=False, slots=True)
class _Lane:
    """What is asked of one server, from its `epoch` on. `load` counts completions under way."""

    member: Member
    epoch: int
    http: httpx.AsyncClient
    load: int = 0
    asked: dict[str, tuple[RolloutRequest, asyncio.Task[None]]] = field(default_factory=dict)
    watch: asyncio.Task[None] | None = None


class Dispatch:
    """One `Fleet.ask`."""

    def __init__(
        self,
        roster: Roster,
        requests: Sequence[RolloutRequest],
        versions: Container[int],
        on_answer: Callable[[RolloutOutput], None],
        while_waiting: Callable[[], None],
    ) -> None:
        self._roster, self._versions, self._on_answer, self._while_waiting = roster, versions, on_answer, while_waiting
        self._waiting = deque(requests)
        self._lanes: list[_Lane] = []
        self._failures: list[tuple[_Lane, Exception]] = []
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Until all is answered; raises as `Fleet.ask`."""
        loop = asyncio.get_running_loop()

        def came_back() -> None:
            with suppress(RuntimeError):  # all was answered meanwhile
                loop.call_soon_threadsafe(self._wake.set)

        stop_listening = self._roster.listen(came_back)
        told = time.monotonic()
        try:
            while self._waiting or any(lane.asked for lane in self._lanes):
                await self._leave_lost()
                self._assign()
                self._roster.check_any()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), max(told + _TELL_EVERY_S - time.monotonic(), 0.01))
                self._wake.clear()
                await self._take_failures()
                if time.monotonic() - told >= _TELL_EVERY_S:
                    self._while_waiting()
                    told = time.monotonic()
        finally:
            stop_listening()
            for lane in list(self._lanes):
                await self._leave(lane)

    def _assign(self) -> None:
        known = {lane.member for lane in self._lanes}
        for member in self._roster.ready:
            if member not in known and self._waiting:
                lane = _Lane(member, member.epoch, member.client.open_async())
                lane.watch = asyncio.create_task(self._watch(lane))
                self._lanes.append(lane)
        while self._waiting:
            free = [lane for lane in self._lanes if len(lane.asked) < _REQUESTS_AT_ONCE]
            if not free:
                return
            lane, request = min(free, key=lambda one: one.load), self._waiting.popleft()
            lane.load += request.n
            lane.asked[request.request_id] = (request, asyncio.create_task(self._ask(lane, request)))

    async def _ask(self, lane: _Lane, request: RolloutRequest) -> None:
        """An answer is taken as it comes: at any time a request waits, is asked of one lane, or is answered."""
        try:
            output = await lane.member.client.answer(lane.http, request)
            lane.member.link.check(output, self._versions)
            del lane.asked[request.request_id]
            lane.load -= request.n
            self._on_answer(output)
        except Exception as error:  # noqa: BLE001 - judged, or raised, where failures are taken
            self._failures.append((lane, error))
        self._wake.set()

    async def _watch(self, lane: _Lane) -> None:
        try:
            await lane.member.client.watch()
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
                await self._judge(lane, error)

    async def _judge(self, lane: _Lane, error: ServerUnreachable | OtherWeights | ServerRefused) -> None:
        try:
            # It may have to ask the server who it is.
            await asyncio.to_thread(lane.member.link.judge, error)
        except ServerLost:
            self._roster.lose(lane.member, lane.epoch)
        except GIVEN_UP as given_up:
            self._roster.give_up(lane.member, lane.epoch, given_up)

    async def _leave_lost(self) -> None:
        """Servers that were lost elsewhere, in a push."""
        for lane in list(self._lanes):
            if lane.member.epoch != lane.epoch:
                await self._leave(lane)

    async def _leave(self, lane: _Lane) -> None:
        """What the server has not answered waits again, for another one."""
        self._lanes.remove(lane)
        tasks = [task for _, task in lane.asked.values()]
        for task in (*tasks, lane.watch):
            if task is not None:
                task.cancel()
        await asyncio.gather(*tasks, *([lane.watch] if lane.watch else []), return_exceptions=True)
        self._waiting.extendleft(request for request, _ in reversed(lane.asked.values()))
        await lane.http.aclose()
