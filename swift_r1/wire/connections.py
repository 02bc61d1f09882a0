"""How a client is connected to one server, and how many servers are asked at a time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

KEPT = 16  # connections that a client keeps between two rounds, which is one pool
_QUICK_S = 1.0
LIMITS = httpx.Limits(max_connections=256)
_LASTING = httpx.Limits(max_connections=256, keepalive_expiry=60.0)  # half as long as the server keeps them
KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""A connection breaks a minute after its other end has gone silently; an idle one is not dropped on the way."""


class AsyncConnections(httpx.AsyncBaseTransport):
    """Any number of connections to one server, a few to a pool: httpx looks at all connections of a pool for each
    request, which takes longer than the request where there are 256."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._pools: list[httpx.AsyncHTTPTransport] = []
        self._asked: list[int] = []  # of each pool, how many are not answered

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        free = next((number for number, asked in enumerate(self._asked) if asked < KEPT), None)
        if free is None:
            free = len(self._pools)
            self._pools.append(httpx.AsyncHTTPTransport(limits=_LASTING, **self._options))
            self._asked.append(0)
        self._asked[free] += 1
        try:
            return await self._pools[free].handle_async_request(request)
        finally:
            self._asked[free] -= 1

    async def keep_few(self) -> None:
        """Closes all pools but the first, while nothing is asked."""
        closed = self._pools[1:]
        del self._pools[1:]
        del self._asked[1:]
        for pool in closed:
            await pool.aclose()

    async def aclose(self) -> None:
        for pool in self._pools:
            await pool.aclose()


class AsyncClient(httpx.AsyncClient):
    """A client with `AsyncConnections`."""

    def __init__(self, options: Mapping[str, Any], connections: Mapping[str, Any]) -> None:
        self._kept = AsyncConnections(connections)
        super().__init__(**options, transport=self._kept)

    async def keep_few(self) -> None:
        """Closes all connections but a few, while nothing is asked."""
        await self._kept.keep_few()


class ThreadTurns:
    """Lets so many threads work at a time: where 1,000 do, they keep each other from Python's lock and hardly get on.
    One that works for longer than a second waits for a server; it no longer counts, or silent servers would keep the
    others from being asked."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._changed = threading.Condition()
        self._began: dict[object, float] = {}  # oldest first

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around the work."""
        this = object()
        with self._changed:
            while len(self._began) >= self._at_once:
                oldest, began = next(iter(self._began.items()))
                left = began + _QUICK_S - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                else:
                    del self._began[oldest]
            self._began[this] = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                if self._began.pop(this, None) is not None:
                    self._changed.notify()
