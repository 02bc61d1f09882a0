"""The socket that `swift rollout` listens on."""

from __future__ import annotations

import asyncio
import socket

from swift_r1.serving.server import bind


def test_answers_are_not_held_back() -> None:
    """Nagle's algorithm would hold each one until the trainer's system acknowledges its headers, 40 ms later."""

    async def no_delay() -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = bind("127.0.0.1", 0)
        async with await asyncio.start_server(answer, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            try:
                return await asyncio.wait_for(accepted, 20)
            finally:
                writer.close()

    assert asyncio.run(no_delay()) == 1
