"""Completions for the loop, from this process's own weights or from a rollout server, by the same calls.

Here is what the two have in common, and the first; `remote.py` has the second.

All methods are collective: every rank calls them, the main rank passes and receives.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from swift_r1.inference.engines.transformers import TransformersEngine
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.base import Backend
from swift_r1.wire.protocol import Completion, RolloutOutput, RolloutRequest, SamplingParams

OnDone = Callable[[int], None]
"""Told how many more completions have ended."""

OnOutput = Callable[[RolloutOutput], None]
"""Given each request's completions as soon as all of them are there, on the main rank; must not wait."""

_FINISH_REASONS = ("stop", "length", "abort")


class Generator(Protocol):
    def generate(
        self, requests: Sequence[RolloutRequest] | None, on_done: OnDone, on_output: OnOutput
    ) -> list[RolloutOutput] | None:
        """Completions of all requests, in order, on the main rank."""
        ...


class Rollouts(Generator, Protocol):
    weight_version: int
    """Version of the weights that the next completions come from."""

    max_model_length: int | None
    """Longest prompt with completion in tokens, known on the main rank; None for no limit."""

    def publish_weights(self) -> None:
        """From here on completions come from the trainer's current weights."""
        ...

    def resume(self, weight_version: int) -> None:
        """The run goes on after `weight_version` was published."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """What there is to log since the last call."""
        ...


def ignore_output(_output: RolloutOutput) -> None:
    """The `OnOutput` of one who waits for all of them."""


class EmbeddedRollouts:
    """The transformers engine in each training process; every rank generates its share of the requests."""

    def __init__(self, engine: TransformersEngine, backend: Backend, ranks: Ranks) -> None:
        self.engine, self.backend, self.ranks = engine, backend, ranks
        self.max_model_length: int | None = getattr(engine.config, "max_position_embeddings", None)
        self.weight_version = 0

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
        """As of `Rollouts`; the completions of the other ranks are given to `on_output` at the end."""
        tensors = self.ranks.broadcast(_flatten_requests(requests) if requests is not None else None)
        everyones = _restore_requests(tensors)
        mine = everyones[self.ranks.rank :: self.ranks.world_size]
        own = list(requests or ())[self.ranks.rank :: self.ranks.world_size]

        def ended(number: int, output: RolloutOutput) -> None:
            if own:
                on_output(RolloutOutput(request_id=own[number].request_id, completions=output.completions))

        with self.ranks.busy():
            outputs = self.engine.generate(mine, self.weight_version, on_done, ended)
        flat = _Completions.of([completion for output in outputs for completion in output.completions])
        gathered = [self.ranks.gather(tensor) for tensor in (flat.lengths, flat.reasons, flat.tokens, flat.logprobs)]
        if requests is None:
            return None
        restored: list[RolloutOutput | None] = [None] * len(requests)
        for rank in range(self.ranks.world_size):
            parts = [tensors[rank] for tensors in gathered if tensors is not None]
            completions = _Completions(*parts).restore(self.weight_version)
            for number in range(rank, len(requests), self.ranks.world_size):
                request = requests[number]
                taken, completions = completions[: request.n], completions[request.n :]
                restored[number] = output = RolloutOutput(request_id=request.request_id, completions=tuple(taken))
                if rank != self.ranks.rank:
                    on_output(output)
        return [output for output in restored if output is not None]


@dataclass(frozen=True, slots=True)
class _Completions:
    """Completions as flat tensors: `lengths [N]`, `reasons [N]`, `tokens [sum]` int64, `logprobs [sum]` float32."""

    lengths: Tensor
    reasons: Tensor
    tokens: Tensor
    logprobs: Tensor

    @staticmethod
    def of(completions: Sequence[Completion]) -> _Completions:
        return _Completions(
            torch.tensor([len(c.token_ids) for c in completions], dtype=torch.long),
            torch.tensor([_FINISH_REASONS.index(c.finish_reason) for c in completions], dtype=torch.long),
            torch.tensor([token for c in completions for token in c.token_ids], dtype=torch.long),
            torch.tensor([value for c in completions for value in c.logprobs], dtype=torch.float32),
        )

    def restore(self, weight_version: int) -> list[Completion]:
        lengths = self.lengths.tolist()
        return [
            Completion(
                token_ids=tuple(tokens.tolist()),
                logprobs=tuple(logprobs.tolist()),
                finish_reason=_FINISH_REASONS[reason],  # type: ignore[arg-type]
                weight_version=weight_version,
            )
            for tokens, logprobs, reason in zip(
                self.tokens.split(lengths), self.logprobs.split(lengths), self.reasons.tolist(), strict=True
            )
        ]


def _flatten_requests(requests: Sequence[RolloutRequest]) -> list[Tensor]:
    """Prompt lengths, prompt tokens, completions a prompt, seeds; which sampling, and the samplings as JSON."""
    samplings = list(dict.fromkeys(request.sampling for request in requests))
    columns = (
        [len(request.prompt_token_ids) for request in requests],
        [token for request in requests for token in request.prompt_token_ids],
        [request.n for request in requests],
        [seed for request in requests for seed in request.seeds or ()],
        [samplings.index(request.sampling) for request in requests],
        json.dumps([sampling.model_dump() for sampling in samplings]).encode(),
    )
    return [torch.tensor(list(column), dtype=torch.long) for column in columns]


def _restore_requests(tensors: Sequence[Tensor]) -> list[RolloutRequest]:
    lengths, tokens, counts, seeds, which, samplings = tensors
    known = [SamplingParams(**values) for values in json.loads(bytes(samplings.tolist()))]
    prompts, seeds_of = tokens.split(lengths.tolist()), seeds.split(counts.tolist())
    return [
        RolloutRequest(
            request_id=str(number),
            prompt_token_ids=tuple(prompt.tolist()),
            n=len(own),
            seeds=tuple(own.tolist()),
            sampling=known[sampling],
        )
        for number, (prompt, own, sampling) in enumerate(zip(prompts, seeds_of, which.tolist(), strict=True))
    ]
