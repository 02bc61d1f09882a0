"""What the server asks of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from swift_r1.rollout.protocol import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What is known once the engine has loaded; `max_model_len` counts prompt and completion."""

    name: str
    version: str
    vocab_size: int
    tokenizer_hash: str
    max_model_len: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Generated:
    """One completion: `T` token ids, `T` log-probs (natural log, after temperature)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


class Engine(Protocol):
    """An engine with one set of weights. Methods raise EngineDead once its process is gone."""

    info: EngineInfo

    @property
    def dead(self) -> bool: ...

    async def generate(self, prompt: Sequence[int], sampling: SamplingParams, seed: int | None) -> Generated:
        """Samples one completion; cancelling the call stops the engine's work on it."""

    async def score(self, sequence: Sequence[int]) -> tuple[float, ...]:
        """The `L - 1` log-probs of a sequence's tokens after the first, under the temperature set last."""

    async def set_score_temperature(self, temperature: float) -> None:
        """Divides all logits by `temperature`. Only for an engine that does nothing else; set it back to 1."""

    async def load_weights(self, files: Sequence[Path]) -> None:
        """Replaces all weights by those of the safetensors files and forgets cached prefixes.

        After an exception the engine may hold a mixture, until a later call succeeds.
        """

    def shutdown(self) -> None: ...
