"""The way out of a sandbox to one proxy.

A sandbox's network is a loopback of its own. Its supervisor listens there and hands the listening socket out; whoever
connects to it inside is joined, outside, with the proxy. So nothing else is in reach, whatever a command asks for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import threading

from swift_r1.sandboxes.local.supervisor import PROXY_PORT

_logger = logging.getLogger("swift_r1.sandboxes")
_READ_BYTES = 1 << 16
_CONNECT_SECONDS = 30.0
_END_SECONDS = 10.0
_REFUSING_SECONDS = 1.0
_MOST_CONNECTIONS = 64  # of a sandbox; package managers open a dozen or two at a time
_REFUSED = "HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: "
_FILES = "/proc/self/fd"
_INSIDE = f"http://127.0.0.1:{PROXY_PORT}"
_NAMES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
VARIABLES = {**dict.fromkeys(_NAMES, _INSIDE), "no_proxy": "localhost,127.0.0.1"}


class Relay:
    """Joins, in a thread of its own, what connects to a socket with another address, until it is closed."""

    def __init__(self, listener: socket.socket, address: tuple[str, int]) -> None:
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._live, args=(listener, address), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_END_SECONDS)

    def _live(self, listener: socket.socket, address: tuple[str, int]) -> None:
        with contextlib.closing(self._loop), listener:
            self._loop.run_until_complete(self._serve(listener, address))

    async def _serve(self, listener: socket.socket, address: tuple[str, int]) -> None:
        joined: set[asyncio.Task[None]] = set()
        accepting = asyncio.create_task(_accept(listener, address, joined))
        await self._stop.wait()
        tasks = [accepting, *joined]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _accept(
    listener: socket.socket, address: tuple[str, int], joined: set[asyncio.Task[None]]
) -> None:
    """Joins what connects, as long as there are not too many: each takes two of this process's files."""
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    said = ""
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
        except OSError as error:  # this process has no more files, or memory
            _logger.warning("a sandbox's connection cannot be taken: %s", error)
            await asyncio.sleep(_REFUSING_SECONDS)
            continue
        full = "" if len(joined) < _MOST_CONNECTIONS else f"it has {_MOST_CONNECTIONS} already"
        full = full or _files_used()
        if not full:
            task = asyncio.create_task(_join(connection, address))
            joined.add(task)
            task.add_done_callback(joined.discard)
            continue
        if full != said:
            _logger.warning("connections of a sandbox to its proxy are refused: %s", full)
            said = full
        await _refuse(connection, full)


def _files_used() -> str:
    """Says that this process has opened most of the files that it may; empty where it has not."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        used = len(os.listdir(_FILES))
    except OSError:  # there is none left to look with
        used = most
    return f"over half of the trainer's {most} files are open" if used > most // 2 else ""


async def _refuse(connection: socket.socket, why: str) -> None:
    """Answers as a proxy, to what was asked or after a while."""
    loop = asyncio.get_running_loop()
    text = f"the sandbox's network: {why}\n"
    with connection, contextlib.suppress(OSError):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REFUSING_SECONDS):
                await loop.sock_recv(connection, _READ_BYTES)
        connection.send(f"{_REFUSED}{len(text)}\r\n\r\n{text}".encode())


async def _join(connection: socket.socket, address: tuple[str, int]) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    # the proxy is not there: the command sees an end
    with contextlib.closing(writer), contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_CONNECT_SECONDS):
            theirs, ours = await asyncio.open_connection(*address)
        try:
            await asyncio.gather(_copy(reader, ours), _copy(theirs, writer))
        finally:
            ours.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    data = await reader.read(_READ_BYTES)
    while data:
        writer.write(data)
        await writer.drain()
        data = await reader.read(_READ_BYTES)
    if writer.can_write_eof():
        writer.write_eof()
