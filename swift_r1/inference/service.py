"""What the server does, free of HTTP: rollouts, scores and weight updates over one engine."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from swift_r1.inference.admission import Admission
from swift_r1.inference.config import ServerConfig
from swift_r1.inference.engines.base import Generated, InferenceEngine
from swift_r1.inference.engines.replicas import Replicas
from swift_r1.inference.idempotency import IdempotencyCache
from swift_r1.inference.limits import check_request, check_tokens
from swift_r1.inference.metrics import ServerMetrics
from swift_r1.inference.updates import WeightUpdates
from swift_r1.weights.expected import Shapes
from swift_r1.weights.update import UpdateMachine
from swift_r1.wire import protocol as wire
from swift_r1.wire.http_errors import HTTPError, Overloaded

T = TypeVar("T")
Rows = tuple[tuple[float, ...], ...]

logger = logging.getLogger("swift_r1.inference")

_SCORE = "score"
_FULL_S = 2
"""After so many seconds a server that was full may be asked again."""


class RolloutService:
    """One loaded engine and the promises around it.

    Args:
        expected: names and shapes of the model's weights.
    """

    def __init__(self, config: ServerConfig, engine: InferenceEngine, expected: Shapes, metrics: ServerMetrics) -> None:
        self.config = config
        self.engine = engine
        self.admission = Admission()
        self.cache = IdempotencyCache()
        # Held by whoever changes the engine (new weights, another score temperature).
        self._exclusive = asyncio.Lock()
        self.updating = WeightUpdates(
            config,
            engine,
            expected,
            metrics,
            self.admission,
            self._exclusive,
            self._stop_running,
            self.cache.forget_finished,
        )
        # Completions under way, those of the lease's holder apart.
        self._pending: Counter[bool] = Counter()
        self._running: dict[asyncio.Future[Any], _Running] = {}
        self._instance = secrets.token_hex(8)

        self.started = int(time.time())
        self.metrics = metrics
        self.metrics.gauge("swift_weight_version", "Version of the served weights", lambda: self.updates.version)
        self.metrics.gauge("swift_running_requests", "Requests in the engine", lambda: self.admission.running)
        self.metrics.gauge("swift_asleep", "Sleep level of the engine", lambda: self.updating.sleeping.level)
        self.metrics.gauge("swift_ready", "1 while generations are let in", lambda: self.admission.why_closed is None)

    @property
    def model_name(self) -> str:
        return self.config.served_model_name or self.config.model

    # Answers

    def info(self) -> wire.ServerInfo:
        known = self.engine.info
        return wire.ServerInfo(
            instance=self._instance,
            model=self.model_name,
            engine=known.name,
            engine_version=known.version,
            vocab_size=known.vocab_size,
            tokenizer_hash=known.tokenizer_hash,
            weight_version=self.updates.version,
            broken=self.updates.broken,
            asleep=self.updating.sleeping.level,
            max_model_len=known.max_model_len,
            max_n=self.max_n,
            dtype=known.dtype,
            max_lora_rank=self.config.vllm_max_lora_rank if self.config.vllm_enable_lora else None,
            own_base=self.updating.own_base,
            nccl_workers=known.nccl_workers,
        )

    @property
    def updates(self) -> UpdateMachine:
        return self.updating.machine

    @property
    def max_n(self) -> int:
        """Most completions that a request may ask for."""
        return min(self.config.max_n, self.config.max_pending_requests)

    async def rollouts(self, batch: wire.RolloutBatch, lease: str | None = None) -> wire.RolloutResponse:
        """All requests of the batch, in its order.

        Raises:
            HTTPError: 422 for a request that the model cannot take (nothing is generated then), 503 for "not now".
            EngineDead: the engine's process ended.
        """
        for request in batch.requests:
            check_request(request, self.engine.info, self.max_n)

        async def generate(request: wire.RolloutRequest) -> wire.RolloutOutput:
            return await self._generate(request, lease)

        with self.room_for(sum(request.n for request in batch.requests), lease):
            outputs = await _all([self.cache.answer(request, generate) for request in batch.requests])
        return wire.RolloutResponse(outputs=tuple(outputs))

    async def score(self, request: wire.ScoreRequest, lease: str | None = None) -> wire.ScoreResponse:
        """Log-probs of given tokens; at a temperature other than 1, and with adapters, it has the engine for itself."""
        for number, sequence in enumerate(request.sequences):
            check_tokens(f"sequence {number}", sequence, self.engine.info.vocab_size)
            if not 2 <= len(sequence) < self.engine.info.max_model_len:
                raise HTTPError(
                    422,
                    f"sequence {number} has {len(sequence)} tokens; 2 to {self.engine.info.max_model_len - 1} "
                    "can be scored",
                )
        if request.temperature == 1.0 and not self.engine.scores_alone:
            while True:
                async with self.admission.shared(self.config.update_timeout):
                    version = self.updates.version
                    rows, *copies = await self.stoppable(self._scores(request.sequences), lease)
                    # Where updates do not wait, one may have come meanwhile.
                    if self.updates.newest_version == version:
                        break
        else:
            version, (rows, *copies) = await self._score_alone(request.temperature, request.sequences, lease)
        return wire.ScoreResponse(logprobs=rows, weight_version=version, copies=tuple(copies))

    def close(self) -> None:
        self.updating.staging.close()
        self.engine.shutdown()

    @contextmanager
    def room_for(self, completions: int, lease: str | None = None) -> Iterator[None]:
        """Runs the body as one request of so many completions. The lease's holder is not refused for others' sake.

        Raises:
            HTTPError: 422 for more than the server ever takes at once, 503 for more than it takes now.
        """
        limit, own = self.config.max_pending_requests, self.updates.holds(lease)
        if completions > limit:
            raise HTTPError(
                422, f"{completions} completions at once are more than this server takes ({limit}): ask for fewer"
            )
        pending = self._pending[True] if own else self._pending.total()
        if pending + completions > limit:
            raise Overloaded(
                503, f"{pending} completions are under way, {completions} more are over the limit of {limit}", _FULL_S
            )
        self._pending[own] += completions
        try:
            yield
        finally:
            self._pending[own] -= completions

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[int]:
        """Runs the body as a generation; gives the weight version that it begins with.

        Raises:
            HTTPError: 503 where it was not let in.
        """
        async with self.admission.shared(self.config.update_timeout):
            if self.updates.broken is not None:
                raise HTTPError(503, self.updates.broken, 5)
            yield self.updates.version

    # Inside

    async def _generate(self, request: wire.RolloutRequest, lease: str | None) -> wire.RolloutOutput:
        async with self.admitted() as version:
            seeds: Sequence[int | None] = request.seeds or (None,) * request.n
            done = await self.stoppable(
                [self.engine.generate(request.prompt_token_ids, request.sampling, seed) for seed in seeds], lease
            )
            newest = self.updates.newest_version
            output = wire.RolloutOutput(
                request_id=request.request_id, completions=tuple(_completion(one, version, newest) for one in done)
            )
            self.metrics.completed(output)
            return output

    async def stoppable(self, work: Sequence[Awaitable[T]], lease: str | None = None) -> list[T]:
        """The results; HTTPError (503) where an update stopped the work of whoever showed this `lease`."""
        task = asyncio.ensure_future(_all(work))
        self._running[task] = running = _Running(lease)
        try:
            return await task
        except asyncio.CancelledError:
            if running.stopped is not None:
                raise HTTPError(503, running.stopped, 1) from None
            raise
        finally:
            del self._running[task]

    def _stop_running(self, what_for: str, others_alone: bool) -> None:
        stopped, why = 0, f"{what_for} stopped it; ask again"
        for task, running in self._running.items():
            if not (others_alone and self.updates.holds(running.lease)):
                running.stopped = why
                task.cancel()
                stopped += 1
        if stopped:
            logger.info("%s stopped %d running requests", what_for, stopped)

    @property
    def _engines(self) -> Sequence[InferenceEngine]:
        """Every copy of the model: each must use the weights that it was sent."""
        return self.engine.engines if isinstance(self.engine, Replicas) else (self.engine,)

    def _scores(self, sequences: Sequence[Sequence[int]]) -> list[Awaitable[Rows]]:
        return [self._score(engine, sequences) for engine in self._engines]

    async def _score(self, engine: InferenceEngine, sequences: Sequence[Sequence[int]]) -> Rows:
        if engine.scores_alone:
            return tuple([await engine.score(one) for one in sequences])
        return tuple(await _all([engine.score(one) for one in sequences]))

    async def _score_alone(
        self, temperature: float, sequences: Sequence[Sequence[int]], lease: str | None
    ) -> tuple[int, list[Rows]]:
        timeout = self.config.update_timeout
        async with self.admission.shared(timeout):
            pass
        async with self._exclusive:
            if (why := self.admission.why_closed) is not None:  # since it was let in
                raise HTTPError(503, why, 5)
            await self.admission.close(_SCORE, "scoring that has the engine for itself")
            try:
                await self.admission.drained(timeout, "scoring")
                try:
                    if temperature != 1.0:
                        await self.engine.set_score_temperature(temperature)
                    return self.updates.version, await self.stoppable(self._scores(sequences), lease)
                finally:
                    if temperature != 1.0:
                        await asyncio.shield(self.engine.set_score_temperature(1.0))
            finally:
                await self.admission.open(_SCORE)


@dataclass(slots=True)
class _Running:
    """Work in the engine: the lease that its asker showed, and why it was stopped."""

    lease: str | None
    stopped: str | None = None


def _completion(one: Generated, version: int, newest: int) -> wire.Completion:
    """Of a generation that began with `version` and was over when `newest` was there, or on its way."""
    versions = one.versions or ()
    if versions:
        version, newest = versions[0][1], versions[-1][1]
    return wire.Completion(
        token_ids=one.token_ids,
        logprobs=one.logprobs,
        finish_reason=one.finish_reason,
        weight_version=version,
        newest_weight_version=newest if newest != version else None,
        weight_versions=versions if len(versions) > 1 else None,
    )


async def _all(work: Sequence[Awaitable[T]]) -> list[T]:
    """Results in order; the first failure, or our own cancellation, cancels the rest."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
