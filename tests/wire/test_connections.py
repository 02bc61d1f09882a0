"""The one event loop of a process for its rollout servers, and its one HTTP client."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest

from swift_r1.wire.client import RolloutClient
from swift_r1.wire.connections import ServerLoop

WAIT_S = 20


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "rollout servers"]


@pytest.fixture
def no_loop_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the loop of clients that another test of this process has open."""
    monkeypatch.setattr(ServerLoop, "_shared", None)


@pytest.mark.usefixtures("no_loop_yet")
def test_all_clients_share_a_loop_that_ends_with_the_last_of_them() -> None:
    others = len(threads())
    with RolloutClient("http://127.0.0.1:1") as first:
        with RolloutClient("http://127.0.0.1:2") as second:
            assert first.loop is second.loop and len(threads()) == others + 1
        assert first.why_not_ready() == "no answer ([Errno 111] Connection refused)"
        first.close()
    first.close()
    assert len(threads()) == others
    with RolloutClient("http://127.0.0.1:1") as third:
        assert third.loop is not first.loop and len(threads()) == others + 1


@pytest.mark.usefixtures("no_loop_yet")
def test_what_still_runs_ends_with_the_loop() -> None:
    with RolloutClient("http://127.0.0.1:1") as client:
        waiting = client.loop.start(asyncio.sleep(3600))
    assert waiting.cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        client.loop.start(asyncio.sleep(0))


def test_a_forked_process_makes_its_own() -> None:
    with RolloutClient("http://127.0.0.1:1"):
        child = os.fork()
        if child == 0:
            own = RolloutClient("http://127.0.0.1:2")
            os._exit(
                0 if own.why_not_ready() == "no answer ([Errno 111] Connection refused)" else 1
            )
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture
def loop() -> Iterator[ServerLoop]:
    with RolloutClient("http://127.0.0.1:1") as client:
        yield client.loop


def test_connections_in_use_are_closed_when_they_are_free(loop: ServerLoop) -> None:
    """Another ask may drop them while an answer is being read."""

    async def story() -> list[str]:
        told: list[str] = []
        wait = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\nhalf")
            await wait.wait()
            writer.write(b"rest")
            told.append("closed" if await reader.read() == b"" else "more")
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with loop.http.stream("GET", url) as answer:
            await loop.connections.drop(url)
            wait.set()
            told.append((await answer.aread()).decode())
        server.close()
        await server.wait_closed()
        while len(told) < 2:
            await asyncio.sleep(0)
        return told

    assert loop.run(asyncio.wait_for(story(), WAIT_S)) == ["halfrest", "closed"]
