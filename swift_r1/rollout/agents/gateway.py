"""The address of each episode: the routes of `swift rollout`'s sessions, on loopback, in the trainer. What answers the
calls is the run's own generator, so nothing of an episode is on a rollout server."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import uvicorn
from fastapi import FastAPI

from swift_r1.serving.admission import check_tokens
from swift_r1.serving.answers import LimitSizes, RequireKey, add_errors
from swift_r1.serving.engines.base import Piece, PromptTokenizer, TokenLogprob
from swift_r1.serving.openai_messages import ToolCalls
from swift_r1.serving.openai_routes import add_openai
from swift_r1.serving.pieces import Pieces
from swift_r1.serving.protocols.messages import add_messages
from swift_r1.serving.protocols.responses import add_responses
from swift_r1.serving.server import bind
from swift_r1.serving.sessions.gateway import Gateway
from swift_r1.serving.sessions.session import SessionState
from swift_r1.serving.sessions.store import SessionStore
from swift_r1.wire.protocol import Completion, HTTPError, LimitReached, RolloutRequest
from swift_r1.wire.sessions import SessionRequest

logger = logging.getLogger("swift_r1.rollout.agents")

T = TypeVar("T")
_HOST = "127.0.0.1"
_WAIT_S = 10.0  # for the thread to begin or to end


class TurnSource(Protocol):
    """A conversation, as a session's calls see it."""

    def ask(self, request: RolloutRequest) -> asyncio.Future[Completion]:
        """Asks for a turn of the model. Who no longer wants it cancels the future."""


@dataclass
class AgentModel:
    """The `Served` of the gateway: `conversations` ask for the turns of the sessions of these names. `ends` end a
    completion of the policy, `stop` are `--stop_words`, and `forces_calls` says whether the engine can be held to a
    grammar.

    What an engine would refuse is refused here: there it would end the run.
    """

    prompts: PromptTokenizer
    tool_calls: ToolCalls
    max_model_len: int
    vocab_size: int
    ends: tuple[int, ...]
    stop: tuple[str, ...] = ()
    forces_calls: bool = True
    model_name: str = "policy"
    started: int = field(default_factory=lambda: int(time.time()))
    weight_version: int = 0
    conversations: dict[str, TurnSource] = field(default_factory=dict)

    async def with_images(
        self, unexpanded_ids: tuple[int, ...], files: Sequence[bytes]
    ) -> tuple[tuple[int, ...], tuple[str, ...]]:
        raise HTTPError(400, "agents cannot send images")

    def pieces(
        self,
        requests: Sequence[RolloutRequest],
        seed: int | None,
        top_logprobs: int | None,
        special_tokens: bool,
    ) -> Pieces:
        """Returns the stream of one request. Raises HTTPError where the model cannot take it."""
        [request] = requests
        if top_logprobs:
            raise HTTPError(400, "the likeliest tokens are not known here: leave top_logprobs out")
        room = self.max_model_len - len(request.prompt_token_ids)
        if room < 1:
            raise LimitReached(
                400,
                f"the prompt is {len(request.prompt_token_ids)} tokens, the model takes "
                f"{self.max_model_len}",
                "length",
            )
        check_tokens("the prompt", request.prompt_token_ids, self.vocab_size)
        check_tokens("stop_token_ids", request.sampling.stop_token_ids, self.vocab_size)
        own = request.sampling
        if own.structural_tag is not None and not self.forces_calls:
            raise HTTPError(
                400, "the trainer's own engine cannot force a call: leave tool_choice at auto"
            )
        changed = {
            "max_tokens": min(own.max_tokens, room),
            "stop": tuple(dict.fromkeys((*self.stop, *own.stop))),
            "stop_token_ids": tuple(sorted({*self.ends, *own.stop_token_ids})),
        }
        update = {
            "sampling": own.model_copy(update=changed),
            "seeds": None if seed is None else (seed,),
        }
        conversation = self.conversations[request.request_id.rpartition("/")[0]]
        return CompletionPieces(
            self, request.model_copy(update=update), conversation, special_tokens
        )


class CompletionPieces:
    """The only piece of a completion that comes as a whole."""

    def __init__(
        self,
        model: AgentModel,
        request: RolloutRequest,
        conversation: TurnSource,
        special_tokens: bool,
    ) -> None:
        self._model = model
        self._request = request
        self._conversation = conversation
        self._special_tokens = special_tokens
        self.name = request.request_id.replace("/", "-")
        self.prompt_tokens = len(request.prompt_token_ids)
        self.version = model.weight_version
        self._answer: asyncio.Future[Completion] | None = None

    async def start(self) -> None:
        self._answer = self._conversation.ask(self._request)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece]]:
        assert self._answer is not None
        done = await self._answer
        self._model.weight_version = max(self._model.weight_version, done.weight_version)
        texts = self._model.prompts.texts(done.token_ids)
        logprobs = tuple(map(TokenLogprob, texts, done.logprobs))
        said = self._text(done), logprobs, done.finish_reason
        yield 0, Piece(done.token_ids, *said, done.version_spans, done.routes)

    def _text(self, done: Completion) -> str:
        """Without the token or the text that ended it."""
        ids = done.token_ids
        sampling = self._request.sampling
        if done.finish_reason == "stop" and ids and ids[-1] in sampling.stop_token_ids:
            ids = ids[:-1]
        text = str(
            self._model.prompts.tokenizer.decode(
                list(ids), skip_special_tokens=not self._special_tokens
            )
        )
        if done.finish_reason == "stop":
            text = text[
                : min(
                    (at for stop in sampling.stop if (at := text.find(stop)) >= 0),
                    default=len(text),
                )
            ]
        return text


class AgentGateway:
    """Serves the sessions in a thread, whose event loop is for all that has to do with episodes."""

    def __init__(self, model: AgentModel) -> None:
        self.model = model
        self.sessions = Gateway(SessionStore(sys.maxsize, sys.maxsize, float("inf")))
        self.loop = asyncio.new_event_loop()
        self._listener = bind(_HOST, 0)
        self.url = f"http://{_HOST}:{self._listener.getsockname()[1]}"
        self._server = _Server(
            uvicorn.Config(
                self._app(),
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_keep_alive=120,
            )
        )
        self._thread = threading.Thread(target=self._run, name="agents", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs in the loop, from any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    @contextmanager
    def session(self, conversation: TurnSource, request: SessionRequest) -> Iterator[SessionState]:
        """Opens a session, whose calls are turns of the conversation; then it is deleted."""
        state = self.sessions.store.open(request)
        self.model.conversations[state.name] = conversation
        try:
            yield state
        finally:
            self.sessions.delete(state.name)
            del self.model.conversations[state.name]

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(_WAIT_S)
        if self._thread.is_alive():
            logger.warning(
                "the thread that answers agents does not end: it was still busy after %g s", _WAIT_S
            )

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._server.serve([self._listener]))

    def _app(self) -> FastAPI:
        # Nobody knows the key of the other routes.
        return agent_app(self.model, self.sessions, secrets.token_urlsafe(24))


def agent_app(model: AgentModel, gateway: Gateway, api_key: str) -> FastAPI:
    """Returns the gateway's ASGI application."""
    app = FastAPI(docs_url=None, redoc_url=None)
    add_errors(app)
    add_openai(app, lambda: model, gateway)
    add_messages(app, lambda: model, gateway)
    add_responses(app, lambda: model, gateway)
    app.add_middleware(LimitSizes)
    app.add_middleware(RequireKey, api_key=api_key, sessions=gateway.store)
    return app


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the trainer's."""
        yield
