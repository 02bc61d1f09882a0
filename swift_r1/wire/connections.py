"""The event loop on which a process talks to its rollout servers, with the one HTTP client that works on it."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import httpx

Item = TypeVar("Item")
Result = TypeVar("Result")
logger = logging.getLogger(__name__)

KEPT = 16  # connections to a server that are kept between two rounds, which is one pool
# half as long as the server keeps them
_LASTING = httpx.Limits(max_connections=256, keepalive_expiry=60.0)
_LOOK_S = 0.2
_CLOSE_S = 10.0
_THREADS = 32
KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""A connection breaks a minute after its other end has gone silently; an idle one is not dropped on the way."""


@dataclass(eq=False, slots=True)
class _Pool:
    """A few connections to one server. `asked` counts the requests whose answers are not read to the end."""

    transport: httpx.AsyncHTTPTransport
    asked: int = 0
    retired: bool = False

    async def done(self) -> None:
        self.asked -= 1
        await self.close_if_unused()

    async def close_if_unused(self) -> None:
        if self.retired and not self.asked:
            await self.transport.aclose()


class _Body(httpx.AsyncByteStream):
    """The body of an answer; `ended` is called once it is closed."""

    def __init__(self, body: Any, ended: Callable[[], Awaitable[None]]) -> None:
        self._body = body
        self._ended = ended

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._body:
            yield piece

    async def aclose(self) -> None:
        await self._body.aclose()
        await self._ended()


class ServerConnections(httpx.AsyncBaseTransport):
    """Any number of connections to any number of servers, a few to a pool: httpx looks at all connections of a pool for
    each request, which takes longer than the request where there are 256."""

    def __init__(self) -> None:
        self._pools: dict[str, list[_Pool]] = {}  # by scheme, host and port
        self._certificates: ssl.SSLContext | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        pool = self._free_pool(request.url)
        pool.asked += 1
        try:
            response = await pool.transport.handle_async_request(request)
        except BaseException:
            await pool.done()
            raise
        response.stream = _Body(response.stream, pool.done)
        return response

    async def drop(self, url: str, kept: int = 0) -> None:
        """Closes the connections to a server, except so many pools of them, and those in use once they are free."""
        pools = self._pools.get(_server_of(httpx.URL(url)), [])
        dropped = pools[kept:]
        del pools[kept:]
        for pool in dropped:
            pool.retired = True
            await pool.close_if_unused()

    async def aclose(self) -> None:
        for pools in self._pools.values():
            for pool in pools:
                await pool.transport.aclose()

    def _free_pool(self, url: httpx.URL) -> _Pool:
        pools = self._pools.setdefault(_server_of(url), [])
        for pool in pools:
            if pool.asked < KEPT:
                return pool
        if url.scheme == "https" and self._certificates is None:
            # The system's, or those that SSL_CERT_FILE names. Reading them takes 30 ms, and plain HTTP needs none.
            self._certificates = ssl.create_default_context()
        verify = self._certificates or False
        pool = _Pool(
            httpx.AsyncHTTPTransport(limits=_LASTING, socket_options=KEEP_ALIVE, verify=verify)
        )
        pools.append(pool)
        return pool


class ServerLoop:
    """The one event loop of a process for its rollout servers: requests, health checks, leases and pushes run on it.
    A thread of its own runs it from the first `shared` to the last `close`.

    Attributes:
        http: the client of all servers; on this loop alone.
        users: how many have opened it, which is about the number of servers.
    """

    _sharing: ClassVar[threading.Lock] = threading.Lock()
    _shared: ClassVar[ServerLoop | None] = None

    def __init__(self) -> None:
        self.users = 0
        self.connections = ServerConnections()
        # Proxies of the environment are for the internet, not for the server beside us.
        self.http = httpx.AsyncClient(transport=self.connections, trust_env=False)
        self._over = asyncio.Event()
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        # More than there are by default: some may wait for a silent server, and others make pieces.
        self._loop.set_default_executor(ThreadPoolExecutor(_THREADS, "rollout servers"))
        self._thread = threading.Thread(target=self._run, name="rollout servers", daemon=True)
        self._thread.start()

    @classmethod
    def shared(cls) -> ServerLoop:
        """Opens the loop of this process; each opening needs a `close`."""
        with cls._sharing:
            if cls._shared is None:
                cls._shared = cls()
            cls._shared.users += 1
            return cls._shared

    @classmethod
    def forget(cls) -> None:
        """Leaves the loop to the parent process, whose thread is not here, after a fork."""
        cls._sharing = threading.Lock()
        cls._shared = None

    def close(self) -> None:
        """Ends the loop with the last of its users, whatever still runs on it; then its connections are closed."""
        with ServerLoop._sharing:
            self.users -= 1
            if self.users:
                return
            if ServerLoop._shared is self:
                ServerLoop._shared = None
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            logger.warning(
                "the connections to the rollout servers were not closed within %g s", _CLOSE_S
            )

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Runs `work` on the loop; cancelling the result cancels it. Raises RuntimeError once the loop has ended."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Waits for `work` on the loop, which ends with this wait; for other threads than the loop's."""
        running = self.start(work)
        try:
            return running.result()
        finally:
            running.cancel()

    def call(self, work: Callable[[], Result]) -> Result:
        """Calls `work` on the loop: what only this thread touches needs no lock."""

        async def called() -> Result:
            return work()

        return self.run(called())

    def run_with_items(
        self,
        produce: Callable[[Callable[[Item], None]], Coroutine[Any, Any, Result]],
        on_item: Callable[[Item], None],
        poll: Callable[[], None] = lambda: None,
    ) -> Result:
        """Runs `produce` on the loop, and here, in the calling thread, `on_item` with each item that it gives to the
        function that it gets, and `poll` again and again. What these two raise cancels it, and is raised when it has
        ended; what it raises is raised after its last item."""
        items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        end = object()

        async def watched() -> Result:
            items.put(asyncio.current_task())
            try:
                return await produce(items.put)
            finally:
                items.put(end)

        running = self.start(watched())
        task = items.get()
        item = None
        try:
            while item is not end:
                poll()
                try:
                    item = items.get(timeout=_LOOK_S)
                except queue.Empty:
                    continue
                if item is not end:
                    on_item(item)
        finally:
            if item is not end:
                self._loop.call_soon_threadsafe(task.cancel)
            while item is not end:
                item = items.get()
        return running.result()

    def _run(self) -> None:
        with self._runner as runner:
            runner.run(self._until_over())

    async def _until_over(self) -> None:
        await self._over.wait()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self.http.aclose()


os.register_at_fork(after_in_child=ServerLoop.forget)


async def pieces_of(body: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Yields the pieces of a body, each of which a thread makes, since that may take a while."""
    pieces = iter(body)
    while True:
        piece = await asyncio.to_thread(next, pieces, None)
        if piece is None:
            return
        yield piece


def _server_of(url: httpx.URL) -> str:
    return f"{url.scheme}://{url.netloc.decode()}"
