"""What the server asks of an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from swift_r1.wire.protocol import AdapterConfig, FinishReason, SamplingParams, StreamedTensor


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What is known once the engine has loaded; `max_model_len` counts prompt and completion. `can_sleep`: it has
    `sleep` and `wake`."""

    name: str
    version: str
    vocab_size: int
    tokenizer_hash: str
    max_model_len: int
    dtype: str
    nccl_workers: int = 0
    can_sleep: bool = False


@dataclass(frozen=True, slots=True)
class Generated:
    """One completion: `T` token ids, `T` log-probs (natural log, after temperature).

    `versions` are `(first token, weight version)` in order, at least one; None where the engine cannot tell.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    versions: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token with its text and log-prob; `top` are the likeliest tokens in its place, where they were asked for."""

    token_id: int
    text: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """What a completion has grown by: token ids, and text without special tokens (which may lag behind them)."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None


class InferenceEngine(Protocol):
    """An engine with one set of weights. Methods raise EngineDead once its process is gone.

    Attributes:
        next_version: set before a load: the version of what it loads.
    """

    info: EngineInfo
    next_version: int

    @property
    def dead(self) -> bool: ...

    @property
    def scores_alone(self) -> bool:
        """Whether `score` must be the only call that runs."""

    async def generate(self, prompt: Sequence[int], sampling: SamplingParams, seed: int | None) -> Generated:
        """Samples one completion; cancelling the call stops the engine's work on it."""

    def stream(
        self, prompt: Sequence[int], sampling: SamplingParams, seed: int | None, top_logprobs: int | None
    ) -> AsyncIterator[Piece]:
        """Samples one completion, piece by piece; the last one has the reason of its end. `top_logprobs` of None leaves
        log-probs out."""

    def render(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Token ids of the conversation in the model's template, with the opening of an answer.

        Raises:
            HTTPError: 400 where the model has no template, or its template refuses the messages.
        """

    @property
    def turn_end(self) -> int | None:
        """The token that ends an answer in the model's template, where one does."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a plain text.

        Raises:
            HTTPError: 400 where it has none.
        """

    async def score(self, sequence: Sequence[int]) -> tuple[float, ...]:
        """The `L - 1` log-probs of a sequence's tokens after the first, under the temperature set last."""

    async def set_score_temperature(self, temperature: float) -> None:
        """Divides all logits by `temperature`. Only for an engine that does nothing else; set it back to 1."""

    async def load_weights(self, files: Sequence[Path]) -> None:
        """Replaces all weights by those of the safetensors files and forgets cached prefixes.

        After an exception the engine may hold a mixture, until a later call succeeds.
        """

    async def join_nccl(self, unique_id: str, world_size: int) -> None:
        """The workers join the NCCL group of this id (base64) as ranks 1, 2, ..., and leave an earlier one."""

    async def receive_weights(self, tensors: Sequence[StreamedTensor], first: bool) -> None:
        """Loads tensors that rank 0 of the group broadcasts now, one after another; `first` opens an update.

        Raises:
            EngineDead: they did not come in time: the workers wait in a collective that nothing ends.
        """

    async def finish_receiving(self) -> None:
        """Ends the update that `receive_weights` opened; every weight must have come."""

    async def load_adapter(self, files: Sequence[Path], config: AdapterConfig) -> None:
        """Generates and scores with the adapter of the safetensors files from now on; `load_weights` ends that.

        After an exception the one before stays in use.
        """

    async def sleep(self, level: int) -> None:
        """Gives its memory back: 1 keeps the weights on the host, 2 discards them. Only while nothing runs.

        Raises:
            EngineDead: it did not work, and the engine cannot be used any more.
        """

    async def wake(self, weights_only: bool = False) -> None:
        """Takes its memory again, or that of the weights alone, which is all that a load needs. Raises as `sleep`."""

    def shutdown(self) -> None: ...
