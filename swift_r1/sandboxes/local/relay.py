"""The way out of a sandbox to one proxy.

A sandbox's network is a loopback of its own. Its supervisor listens there and hands the listening socket out; whoever
connects to it inside is joined, outside, with the proxy. So nothing else is in reach, whatever a command asks for.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

from swift_r1.sandboxes.local.supervisor import PROXY_PORT

_READ_BYTES = 1 << 16
_CONNECT_SECONDS = 30.0
_END_SECONDS = 10.0
_INSIDE = f"http://127.0.0.1:{PROXY_PORT}"
_NAMES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
VARIABLES = {**dict.fromkeys(_NAMES, _INSIDE), "no_proxy": "localhost,127.0.0.1"}


class Relay:
    """Joins, in a thread of its own, what connects to a socket with another address, until it is closed."""

    def __init__(self, listener: socket.socket, address: tuple[str, int]) -> None:
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete,
            args=(self._serve(listener, address),),
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_END_SECONDS)

    async def _serve(self, listener: socket.socket, address: tuple[str, int]) -> None:
        joined: set[asyncio.Task[None]] = set()

        async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            joined.add(task)
            try:
                await _join(reader, writer, address)
            finally:
                joined.discard(task)

        server = await asyncio.start_server(join, sock=listener)
        await self._stop.wait()
        server.close()
        for task in joined:
            task.cancel()
        await asyncio.gather(*joined, return_exceptions=True)


async def _join(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: tuple[str, int]
) -> None:
    with contextlib.suppress(
        OSError, TimeoutError
    ):  # the proxy is not there: the command sees an end
        async with asyncio.timeout(_CONNECT_SECONDS):
            theirs, ours = await asyncio.open_connection(*address)
        try:
            await asyncio.gather(_copy(reader, ours), _copy(theirs, writer))
        finally:
            ours.close()
    writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    data = await reader.read(_READ_BYTES)
    while data:
        writer.write(data)
        await writer.drain()
        data = await reader.read(_READ_BYTES)
    if writer.can_write_eof():
        writer.write_eof()
