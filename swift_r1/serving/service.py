"""Does the server's work, free of HTTP: rollouts and scores over one engine, and its life from loading to death."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from swift_r1.data.prompt_templates import check_read, template_arguments, templates_of
from swift_r1.data.prompts import Wording, tokenizer_of_run
from swift_r1.errors import one_line
from swift_r1.flags.rollout import url_of
from swift_r1.flags.server import RolloutArguments
from swift_r1.models.expected import Shapes
from swift_r1.serving.admission import (
    Admission,
    all_results,
    check_images,
    check_placeholders,
    check_request,
    check_tokens,
)
from swift_r1.serving.engines.base import (
    EnginePrompt,
    Generated,
    InferenceEngine,
    PromptTokenizer,
    Replicas,
    Scored,
)
from swift_r1.serving.images import ImageStore, checked, plain_image
from swift_r1.serving.metrics import ServerMetrics
from swift_r1.serving.openai_messages import ToolCalls
from swift_r1.serving.pieces import EnginePieces, Pieces
from swift_r1.serving.sessions.gateway import Gateway
from swift_r1.serving.sessions.store import SessionStore
from swift_r1.sync.server import WeightUpdates, update_machine
from swift_r1.wire import protocol as wire
from swift_r1.wire.protocol import HTTPError, RolloutOutput, RolloutRequest

Load = Callable[[], tuple[InferenceEngine, Shapes]]

logger = logging.getLogger("swift_r1.serving")

_MAX_N = 1024
_WATCH_EVERY_S = 0.25
_DEAD_GRACE_S = 3.0  # in which /health tells clients what happened


@dataclass(slots=True)
class _Entry:
    fingerprint: bytes
    task: asyncio.Task[RolloutOutput]
    waiters: int = 0
    tokens: int = 0


class IdempotencyCache:
    """Gives a repeated request the answer of the first time, or lets it join that generation. Keeps the newest finished
    requests: `max_requests` of them, and `max_tokens` tokens.

    A generation is cancelled when everyone who waits for it has gone. Failures are not kept.
    """

    def __init__(self, max_requests: int = 4096, max_tokens: int = 1_000_000) -> None:
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    async def answer(
        self,
        request: RolloutRequest,
        generate: Callable[[RolloutRequest], Awaitable[RolloutOutput]],
    ) -> RolloutOutput:
        """The output of `request`, generated at most once for its id. Raises HTTPError (409) where the id was used for
        another request."""
        fingerprint = hashlib.sha256(request.model_dump_json().encode()).digest()
        entry = self._entries.get(request.request_id)
        if entry is None:
            entry = _Entry(fingerprint, asyncio.ensure_future(generate(request)))
            self._entries[request.request_id] = entry
            entry.task.add_done_callback(
                lambda task: self._finished(request.request_id, entry, task)
            )
        elif entry.fingerprint != fingerprint:
            raise HTTPError(
                409, f"request_id {request.request_id!r} was used before for a different request"
            )
        entry.waiters += 1
        try:
            return await asyncio.shield(entry.task)
        finally:
            entry.waiters -= 1
            if entry.waiters == 0 and not entry.task.done():
                self._forget(request.request_id, entry)
                entry.task.cancel()

    def forget_finished(self) -> None:
        """Forgets finished requests, so that a repeated one gets completions of new weights."""
        for key, entry in list(self._entries.items()):
            if entry.task.done():
                self._forget(key, entry)

    def _finished(self, request_id: str, entry: _Entry, task: asyncio.Task[RolloutOutput]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._forget(request_id, entry)
            return
        entry.tokens = sum(len(completion.token_ids) for completion in task.result().completions)
        self._tokens += entry.tokens
        while len(self._entries) > self._max_requests or self._tokens > self._max_tokens:
            oldest = next((key for key, old in self._entries.items() if old.task.done()), None)
            if oldest is None:
                return
            self._forget(oldest, self._entries[oldest])

    def _forget(self, request_id: str, entry: _Entry) -> None:
        if self._entries.get(request_id) is entry:
            del self._entries[request_id]
            self._tokens -= entry.tokens


class RolloutService:
    """One loaded engine with admission, idempotency and weight updates around it. `max_n` are the most completions that
    a request may ask for."""

    def __init__(
        self,
        config: RolloutArguments,
        engine: InferenceEngine,
        expected: Shapes,
        metrics: ServerMetrics,
    ) -> None:
        self.config = config
        self.engine = engine
        self.metrics = metrics
        self.cache = IdempotencyCache()
        self.images = ImageStore()
        self.prompts = engine.prompts
        arguments = template_arguments(config.enable_thinking, config.chat_template_kwargs)
        if arguments:
            check_read(arguments, templates_of(engine.prompts.tokenizer))
            wording = Wording(arguments=arguments)
            self.prompts = PromptTokenizer(tokenizer_of_run(engine.prompts.tokenizer, wording))
        self.tool_calls = ToolCalls(config.tool_call_parser, self.prompts.tokenizer)
        self.machine = update_machine(config, expected)
        self.admission = Admission(config, self.machine)
        self.updates = WeightUpdates(
            config,
            engine,
            expected,
            self.machine,
            self.admission,
            metrics.count_update,
            self.cache.forget_finished,
        )
        self.max_n = min(_MAX_N, config.max_pending_requests)
        self.model_name = config.served_model_name or config.model
        self.started = int(time.time())
        self._instance = secrets.token_hex(8)

    @property
    def max_model_len(self) -> int:
        return self.engine.info.max_model_len

    @property
    def weight_version(self) -> int:
        return self.machine.version

    def info(self) -> wire.ServerInfo:
        known = self.engine.info
        return wire.ServerInfo(
            instance=self._instance,
            model=self.model_name,
            engine=known.name,
            engine_version=known.version,
            vocab_size=known.vocab_size,
            tokenizer_hash=known.tokenizer_hash,
            weight_version=self.machine.version,
            broken=self.machine.broken,
            can_sleep=known.can_sleep,
            batch_invariant=known.batch_invariant,
            asleep=self.updates.sleeping.level,
            max_model_len=known.max_model_len,
            max_n=self.max_n,
            max_images=known.max_images,
            routes=known.routes,
            dtype=known.dtype,
            max_lora_rank=self.config.vllm_max_lora_rank if self.config.vllm_enable_lora else None,
            own_base=self.updates.own_base,
            nccl_workers=known.nccl_workers,
            copies=known.copies,
            gpu=known.gpu,
            turns=wire.TurnFlags(**self.config.turn_flags),
        )

    async def rollouts(self, batch: wire.RolloutBatch, lease: str | None) -> wire.RolloutResponse:
        """All requests of the batch, in its order. Raises HTTPError: 422 for a request that the model cannot take
        (nothing is generated then), 424 for images that are not here, 503 for "not now"."""
        for request in batch.requests:
            check_request(request, self.engine.info, self.max_n)

        async def generate(request: wire.RolloutRequest) -> wire.RolloutOutput:
            return await self._generate(request, lease)

        completions = sum(request.n for request in batch.requests)
        images = [name for request in batch.requests for name in request.images]
        with self.images.using(images), self.admission.room_for(completions, lease):
            outputs = await all_results(
                [self.cache.answer(request, generate) for request in batch.requests]
            )
        return wire.RolloutResponse(outputs=tuple(outputs))

    async def _generate(
        self, request: wire.RolloutRequest, lease: str | None
    ) -> wire.RolloutOutput:
        prompt = self._prompt(request)
        async with self.admission.admitted():
            version = self.machine.version
            seeds: Sequence[int | None] = request.seeds or (None,) * request.n
            done = await self.admission.stoppable(
                [self.engine.generate(prompt, request.sampling, seed) for seed in seeds],
                lease,
            )
            completions = tuple(_completion(one, version) for one in done)
            for one in completions:
                self.metrics.completions.labels(one.finish_reason).inc()
                self.metrics.tokens.inc(len(one.token_ids))
            return wire.RolloutOutput(request_id=request.request_id, completions=completions)

    def _prompt(self, request: wire.RolloutRequest) -> EnginePrompt:
        """Returns the prompt of a request, with the bytes of its images. Raises ImagesMissing."""
        images = self.images.of(request.images)
        return EnginePrompt(
            request.prompt_token_ids, request.unexpanded_token_ids, images, request.routes
        )

    async def store_image(self, name: str, data: bytes) -> wire.StoredImage:
        """Keeps an image for the rollouts that name it. Raises HTTPError as `checked`."""
        stored = await asyncio.to_thread(checked, data, name)
        self.images.add(data)
        return stored

    async def with_images(
        self, unexpanded_ids: tuple[int, ...], files: Sequence[bytes]
    ) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Returns the token ids of a prompt with images, and the names under which these are kept. Raises HTTPError: 422
        where the model cannot take them, 400 where they cannot be read."""
        check_images("the conversation", len(files), self.engine.info)
        made = await asyncio.to_thread(lambda: list(map(plain_image, files)))
        names = tuple(self.images.add(image.data) for image in made)
        prompt = EnginePrompt((), unexpanded_ids, self.images.of(names))
        return await self.engine.expanded(prompt), names

    def pieces(
        self,
        requests: Sequence[wire.RolloutRequest],
        seed: int | None,
        top_logprobs: int | None,
        special_tokens: bool,
    ) -> Pieces:
        """Their completions, piece by piece. Raises HTTPError (422) for a request that the model cannot take."""
        for one in requests:
            check_request(one, self.engine.info, self.max_n)
        return EnginePieces(
            self.engine,
            self.admission,
            lambda: self.weight_version,
            [(self._prompt(one), one) for one in requests],
            seed,
            top_logprobs,
            special_tokens,
        )

    async def score(self, request: wire.ScoreRequest, lease: str | None) -> wire.ScoreResponse:
        """Log-probs of given tokens; at a temperature other than 1, and with adapters, it has the engine for itself."""
        longest = self.engine.info.max_model_len - 1
        for number, sequence in enumerate(request.sequences):
            name = f"sequence {number}"
            check_tokens(name, sequence, self.engine.info.vocab_size)
            check_placeholders(name, sequence, self.engine.info)
            if not 2 <= len(sequence) <= longest:
                raise HTTPError(
                    422, f"{name} has {len(sequence)} tokens; 2 to {longest} can be scored"
                )
        if request.temperature != 1.0 or self.engine.scores_alone:
            async with self.admission.alone(), self._score_temperature(request.temperature):
                version = self.machine.version
                rows, *copies = await self._scores(request, lease)
        else:
            while True:
                async with self.admission.admitted():
                    version = self.machine.version
                    rows, *copies = await self._scores(request, lease)
                    # Where updates do not wait, one may have come meanwhile.
                    if self.machine.newest_version == version:
                        break
        more: dict[str, Any] = {}
        if request.top:
            more = {
                "top_ids": [one.top_ids for one in rows],
                "top_logprobs": [one.top_logprobs for one in rows],
            }
        logprobs, *others = (tuple(one.logprobs for one in copy) for copy in (rows, *copies))
        return wire.ScoreResponse(
            logprobs=logprobs, weight_version=version, copies=tuple(others), **more
        )

    async def _scores(
        self, request: wire.ScoreRequest, lease: str | None
    ) -> list[Sequence[Scored]]:
        """Asks every copy of the model for its scores, where each must use the weights that it was sent."""

        async def of_one(engine: InferenceEngine, sequence: Sequence[int]) -> Scored:
            if request.top:
                return await engine.score_top(sequence, request.top)
            return Scored(await engine.score(sequence))

        async def score(engine: InferenceEngine) -> Sequence[Scored]:
            if engine.scores_alone:
                return [await of_one(engine, one) for one in request.sequences]
            return await all_results([of_one(engine, one) for one in request.sequences])

        engines = (
            self.engine.engines
            if isinstance(self.engine, Replicas) and request.every_copy
            else (self.engine,)
        )
        return await self.admission.stoppable([score(engine) for engine in engines], lease)

    @asynccontextmanager
    async def _score_temperature(self, temperature: float) -> AsyncIterator[None]:
        try:
            if temperature != 1.0:
                await self.engine.set_score_temperature(temperature)
            yield
        finally:
            if temperature != 1.0:
                await asyncio.shield(self.engine.set_score_temperature(1.0))


def _completion(one: Generated, version: int) -> wire.Completion:
    """Makes a completion of a generation that began with `version`."""
    versions = one.versions or ((0, version),)
    return wire.Completion(
        token_ids=one.token_ids,
        logprobs=one.logprobs,
        finish_reason=one.finish_reason,
        weight_version=versions[0][1],
        weight_versions=versions if len(versions) > 1 else None,
        routes=one.routes,
    )


def _gateway(config: RolloutArguments, metrics: ServerMetrics) -> Gateway:
    store = SessionStore(
        config.max_sessions, int(config.session_memory * 2**30), config.session_timeout
    )
    metrics.gauge("swift_open_sessions", "Sessions that have not ended", lambda: len(store))
    metrics.gauge("swift_session_bytes", "Size of their records", lambda: store.bytes)
    return Gateway(store)


class Lifecycle:
    """Loads the engine in the background, watches it, and says when the process must end."""

    def __init__(self, config: RolloutArguments, load: Load) -> None:
        self._config = config
        self._load = load
        self.metrics = ServerMetrics()
        self.service: RolloutService | None = None  # until the engine has loaded
        self.dead: str | None = None  # why it cannot serve any more
        self.gateway = _gateway(config, self.metrics)
        self.failure: BaseException | None = None  # what loading raised
        self._gauge(
            "swift_weight_version", "Version of the served weights", lambda one: one.machine.version
        )
        self._gauge(
            "swift_running_requests", "Requests in the engine", lambda one: one.admission.running
        )
        self._gauge(
            "swift_asleep", "Sleep level of the engine", lambda one: one.updates.sleeping.level
        )
        self._gauge(
            "swift_ready",
            "1 while generations are let in",
            lambda one: one.admission.why_closed is None,
        )

    def _gauge(self, name: str, what: str, value: Callable[[RolloutService], float]) -> None:
        """0 while the model loads."""
        self.metrics.gauge(name, what, lambda: 0 if self.service is None else value(self.service))

    @property
    def why_not_ready(self) -> str | None:
        if self.dead is not None:
            return self.dead
        if self.service is None:
            return "the model is being loaded"
        return self.service.admission.why_closed

    def loaded(self) -> RolloutService:
        """Raises HTTPError (503) before the engine has loaded and after it died."""
        if self.service is None or self.dead is not None:
            raise HTTPError(503, self.why_not_ready or "", 5)
        return self.service

    async def run(self) -> None:
        """Loads, then watches; returns once the server cannot serve (see `dead` and `failure`)."""
        try:
            engine, expected = await self._loading()
        except Exception as error:  # noqa: BLE001 - whatever it is, the process reports it and ends
            self.failure = error
            self.dead = f"the model could not be loaded: {one_line(error)}"
            return
        self.service = RolloutService(self._config, engine, expected, self.metrics)
        logger.info("%s", self.service.tool_calls.said())
        config = self._config
        length = engine.info.max_model_len
        address = url_of(config.host, config.port, "https" if config.ssl_certfile else "http")
        logger.info(
            "serving %s at %s (%d weights, max_model_len %d)",
            config.model,
            address,
            len(expected),
            length,
        )
        leases = asyncio.create_task(self.service.updates.watch_leases())
        try:
            while not engine.dead:
                await asyncio.sleep(_WATCH_EVERY_S)
        finally:
            leases.cancel()
        self.dead = "the engine died"
        logger.error("the engine died; this server ends in %g s", _DEAD_GRACE_S)
        await asyncio.sleep(_DEAD_GRACE_S)

    def _loading(self) -> Awaitable[tuple[InferenceEngine, Shapes]]:
        """Loads in a daemon thread that never ends: the kernel ends the engine's processes with the thread that started
        them."""
        loaded: Future[tuple[InferenceEngine, Shapes]] = Future()
        loaded.set_running_or_notify_cancel()

        def load() -> None:
            try:
                loaded.set_result(self._load())
            except BaseException as error:  # noqa: BLE001 - raised again where the result is awaited
                loaded.set_exception(error)
            threading.Event().wait()

        threading.Thread(target=load, name="engine", daemon=True).start()
        return asyncio.wrap_future(loaded)

    def close(self) -> None:
        if self.service is not None:
            self.service.updates.staging.close()
            self.service.engine.shutdown()
