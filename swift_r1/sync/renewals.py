"""The leases on the weights of all servers, renewed in time whatever one of the servers does."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_PER_TTL = 5
_LONGEST_TTL_S = 200.0
_RENEWALS_A_SECOND = 25


@dataclass(eq=False, slots=True)
class Held:
    """One lease. `renew` says whether it succeeded."""

    renew: Callable[[], bool]
    ttl_s: float
    failed: bool = False
    running: bool = False
    ended: bool = False


class Renewals:
    """Renews each lease five times in its time to live, each time in a thread that ends with the answer: a server that
    hangs holds up no other's lease."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Held]] = []
        self._serial = itertools.count()
        self._count = 0
        self._clock: threading.Thread | None = None

    def ttl_s(self, at_least: float) -> float:
        """Seconds for which a lease is taken: longer where there are many, so that renewals stay rare."""
        return max(at_least, min(_LONGEST_TTL_S, self._count * _PER_TTL / _RENEWALS_A_SECOND))

    def add(self, ttl_s: float, renew: Callable[[], bool]) -> Held:
        held = Held(renew, ttl_s)
        with self._changed:
            self._count += 1
            self._plan(held)
            if self._clock is None:
                self._clock = threading.Thread(target=self._run, name="leases", daemon=True)
                self._clock.start()
        return held

    def end(self, held: Held, wait_s: float) -> None:
        """Also waits for a renewal that is under way, at most so long."""
        with self._changed:
            self._count -= not held.ended
            held.ended = True
            self._changed.wait_for(lambda: not held.running, wait_s)

    def _plan(self, held: Held) -> None:
        after = self.ttl_s(held.ttl_s) / _PER_TTL * (2 if held.failed else 1)
        heapq.heappush(self._due, (time.monotonic() + after, next(self._serial), held))
        self._changed.notify_all()

    def _run(self) -> None:
        with self._changed:
            while True:
                while not self._due or (left := self._due[0][0] - time.monotonic()) > 0:
                    self._changed.wait(left if self._due else None)
                held = heapq.heappop(self._due)[2]
                if not held.ended:
                    held.running = True
                    threading.Thread(target=self._renew, args=(held,), name="lease", daemon=True).start()

    def _renew(self, held: Held) -> None:
        renewed = False
        try:
            renewed = held.renew()
        finally:
            with self._changed:
                held.running = False
                held.failed = not renewed
                self._changed.notify_all()
                if not held.ended:
                    self._plan(held)
