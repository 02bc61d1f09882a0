"""Completions for the loop, from this process's own weights (here) or from rollout servers (`remote.py`).

All methods are collective: every rank calls them, rank 0 passes and receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swift_r1.data.prompts import Prompt
from swift_r1.models.logprobs import TokenLogprobs
from swift_r1.models.policy import ModelInputs
from swift_r1.models.weights import Weight
from swift_r1.runtime.ranks import Ranks
from swift_r1.serving.engines.transformers import TransformersEngine
from swift_r1.wire.protocol import (
    Completion,
    FinishReason,
    RolloutBatch,
    RolloutOutput,
    RolloutRequest,
    RolloutResponse,
)

OnDone = Callable[[int], None]  # told how many more completions have ended
OnOutput = Callable[[RolloutOutput], None]  # given each request's completions at once, on rank 0; must not wait


FAILURES = ("exception", "exit", "timeout", "died", "memory", "silent", "result")
"""Why an agent's episode has no valid reward: its class raised; its command ended with another code than 0; its
deadline; its process was killed, or was over its memory limit; it made no call of the model that was answered; what it
returned is no result."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One row of a batch: a prompt, and `T` tokens behind it."""

    prompt_token_ids: Sequence[int]
    completion: Completion  # all `T`; those that the policy did not write have log-probs of 0
    loss_mask: Sequence[bool]  # `T`, True where the policy wrote it and it is trained
    turns: Sequence[int] = ()  # `T`, the number of the agent's turn that wrote it, -1 where none did; empty: not asked


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt and what followed, one of its group: the policy's completion, several turns that a scheduler led, or an
    agent's episode, whose calls may make several sequences, or none."""

    request_id: str  # of the prompt, the same for its whole group
    prompt: Prompt  # with the tokens of the first turn's prompt (an environment makes its own)
    sequences: Sequence[TokenSequence]
    turns: Sequence[Sequence[int]]  # the tokens of each turn of the policy
    messages: list[dict[str, Any]]  # the whole conversation; of several sequences of an agent, the last one's
    text: str  # what rewards see: the last turn, a response prefix included
    finish_reason: FinishReason
    infos: Mapping[str, Any] | None = None  # what scheduler or agent noted, `num_turns` at least; None without one
    other_messages: Sequence[list[dict[str, Any]]] = ()  # of the sequences before, by their last call
    failure: str | None = None  # of an agent's episode without a valid reward: one of `FAILURES`, and `: cause`

    @property
    def completions(self) -> list[Completion]:
        return [one.completion for one in self.sequences]

    @property
    def turn_rewards(self) -> Sequence[float]:
        """Returns the rewards that an agent gave its turns, if it did."""
        return (self.infos or {}).get("turn_rewards") or ()

    @property
    def length(self) -> int:
        """Counts the tokens, prompts aside."""
        return sum(len(one.completion.token_ids) for one in self.sequences)


class TrainedPolicy(Protocol):
    """The part of a training backend that sampling needs (see there)."""

    @property
    def model(self) -> PreTrainedModel: ...
    def logprobs(self, inputs: ModelInputs, temperature: float) -> TokenLogprobs: ...
    def generation_model(self) -> PreTrainedModel: ...
    def weight_buckets(
        self, weights: Sequence[Weight], to: int = 0, on_host: bool = True
    ) -> Iterator[Sequence[tuple[str, Tensor]]]: ...


class Generator(Protocol):
    def generate(
        self, requests: Sequence[RolloutRequest] | None, on_done: OnDone, on_output: OnOutput
    ) -> list[RolloutOutput] | None:
        """Completions of all requests, in order, on rank 0."""
        ...


class Rollouts(Generator, Protocol):
    weight_version: int  # of the weights that the next completions come from
    max_model_length: int | None  # of prompt and completion in tokens, known on rank 0; None for no limit
    unwanted: Callable[[], bool]
    """Asked while completions are generated, on each rank: once it is True they end as they are, for nobody wants them.
    """

    def publish_weights(self) -> None:
        """Has completions come from the trainer's current weights from here on."""

    def resume(self, weight_version: int) -> None:
        """The run goes on after `weight_version` was published."""

    def take_metrics(self) -> dict[str, float]:
        """Returns what there is to log since the last call."""
        ...


def still_wanted() -> bool:
    """The `unwanted` of completions that must be whole."""
    return False


def ignore_output(_output: RolloutOutput) -> None:
    """The `OnOutput` of a caller that waits for all of them."""


class EmbeddedRollouts:
    """The transformers engine in each training process; every rank generates its share of the requests."""

    def __init__(self, engine: TransformersEngine, backend: TrainedPolicy, ranks: Ranks) -> None:
        self.engine = engine
        self.backend = backend
        self.ranks = ranks
        self.max_model_length: int | None = getattr(engine.config, "max_position_embeddings", None)
        self.weight_version = 0
        self.unwanted = still_wanted

    def resume(self, weight_version: int) -> None:
        self.weight_version = weight_version

    def publish_weights(self) -> None:
        self.engine.model = self.backend.generation_model()
        self.weight_version += 1

    def take_metrics(self) -> dict[str, float]:
        return {}

    def generate(
        self, requests: Sequence[RolloutRequest] | None, on_done: OnDone, on_output: OnOutput
    ) -> list[RolloutOutput] | None:
        """Answers each request; the completions of the other ranks are given to `on_output` at the end."""
        rank = self.ranks.rank
        world_size = self.ranks.world_size
        asked = None if requests is None else [_encoded(RolloutBatch(requests=tuple(requests)))]
        told = self.ranks.broadcast(asked)[0]
        mine = RolloutBatch.model_validate_json(told.numpy().tobytes()).requests[rank::world_size]
        with self.ranks.busy():
            outputs = self.engine.generate(
                mine,
                self.weight_version,
                on_done,
                lambda _number, output: on_output(output) if requests else None,
                self.unwanted,
            )
        everyones = self.ranks.gather(_encoded(RolloutResponse(outputs=tuple(outputs))))
        if requests is None or everyones is None:
            return None
        answers = {output.request_id: output for output in outputs}
        for part in everyones[1:]:
            for output in RolloutResponse.model_validate_json(part.numpy().tobytes()).outputs:
                answers[output.request_id] = output
                on_output(output)
        return [answers[request.request_id] for request in requests]


def _encoded(message: RolloutBatch | RolloutResponse) -> Tensor:
    """JSON as uint8 `[bytes]`: floats come back as they were."""
    return torch.frombuffer(bytearray(message.model_dump_json().encode()), dtype=torch.uint8)
