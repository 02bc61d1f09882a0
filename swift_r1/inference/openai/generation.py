"""Generations for OpenAI's endpoints: pieces of all completions of a request, as they come.

The engine is never held up by a slow reader: pieces wait in memory, and a weight update waits for the engine alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from swift_r1.inference.engines.base import Piece
from swift_r1.inference.limits import check_request
from swift_r1.inference.service import RolloutService
from swift_r1.wire import protocol as wire
from swift_r1.wire.http_errors import HTTPError

_SEEDS = 2**63


@dataclass(frozen=True, slots=True)
class Ask:
    """`n` completions of one prompt; with `top_logprobs` (0 or more) each token's log-prob, and the likeliest ones."""

    prompt: tuple[int, ...]
    n: int
    seed: int | None
    sampling: wire.SamplingParams
    top_logprobs: int | None


class Pieces:
    """The pieces of all completions of some `asks`, in the order in which they come.

    Attributes:
        version: the weights that the first token comes from, once `start` is through.
    """

    def __init__(self, service: RolloutService, asks: Sequence[Ask]) -> None:
        self._service, self._asks = service, asks
        self._queue: asyncio.Queue[tuple[int, Piece] | BaseException | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self.version = 0

    async def start(self) -> None:
        """Waits to be let in; what is refused is refused before a byte of the answer is sent.

        Raises:
            HTTPError: 422 for a request that the model cannot take, 503 for "not now".
        """
        for ask in self._asks:
            request = wire.RolloutRequest(
                request_id="openai", prompt_token_ids=ask.prompt, n=ask.n, sampling=ask.sampling
            )
            check_request(request, self._service.engine.info, self._service.max_n)
        admitted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._produce(admitted))
        try:
            self.version = await admitted
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """The reader has gone: so does the engine's work."""
        if self._task is not None:
            self._task.cancel()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece]]:
        """Number of the completion (`n` to a prompt) and its next piece.

        Raises:
            HTTPError: the generation was stopped by an update, or the engine died.
        """
        try:
            while (item := await self._queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.stop()

    async def _produce(self, admitted: asyncio.Future[int]) -> None:
        try:
            numbered = [(ask, index) for ask in self._asks for index in range(ask.n)]
            with self._service.room_for(len(numbered)):
                async with self._service.admitted() as version:
                    admitted.set_result(version)
                    await self._service.stoppable(
                        [self._one(number, ask, index) for number, (ask, index) in enumerate(numbered)]
                    )
            self._queue.put_nowait(None)
        except asyncio.CancelledError:
            self._queue.put_nowait(HTTPError(503, "the generation was stopped", 1))
            raise
        except Exception as error:  # noqa: BLE001 - handed to the reader, who raises it
            if admitted.done():
                self._queue.put_nowait(error)
            else:
                admitted.set_exception(error)

    async def _one(self, number: int, ask: Ask, index: int) -> None:
        seed = None if ask.seed is None else (ask.seed + index) % _SEEDS
        async for piece in self._service.engine.stream(ask.prompt, ask.sampling, seed, ask.top_logprobs):
            self._queue.put_nowait((number, piece))
