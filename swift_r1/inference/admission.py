"""Admission: who may use the engine while weights change.

Generations hold the gate in shared mode. A weight update closes it, so that new ones wait (each with a
deadline), and loads once the running ones have finished: the `wait` policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swift_r1.wire.http_errors import HTTPError


class Admission:
    """Counts running work and lets new work in only while nothing has closed it. One event loop only."""

    def __init__(self) -> None:
        self._closed_by: dict[str, str] = {}
        self._broken: str | None = None
        self._asleep: str | None = None
        self._running = 0
        self._changed = asyncio.Condition()

    @property
    def running(self) -> int:
        return self._running

    @property
    def why_closed(self) -> str | None:
        """What new work waits for, or None while the gate is open."""
        return self._refused or next(iter(self._closed_by.values()), None)

    @property
    def _refused(self) -> str | None:
        """Why new work is turned away at once."""
        return self._asleep or self._broken

    async def close(self, who: str, reason: str) -> None:
        async with self._changed:
            self._closed_by[who] = reason
            self._changed.notify_all()

    async def open(self, who: str) -> None:
        async with self._changed:
            self._closed_by.pop(who, None)
            self._changed.notify_all()

    async def set_broken(self, reason: str | None) -> None:
        """With a reason, waiting and new work is refused until it is called again with None."""
        async with self._changed:
            self._broken = reason
            self._changed.notify_all()

    async def set_asleep(self, reason: str | None) -> None:
        """As `set_broken`, beside it."""
        async with self._changed:
            self._asleep = reason
            self._changed.notify_all()

    def check(self) -> None:
        """Raises HTTPError (503) where new work is turned away."""
        if self._refused is not None:
            raise HTTPError(503, self._refused, 5)

    async def drained(self, deadline_s: float, waiting_for: str) -> None:
        """Waits until no work runs.

        Raises:
            HTTPError: 503 after the deadline.
        """
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._running == 0), deadline_s)
            except TimeoutError as error:
                raise HTTPError(
                    503, f"{waiting_for} waited {deadline_s:g} s for {self._running} running requests to finish", 5
                ) from error

    @asynccontextmanager
    async def shared(self, deadline_s: float) -> AsyncIterator[None]:
        """Runs the body as admitted work.

        Raises:
            HTTPError: 503 where it stayed closed for `deadline_s`, the engine sleeps, or it holds no whole version.
        """
        async with self._changed:
            try:
                await asyncio.wait_for(
                    self._changed.wait_for(lambda: self._refused is not None or not self._closed_by), deadline_s
                )
            except TimeoutError as error:
                raise HTTPError(503, f"waited {deadline_s:g} s for {self.why_closed} to end", 5) from error
            self.check()
            self._running += 1
        try:
            yield
        finally:
            # No await here: a cancelled request must give its place back whatever happens.
            self._running -= 1
            if self._running == 0:
                self._notify_soon()

    def _notify_soon(self) -> None:
        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        self._notifier = asyncio.get_running_loop().create_task(notify())
