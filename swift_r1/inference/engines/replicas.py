"""Several copies of the model as one engine: each completion goes to the least loaded copy, new weights to all.

vLLM can do the first by itself (`data_parallel_size`); with engines of our own the server knows of each that it has
loaded a version whole, and the probe asks each.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from swift_r1.inference.engines.base import Generated, InferenceEngine, Piece
from swift_r1.wire.protocol import AdapterConfig, SamplingParams, StreamedTensor


class Replicas:
    """The `InferenceEngine` of several equal engines.

    Attributes:
        engines: each with a copy of the model.
    """

    def __init__(self, engines: Sequence[InferenceEngine]) -> None:
        self.engines = engines
        self._load = [0] * len(engines)
        # A group of their workers would need a rank for each copy: weights come as files.
        self.info = replace(engines[0].info, nccl_workers=0)

    @property
    def next_version(self) -> int:
        return self.engines[0].next_version

    @next_version.setter
    def next_version(self, version: int) -> None:
        for engine in self.engines:
            engine.next_version = version

    @property
    def dead(self) -> bool:
        return any(engine.dead for engine in self.engines)

    @property
    def scores_alone(self) -> bool:
        return any(engine.scores_alone for engine in self.engines)

    async def generate(self, prompt: Sequence[int], sampling: SamplingParams, seed: int | None) -> Generated:
        with self._least_loaded() as engine:
            return await engine.generate(prompt, sampling, seed)

    async def stream(
        self, prompt: Sequence[int], sampling: SamplingParams, seed: int | None, top_logprobs: int | None
    ) -> AsyncIterator[Piece]:
        with self._least_loaded() as engine:
            async for piece in engine.stream(prompt, sampling, seed, top_logprobs):
                yield piece

    def render(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        return self.engines[0].render(messages)

    @property
    def turn_end(self) -> int | None:
        return self.engines[0].turn_end

    def encode(self, text: str) -> tuple[int, ...]:
        return self.engines[0].encode(text)

    async def score(self, sequence: Sequence[int]) -> tuple[float, ...]:
        with self._least_loaded() as engine:
            return await engine.score(sequence)

    async def set_score_temperature(self, temperature: float) -> None:
        await _all(engine.set_score_temperature(temperature) for engine in self.engines)

    async def load_weights(self, files: Sequence[Path]) -> None:
        await _all(engine.load_weights(files) for engine in self.engines)

    async def load_adapter(self, files: Sequence[Path], config: AdapterConfig) -> None:
        await _all(engine.load_adapter(files, config) for engine in self.engines)

    async def sleep(self, level: int) -> None:
        await _all(engine.sleep(level) for engine in self.engines)

    async def wake(self, weights_only: bool = False) -> None:
        await _all(engine.wake(weights_only) for engine in self.engines)

    async def join_nccl(self, unique_id: str, world_size: int) -> None:
        raise NotImplementedError("copies of a model take weights over http or shm")

    async def receive_weights(self, tensors: Sequence[StreamedTensor], first: bool) -> None:
        raise NotImplementedError("copies of a model take weights over http or shm")

    async def finish_receiving(self) -> None:
        raise NotImplementedError("copies of a model take weights over http or shm")

    def shutdown(self) -> None:
        for engine in self.engines:
            engine.shutdown()

    @contextmanager
    def _least_loaded(self) -> Iterator[InferenceEngine]:
        number = min(range(len(self.engines)), key=self._load.__getitem__)
        self._load[number] += 1
        try:
            yield self.engines[number]
        finally:
            self._load[number] -= 1


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Until each has ended, also where one has failed: none may still be reading when its files are put away."""
    ended = await asyncio.gather(*work, return_exceptions=True)
    for one in ended:
        if isinstance(one, BaseException):
            raise one
