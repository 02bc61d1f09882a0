"""Admission: which work may use the engine, how much, and what becomes of it when the weights are to change."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from swift_r1.flags.server import RolloutArguments
from swift_r1.serving.engines.base import EngineInfo
from swift_r1.sync.update import UpdateMachine
from swift_r1.wire.protocol import HTTPError, Overloaded, RolloutRequest

T = TypeVar("T")

logger = logging.getLogger("swift_r1.serving")

_OVERLOADED_S = 2  # after so many seconds an overloaded server may be asked again


@dataclass(slots=True)
class _Work:
    """Work in the engine: the lease that its client showed, and why it was stopped."""

    lease: str | None
    stopped: str | None = None


class Admission:
    """While an update is open new work waits, with a deadline; while the engine sleeps or holds no whole version it is
    refused. Whoever changes the engine waits for the running work to end, or stops it. One event loop only.

    Attributes:
        asleep: why work is refused while the engine sleeps, None while it is awake.
        exclusive: held while the engine is changed (new weights, another score temperature).
        running: requests in the engine.
    """

    def __init__(self, config: RolloutArguments, machine: UpdateMachine) -> None:
        self._config = config
        self._machine = machine
        self.asleep: str | None = None
        self.exclusive = asyncio.Lock()
        self.running = 0
        self._scoring = False
        self._changed = asyncio.Event()
        # completions; those of the lease's holder are under True
        self._pending: Counter[bool] = Counter()
        self._work: dict[asyncio.Future[Any], _Work] = {}

    @property
    def why_closed(self) -> str | None:
        """The reason for which new work waits or is refused, or None."""
        if self._refused is not None:
            return self._refused
        version = self._machine.pending_version
        if version is not None:
            return f"the update to weight version {version} by {self._machine.owner}"
        return "scoring that has the engine for itself" if self._scoring else None

    @property
    def _refused(self) -> str | None:
        return self.asleep or self._machine.broken

    def notify(self) -> None:
        """Must follow each change of the machine or of `asleep`: waiting work looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Runs the body as admitted work. Raises HTTPError (503) after `--update_timeout` seconds of waiting, or where
        work is refused."""
        await self._until(
            lambda: self._refused is not None or self.why_closed is None,
            lambda timeout: f"waited {timeout:g} s for {self.why_closed} to end",
        )
        if self._refused is not None:
            raise HTTPError(503, self._refused, 5)
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self.notify()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Runs the body (a score) while nothing else runs. Raises as `admitted` does."""
        async with self.admitted():
            pass
        async with self.exclusive:
            why = self.why_closed
            if why is not None:  # since it was admitted
                raise HTTPError(503, why, 5)
            self._scoring = True
            try:
                await self._idle("scoring")
                yield
            finally:
                self._scoring = False
                self.notify()

    async def drained(self, waiting_for: str) -> None:
        """Waits until nothing runs. Work that does not belong to the lease's holder is stopped after `--client_grace`
        seconds, so that no client holds up a training. Raises HTTPError (503) after `--update_timeout` seconds."""
        grace = min(self._config.client_grace, self._config.update_timeout)
        stop = asyncio.get_running_loop().call_later(grace, self._stop_others, waiting_for)
        try:
            await self._idle(waiting_for)
            async with self.exclusive:  # a score that has the engine for itself
                pass
        finally:
            stop.cancel()

    async def _idle(self, waiting_for: str) -> None:
        await self._until(
            lambda: self.running == 0,
            lambda timeout: (
                f"{waiting_for} waited {timeout:g} s for {self.running} running requests to finish"
            ),
        )

    async def _until(self, condition: Callable[[], bool], too_late: Callable[[float], str]) -> None:
        timeout = self._config.update_timeout
        try:
            async with asyncio.timeout(timeout):
                while not condition():
                    await self._changed.wait()
        except TimeoutError as error:
            raise HTTPError(503, too_late(timeout), 5) from error

    @contextmanager
    def room_for(self, completions: int, lease: str | None = None) -> Iterator[None]:
        """Runs the body as one request for so many completions. Others' requests take no room from the lease's holder.
        Raises HTTPError: 422 for more than the server ever takes at once, 503 for more than it takes now."""
        limit = self._config.max_pending_requests
        own = self._machine.holds(lease)
        if completions > limit:
            raise HTTPError(
                422,
                f"{completions} completions at once are more than this server takes ({limit}): ask for fewer",
            )
        pending = self._pending[True] if own else self._pending.total()
        if pending + completions > limit:
            message = f"{pending} completions are under way, {completions} more are over the limit of {limit}"
            raise Overloaded(503, message, _OVERLOADED_S)
        self._pending[own] += completions
        try:
            yield
        finally:
            self._pending[own] -= completions

    async def stoppable(self, work: Sequence[Awaitable[T]], lease: str | None = None) -> list[T]:
        """The results, in order. Raises HTTPError (503) where an update ended them."""
        task = asyncio.ensure_future(all_results(work))
        self._work[task] = running = _Work(lease)
        try:
            return await task
        except asyncio.CancelledError:
            if running.stopped is not None:
                raise HTTPError(503, running.stopped, 1) from None
            raise
        finally:
            del self._work[task]

    def _stop_others(self, what_for: str) -> None:
        """Stops what runs, except for the lease's holder."""
        stopped = 0
        for task, work in self._work.items():
            if not self._machine.holds(work.lease):
                work.stopped = f"{what_for} stopped it; ask again"
                task.cancel()
                stopped += 1
        if stopped:
            logger.info("%s stopped %d running requests", what_for, stopped)


async def all_results(work: Sequence[Awaitable[T]]) -> list[T]:
    """Results in order; the first failure, or our own cancellation, cancels the rest."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def check_request(request: RolloutRequest, info: EngineInfo, max_n: int) -> None:
    """Raises HTTPError (422) for a request that the model cannot take, or for more than `max_n` completions."""
    name = f"request {request.request_id!r}"
    limit = info.max_model_len
    check_tokens(name, request.prompt_token_ids, info.vocab_size)
    check_tokens(f"stop_token_ids of {name}", request.sampling.stop_token_ids, info.vocab_size)
    if request.images:
        check_images(name, len(request.images), info)
        check_tokens(
            f"unexpanded_token_ids of {name}", request.unexpanded_token_ids, info.vocab_size
        )
    else:
        check_placeholders(name, request.prompt_token_ids, info)
    routes = request.routes
    if routes is not None and not info.routes:
        raise HTTPError(422, f"{name} asks for routes, which this server does not tell")
    if routes is not None and routes.first > len(request.prompt_token_ids):
        raise HTTPError(422, f"{name} asks for routes from behind its prompt on")
    if request.n > max_n:
        raise HTTPError(422, f"{name} asks for n = {request.n}, this server gives at most {max_n}")
    if request.seeds is not None and len(request.seeds) != request.n:
        raise HTTPError(
            422, f"{name} has {len(request.seeds)} seeds for n = {request.n} completions"
        )
    prompt = len(request.prompt_token_ids)
    new = request.sampling.max_tokens
    if prompt + new > limit:
        raise HTTPError(
            422, f"{name} is too long: {prompt} prompt + {new} new tokens, max_model_len is {limit}"
        )
    if any(not text for text in request.sampling.stop):
        raise HTTPError(422, f"{name} has an empty stop string")


def check_tokens(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Raises HTTPError (422) for a token that the model does not have."""
    if tokens and max(tokens) >= vocab_size:
        raise HTTPError(
            422, f"{name} has token {max(tokens)}, the vocabulary ends at {vocab_size - 1}"
        )


def check_placeholders(name: str, tokens: Sequence[int], info: EngineInfo) -> None:
    """Raises HTTPError (422) for tokens that stand for images which are not there."""
    found = info.placeholders.intersection(tokens)
    if found:
        raise HTTPError(
            422, f"{name} has token {min(found)}, which stands for an image, without one"
        )


def check_images(name: str, count: int, info: EngineInfo) -> None:
    """Raises HTTPError (422) for more images than the server takes in a prompt."""
    if count > info.max_images:
        raise HTTPError(
            422,
            f"{name} has {count} images, and this server takes {info.max_images or 'none'} in a prompt: start it with "
            f"""--vllm_limit_mm_per_prompt '{{"image": {count}}}'""",
        )
