"""`python -m tests.fuzz.held_server MODEL_JSON [CONFIG_JSON]`: the real HTTP server over an engine that only holds
weights. It prints its port. MODEL_JSON has the names and shapes of the weights; `/v1/score` answers with a fingerprint
of what the engine holds, so a client can compare it with what it has sent."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load

from swift_r1.flags.server import RolloutArguments
from swift_r1.runtime.processes import leave, stop_at_once
from swift_r1.serving import server
from swift_r1.serving.engines.base import EngineInfo, EnginePrompt, Generated, PromptTokenizer
from swift_r1.wire.protocol import AdapterConfig, SamplingParams

NUMBERS = 4  # of a fingerprint, 32 bits each


def fingerprint(held: bytes) -> tuple[float, ...]:
    """Numbers that JSON carries exactly."""
    digest = xxhash.xxh3_128_digest(held)
    return tuple(float(int.from_bytes(digest[4 * i : 4 * i + 4], "big")) for i in range(NUMBERS))


class HeldEngine:
    """Holds what it is given, as vLLM and the engine of transformers read it from the files."""

    dead = scores_alone = False

    def __init__(self) -> None:
        self.prompts = PromptTokenizer(None)
        self.info = EngineInfo("held", "0", 50, "", 100, "float32")
        self.weights: dict[str, Any] = {}
        self.adapter: list[Any] | None = None
        self._remember()

    def _remember(self) -> None:
        tensors = sorted(
            (
                name,
                str(one.dtype),
                tuple(one.shape),
                one.reshape(-1).view(torch.uint8).numpy().tobytes(),
            )
            for name, one in self.weights.items()
        )
        digests = [(*about, xxhash.xxh3_128_hexdigest(raw)) for *about, raw in tensors]
        self._known = fingerprint(json.dumps([digests, self.adapter]).encode())

    async def load_weights(self, files: Sequence[Path], version: int) -> None:
        for file in files:
            # `load_file` of safetensors 0.8.0 keeps 60 bytes of each tensor for ever: memory would grow.
            self.weights |= {
                name: tensor.clone() for name, tensor in load(file.read_bytes()).items()
            }
        self._remember()

    async def load_adapter(
        self, files: Sequence[Path], config: AdapterConfig, version: int
    ) -> None:
        self.weights = {}
        self.adapter = [config.rank, config.alpha, list(config.target_modules), config.rslora]
        await self.load_weights(files, version)

    async def score(self, sequence: Sequence[int]) -> tuple[float, ...]:
        return self._known

    async def generate(
        self, prompt: EnginePrompt, sampling: SamplingParams, seed: int | None
    ) -> Generated:
        return Generated((1,), (-0.5,), "length")

    async def set_score_temperature(self, temperature: float) -> None: ...

    def shutdown(self) -> None: ...


def main(shapes: str, more: str = "{}") -> int:
    stop_at_once()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    expected = {name: tuple(shape) for name, shape in json.loads(shapes).items()}
    server.load_engine = lambda _config: (HeldEngine(), expected)  # type: ignore[assignment, return-value]
    config = RolloutArguments(
        **{"model": "held", "port": 0, "update_timeout": 5.0} | json.loads(more)
    )
    listener = server.bind(config.host, config.port)
    print(listener.getsockname()[1], flush=True)
    return asyncio.run(server.serve(config, listener))


if __name__ == "__main__":
    leave(main(*sys.argv[1:]))
