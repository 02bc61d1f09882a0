"""Completions for the loop, from this process's own weights (here) or from rollout servers (`remote.py`).

All methods are collective: every rank calls them, rank 0 passes and receives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swift_r1.data.images import ImageFile
from swift_r1.data.prompts import Prompt
from swift_r1.models.logprobs import TokenLogprobs
from swift_r1.models.policy import ModelInputs
from swift_r1.models.weights import Weight
from swift_r1.runtime.ranks import Ranks
from swift_r1.serving.engines.transformers import TransformersEngine
from swift_r1.wire.protocol import (
    RolloutBatch,
    RolloutOutput,
    RolloutRequest,
    RolloutResponse,
    RoutesAsked,
    SamplingParams,
)

OnDone = Callable[[int], None]  # told how many more completions have ended
# given each request's completions at once, on rank 0; must not wait
OnOutput = Callable[[RolloutOutput], None]
NO_IMAGES: Mapping[str, ImageFile] = {}


class GroupRequest(NamedTuple):
    """A prompt, and the request for the completions of its group.

    Example: four completions of a row: `prompt.token_ids` (5, 6), `request.request_id` "run/0/3", `request.n` 4
    """

    prompt: Prompt
    request: RolloutRequest

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        request_id: str,
        seeds: Sequence[int],
        sampling: SamplingParams,
        routes: RoutesAsked | None = None,
    ) -> GroupRequest:
        """Makes the request for as many completions of a prompt as there are seeds."""
        request = RolloutRequest(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            n=len(seeds),
            seeds=tuple(seeds),
            sampling=sampling,
            images=tuple(image.sha256 for image in prompt.images),
            unexpanded_token_ids=prompt.unexpanded_ids,
            routes=routes,
        )
        return cls(prompt, request)


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
        self,
        requests: Sequence[RolloutRequest] | None,
        on_done: OnDone,
        on_output: OnOutput,
        images: Mapping[str, ImageFile] = NO_IMAGES,
    ) -> list[RolloutOutput] | None:
        """Completions of all requests, in order, on rank 0. `images` are those that the requests name."""
        ...


class Rollouts(Generator, Protocol):
    weight_version: int  # of the weights that the next completions come from
    # of prompt and completion in tokens, known on rank 0; None for no limit
    max_model_length: int | None
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
        self,
        requests: Sequence[RolloutRequest] | None,
        on_done: OnDone,
        on_output: OnOutput,
        images: Mapping[str, ImageFile] = NO_IMAGES,
    ) -> list[RolloutOutput] | None:
        """Answers each request; the completions of the other ranks are given to `on_output` at the end."""
        rank = self.ranks.rank
        world_size = self.ranks.world_size
        asked = None
        if requests is not None:
            files = [_bytes(image.read()) for image in images.values()]
            asked = [_encoded(RolloutBatch(requests=tuple(requests))), *files]
        told, *pictures = self.ranks.broadcast(asked)
        contents = [one.numpy().tobytes() for one in pictures]
        by_name = {hashlib.sha256(one).hexdigest(): one for one in contents}
        mine = RolloutBatch.model_validate_json(told.numpy().tobytes()).requests[rank::world_size]
        with self.ranks.busy():
            outputs = self.engine.generate(
                mine,
                self.weight_version,
                on_done,
                lambda _number, output: on_output(output) if requests else None,
                self.unwanted,
                by_name,
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
    return _bytes(message.model_dump_json().encode())


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
