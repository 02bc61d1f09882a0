"""Weights that arrive here go on to other servers, each bucket as soon as it is here and its hash is right: so the
trainer sends them to a few servers, and not to all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx

from swift_r1.errors import SwiftError
from swift_r1.sync.staging import StagedBucket
from swift_r1.sync.transport import chunks_of
from swift_r1.sync.update import PendingUpdate, UpdateMachine
from swift_r1.wire import protocol as wire
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import HTTPError

logger = logging.getLogger("swift_r1.serving")

_PIECE = 1 << 20
_SILENCE_S = 60.0  # in which the other server takes no piece of a bucket, or does not answer when it has all


class Relays:
    """Passes the update that arrives here on to the servers that the lease's holder names. They stay under its lease:
    this server shows them the token that came with the name, and its own API key, which they share.

    A child that is slow or gone holds up neither this server nor its other children: each has a task of its own. The
    files of the update are kept until all children have them, or the next update begins.
    """

    def __init__(self, machine: UpdateMachine, api_key: str | None) -> None:
        self._machine = machine
        self._api_key = api_key
        self._update: PendingUpdate | None = None
        self._awaited = 0  # children that do not have the update yet
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._later: list[Callable[[], None]] = []
        self._news = asyncio.Event()

    @property
    def awaited(self) -> bool:
        """Whether children are still to get the update."""
        return self._awaited > 0

    async def stop(self) -> None:
        """Ends what is left of the last update."""
        tasks = list(self._tasks.values())
        self._tasks = {}
        self._update = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._end()

    def expect(self, update: PendingUpdate, children: int) -> None:
        """This update is to go on to so many servers; they are named later."""
        self._update = update if children else None
        self._awaited = children

    def once_sent(self, work: Callable[[], None]) -> None:
        """Does `work`, which ends the use of the update's files here, when all children have them."""
        if self._awaited and self._update is not None and self._update.whole:
            self._later.append(work)
        else:
            work()

    def notify(self) -> None:
        """A bucket has come, or the update is over."""
        news = self._news
        self._news = asyncio.Event()
        news.set()

    async def relay(self, token: str | None, request: wire.RelayRequest) -> wire.RelayStatus:
        """Passes the update on to the server that is named, and answers when that has all of it, or after
        `wire.RELAY_ANSWER_S`: then the same is asked again. Raises HTTPError: 409 where the update is not here any
        more, 502 where the other server refuses a bucket or is not reached."""
        self._machine.check_holder(token, also_while_loading=True)
        task = self._tasks.get(request.url)
        if task is None:
            if self._update is None or self._update.version != request.version:
                raise HTTPError(409, f"version {request.version} does not arrive here")
            task = self._tasks[request.url] = asyncio.create_task(self._pass_on(self._update, request))
            task.add_done_callback(self._one_less)
        await asyncio.wait({task}, timeout=wire.RELAY_ANSWER_S)
        if task.cancelled():
            raise HTTPError(409, f"version {request.version} was begun again")
        if task.done():
            task.result()
        return wire.RelayStatus(whole=task.done())

    def _one_less(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # it is raised where the trainer asks
            self._awaited -= 1
            if not self._awaited:
                self._end()

    def _end(self) -> None:
        self._update = None
        self._awaited = 0
        later = self._later
        self._later = []
        for work in later:
            work()

    async def _pass_on(self, update: PendingUpdate, request: wire.RelayRequest) -> None:
        index = 0
        try:
            with RolloutClient(request.url, self._api_key) as client:
                while (bucket := await self._arrived(update, index)) is not None:
                    headers, body = _body(bucket, request)
                    sent = client.called("PUT", "/v1/weights/bucket", wire.UpdateStatus, body, headers, _SILENCE_S)
                    await asyncio.wrap_future(client.loop.start(sent))
                    index += 1
        except httpx.InvalidURL as error:
            raise HTTPError(422, f"url: {error}") from error
        except SwiftError as error:
            raise HTTPError(502, f"bucket {index} was not passed on: {error}") from error
        except OSError as error:
            raise HTTPError(409, f"bucket {index} is not here any more: {error.strerror}") from error

    async def _arrived(self, update: PendingUpdate, index: int) -> StagedBucket | None:
        """The next bucket once it is here, None after the last one. The machine forgets an update that stands still."""
        while True:
            if update.dropped and not update.whole:
                raise HTTPError(409, f"the update to version {update.version} broke off")
            if index < len(update.buckets):
                return update.buckets[index]
            if update.whole:
                return None
            await self._news.wait()


def _body(bucket: StagedBucket, request: wire.RelayRequest) -> tuple[dict[str, str], Iterator[bytes]]:
    """Returns what goes to the other server: what has changed, if it holds what changes, else the whole file."""
    headers = {
        wire.LEASE_HEADER: request.lease,
        wire.VERSION_HEADER: str(request.version),
        wire.BUCKET_HEADER: str(bucket.index),
        wire.DIGEST_HEADER: bucket.digest,
    }
    change = bucket.change if bucket.base is not None and bucket.base == request.base else None
    headers["Content-Length"] = str(bucket.path.stat().st_size if change is None else len(change))
    if change is not None:
        return headers | {wire.BASE_HEADER: str(bucket.base)}, chunks_of([memoryview(change)])
    return headers, _file(bucket.path)


def _file(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        yield from iter(partial(file.read, _PIECE), b"")
