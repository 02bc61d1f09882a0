"""Completions on their way: what a route sees of them, and those of an engine, admitted and stopped by updates."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Protocol

from swift_r1.serving.admission import Admission
from swift_r1.serving.engines.base import EnginePrompt, InferenceEngine, Piece
from swift_r1.wire.protocol import HTTPError, RolloutRequest

_SEEDS = 2**63


class Pieces(Protocol):
    """The pieces of one completion or more, in the order in which they come.

    Attributes:
        name: of the answer.
        version: of the weights that write the first token, known after `start`.
        prompt_tokens: of all prompts, each counted once.
    """

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int: ...

    @property
    def prompt_tokens(self) -> int: ...

    async def start(self) -> None:
        """Waits to be let in, before a byte of the answer is sent; may be cancelled meanwhile. Raises HTTPError."""

    def __aiter__(self) -> AsyncIterator[tuple[int, Piece]]:
        """Number of the completion (`n` to a prompt) and its next piece. A reader that goes ends the work. Raises
        HTTPError where it was stopped, and EngineDead."""


def joined(pieces: Sequence[Piece]) -> Piece:
    """A whole completion."""
    if len(pieces) == 1:
        return pieces[0]
    return Piece(
        tuple(token for piece in pieces for token in piece.token_ids),
        "".join(piece.text for piece in pieces),
        tuple(one for piece in pieces for one in piece.logprobs),
        pieces[-1].finish_reason if pieces else None,
        pieces[-1].versions if pieces else None,
        pieces[-1].routes if pieces else None,
    )


async def collected(pieces: Pieces) -> list[Piece]:
    """Each completion as one piece. Raises as `start` and the iteration do."""
    await pieces.start()
    parts: dict[int, list[Piece]] = {}
    async for number, piece in pieces:
        parts.setdefault(number, []).append(piece)
    return [joined(parts[number]) for number in sorted(parts)]


class EnginePieces:
    """The pieces of some requests to an engine; with `top_logprobs` (0 or more) each token's log-prob, and the
    likeliest ones. They wait in memory: no slow reader holds up the engine. The text has special tokens where these are
    asked for."""

    def __init__(
        self,
        engine: InferenceEngine,
        admission: Admission,
        newest: Callable[[], int],
        requests: Sequence[tuple[EnginePrompt, RolloutRequest]],
        seed: int | None,
        top_logprobs: int | None,
        special_tokens: bool,
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._newest = newest
        self._seed = seed
        self._top_logprobs = top_logprobs
        self._special_tokens = special_tokens
        self._completions = [
            (prompt, one, index) for prompt, one in requests for index in range(one.n)
        ]
        self._queue: asyncio.Queue[tuple[int, Piece] | BaseException | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self.name = uuid.uuid4().hex
        self.version = 0
        self.prompt_tokens = sum(len(prompt.token_ids) for prompt, _ in requests)

    async def start(self) -> None:
        async with AsyncExitStack() as stack:
            stack.enter_context(self._admission.room_for(len(self._completions)))
            await stack.enter_async_context(self._admission.admitted())
            self.version = self._newest()
            self._task = asyncio.create_task(self._produce(stack.pop_all()))

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece]]:
        assert self._task is not None
        try:
            item = await self._queue.get()
            while item is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
                item = await self._queue.get()
        finally:
            self._task.cancel()

    async def _produce(self, admitted: AsyncExitStack) -> None:
        try:
            async with admitted:
                await self._admission.stoppable(
                    [self._one(number) for number in range(len(self._completions))]
                )
            self._queue.put_nowait(None)
        except asyncio.CancelledError:
            self._queue.put_nowait(HTTPError(503, "the generation was stopped", 1))
            raise
        except Exception as error:  # noqa: BLE001 - handed to the reader, who raises it
            self._queue.put_nowait(error)

    async def _one(self, number: int) -> None:
        prompt, request, index = self._completions[number]
        seed = None if self._seed is None else (self._seed + index) % _SEEDS
        stream = self._engine.stream(
            prompt,
            request.sampling,
            seed,
            self._top_logprobs,
            self._special_tokens,
        )
        async for piece in stream:
            self._queue.put_nowait((number, piece))
