"""Runs the calls of sessions over an engine: one generation for a call and its retries, recorded when it is whole."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

from swift_r1.serving.engines.base import Piece, TokenLogprob
from swift_r1.serving.pieces import Pieces, joined
from swift_r1.serving.sessions.calls import CallContent, ChatRenderer, ModelCall
from swift_r1.serving.sessions.history import Message
from swift_r1.serving.sessions.session import SessionState
from swift_r1.serving.sessions.store import SessionStore
from swift_r1.wire import sessions as wire
from swift_r1.wire.protocol import HTTPError, LimitReached, RolloutRequest


class CallOfClient(Protocol):
    """Answers a call as its client asked for it."""

    def request(self, prompt: tuple[int, ...]) -> RolloutRequest:
        """Returns the request for a prompt. Raises HTTPError where the model cannot take it."""

    def generate(self, request: RolloutRequest, seed: int | None) -> Pieces:
        """Starts the completion, with a seed where there is one."""

    def answer(self, completion: Piece, prompt: tuple[int, ...]) -> Message:
        """Returns the message that the client gets for a completion."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """The words of the client's HTTP library: that it tries a call again, and by which key a repeated call is known;
    how many equal calls it has made before this one, which may come later; and the keys of calls that it has given
    up."""

    retried: bool = False
    key: str | None = None
    before: int = 0
    given_up: Sequence[str] = ()


class RenderedAhead:
    """A renderer that renders and tokenises in a thread what placing a call takes, so that other calls go on meanwhile:
    for a long conversation it takes seconds."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._made: dict[tuple[str, Any], asyncio.Future[Any]] = {}

    async def make(self, state: SessionState, content: CallContent) -> Self:
        """Makes all that the session, as it is when this returns, needs. What the renderer raises is raised then."""
        await asyncio.to_thread(getattr, content, "digest")
        known = -1
        while known < len(self._made):
            known = len(self._made)
            with contextlib.suppress(HTTPError):
                state.lineage.place(content, self)
            await asyncio.gather(*self._made.values(), return_exceptions=True)
        return self

    @property
    def special(self) -> frozenset[int]:
        return self._renderer.special

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Any:
        return self._of("render", None, partial(self._renderer.render, messages, tools))

    def behind(
        self, messages: Sequence[Message], place: int, tools: Sequence[Mapping[str, Any]]
    ) -> Any:
        return self._of("behind", place, partial(self._renderer.behind, messages, place, tools))

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        return self._renderer.texts(token_ids)

    def _of(self, kind: str, given: Any, work: Callable[[], Any]) -> Any:
        """Returns what was made of it; nothing stands for it until then."""
        if (kind, given) not in self._made:
            self._made[kind, given] = asyncio.ensure_future(asyncio.to_thread(work))
        made = self._made[kind, given]
        return made.result() if made.done() else ()


class Gateway:
    """The sessions of a server, and what runs in them."""

    def __init__(self, store: SessionStore) -> None:
        self.store = store
        self._running: dict[ModelCall, _Running] = {}

    def delete(self, name: str) -> None:
        """Ends what runs in the session, and forgets it. Raises HTTPError as the store."""
        state = self.store.delete(name)
        for call in list(state.running):
            self._running[call].stop(HTTPError(404, f"session {name!r} was deleted"))

    def give_up(self, state: SessionState, keys: Iterable[str]) -> None:
        """Leaves calls out whose client has not read the answer and never will, whether it was there or not. What was
        continued was read."""
        for call in filter(None, map(state.called, keys)):
            running = self._running.get(call)
            if running is not None:
                running.stop(HTTPError(499, "the client has given this call up"))
            elif not call.children:
                state.fail(call)

    def ask(
        self,
        state: SessionState,
        content: CallContent,
        seed: int | None,
        attempt: Attempt,
        renderer: ChatRenderer,
        client: CallOfClient,
    ) -> AnswerStream:
        """Returns the answer to a call, on its way.

        Args:
            seed: the agent's own, for a session without one.

        Raises:
            HTTPError: 403 where the session's limits are reached, 503 where the records have no room, 400 for a key
                that belongs to another call.
        """
        self.give_up(state, attempt.given_up)
        known = state.retry_of(content.digest, attempt.retried, attempt.key)
        if known is not None:
            return AnswerStream(known, self._running.get(known), renderer)
        own = state.request.sampling
        call = None

        def reached(error: BaseException | None) -> None:
            if isinstance(error, LimitReached):
                state.limit = state.limit or error.limit

        try:
            self.store.check_memory()
            tokens, seconds = state.left()
            call, ids = state.begin(content, renderer, attempt.key, attempt.before)
            prompt = tuple(ids)
            request = _within(client.request(prompt), own, tokens, f"{state.name}/{call.number}")
            if state.routes is not None:
                routes = state.routes.model_copy(update={"first": call.read_before})
                request = request.model_copy(update={"routes": routes})
            if call.seed is None:
                call.seed = seed
            call.sampling = request.sampling
            source = client.generate(request, call.seed)
        except BaseException as error:
            reached(error)
            if call is not None:
                state.fail(call)
            else:
                state.refused(content.digest)
            raise
        call.completion_id = source.name

        def record() -> None:
            whole = joined(running.pieces)
            assert whole.finish_reason is not None
            state.finish(
                call,
                whole.token_ids,
                [one.logprob for one in whole.logprobs],
                whole.versions or ((0, source.version),),
                whole.finish_reason,
                whole.text,
                client.answer(whole, prompt),
                whole.routes,
            )

        def over(error: BaseException | None) -> None:
            del self._running[call]
            reached(error)
            if error is not None:
                state.fail(call)

        running = self._running[call] = _Running(source, seconds, record, over)
        return AnswerStream(call, running, renderer)


def _within(
    request: RolloutRequest, own: wire.SessionSampling, tokens: int | None, name: str
) -> RolloutRequest:
    """The request as the session wants it, named after it and the call's number."""
    values = own.model_dump(exclude_none=True)
    limits = (request.sampling.max_tokens, own.max_tokens, tokens)
    values["max_tokens"] = min(one for one in limits if one is not None)
    return request.model_copy(
        update={"request_id": name, "sampling": request.sampling.model_copy(update=values)}
    )


class _Running:
    """A generation with one reader or more; it ends when the last one has gone."""

    def __init__(
        self,
        source: Pieces,
        seconds: float | None,
        record: Callable[[], None],
        over: Callable[[BaseException | None], None],
    ) -> None:
        self.source = source
        self.pieces = list[Piece]()
        self._record = record
        self._over = over
        self.ended = self.started = False
        self.error: BaseException | None = None
        self.readers = 0
        self._seconds = seconds
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def changed(self) -> None:
        await self._changed.wait()

    def leave(self) -> None:
        self.readers -= 1
        if self.readers == 0:
            self.stop(HTTPError(499, "the client hung up"))

    def stop(self, error: HTTPError) -> None:
        """Its readers raise the error, unless it has ended; a retry that comes now begins again."""
        self._end(error)
        self._task.cancel()

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(self._seconds) as limit:
                await self.source.start()
                self.started = True
                self._tell()
                async for _, piece in self.source:
                    if piece.finish_reason not in (None, "stop", "length"):
                        raise HTTPError(
                            503, f"the engine ended the generation: {piece.finish_reason}", 1
                        )
                    self.pieces.append(piece)
                    if piece.finish_reason is None:
                        self._tell()
                    else:
                        # Recorded before the client sees the end, and may ask again at once or hang up.
                        self._end(None)
            self._end(RuntimeError("the engine ended a completion without a reason"))
        except TimeoutError as error:
            over = LimitReached(403, "the session's time is over", "seconds")
            self._end(over if limit.expired() else error)
        except asyncio.CancelledError:
            self._end(HTTPError(503, "the generation was stopped", 1))
            raise
        except Exception as error:  # noqa: BLE001 - handed to the readers, who raise it
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self.ended:
            return
        if error is None:
            try:
                self._record()
            except Exception as defect:  # noqa: BLE001 - handed to the readers, who raise it
                error = defect
        self.ended = True
        self.error = error
        self._over(error)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class AnswerStream:
    """The pieces of a call's answer, in order; from the record where it has ended already.

    Attributes:
        prompt_tokens: number of them.
        name: of the completion, the same for a retry.
    """

    def __init__(self, call: ModelCall, running: _Running | None, renderer: ChatRenderer) -> None:
        self.name = call.completion_id
        self.prompt_tokens = call.prompt_tokens
        self._call = call
        self._running = running
        self._renderer = renderer
        if running is not None:
            running.readers += 1

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple(self._call.tokens()[: self.prompt_tokens])

    @property
    def version(self) -> int:
        return self._call.versions[0][1] if self._running is None else self._running.source.version

    async def start(self) -> None:
        """Waits for its first byte to make sense. Raises what the generation does."""
        running = self._running
        if running is None:
            return
        try:
            while not (running.started or running.ended):
                await running.changed()
            if running.error is not None and not running.started:
                raise running.error
        except BaseException:
            self._leave()
            raise

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece]]:
        running = self._running
        if running is None:
            yield 0, self._remembered()
            return
        place = 0
        try:
            while True:
                while place < len(running.pieces):
                    place += 1
                    yield 0, running.pieces[place - 1]
                if running.ended:
                    if running.error is not None:
                        raise running.error
                    return
                await running.changed()
        finally:
            self._leave()

    def _leave(self) -> None:
        if self._running is not None:
            self._running.leave()
            self._running = None

    def _remembered(self) -> Piece:
        call = self._call
        texts = self._renderer.texts(call.token_ids)
        logprobs = tuple(TokenLogprob(*one) for one in zip(texts, call.logprobs, strict=True))
        return Piece(tuple(call.token_ids), call.text, logprobs, call.finish_reason, call.versions)
