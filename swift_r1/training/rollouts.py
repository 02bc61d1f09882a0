"""Completions for the loop, from this process's own weights or from a rollout server, by the same calls.

All methods are collective: every rank calls them, the main rank passes and receives.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from swift_r1.errors import RunFailed
from swift_r1.rollout.engines.transformers import TransformersEngine
from swift_r1.rollout.protocol import Completion, RolloutOutput, RolloutRequest, SamplingParams
from swift_r1.training.backends.base import Backend
from swift_r1.training.distributed import Ranks
from swift_r1.training.lora import policy_weights

if TYPE_CHECKING:
    from swift_r1.rollout.client import RolloutClient

OnDone = Callable[[int], None]
_FINISH_REASONS = ("stop", "length", "abort")


class Rollouts(Protocol):
    weight_version: int
    """Version of the weights that the next completions come from."""

    max_model_length: int | None
    """Longest prompt with completion in tokens, known on the main rank; None for no limit."""

    def generate(self, requests: Sequence[RolloutRequest] | None, on_done: OnDone) -> list[RolloutOutput] | None:
        """Completions of all requests, in order, on the main rank."""
        ...

    def publish_weights(self) -> None:
        """From here on completions come from the trainer's current weights."""
        ...

    def resume(self, weight_version: int) -> None:
        """The run goes on after `weight_version` was published."""
        ...


def completion_seed(run_seed: int, *where: object) -> int:
    """A completion's own seed, 63 bits, from the run's seed and its place in the run."""
    text = "/".join(map(str, (run_seed, *where)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class ServerRollouts:
    """A `swift rollout` server; only the main rank talks to it, all ranks gather the weights."""

    def __init__(
        self,
        client: RolloutClient | None,
        backend: Backend,
        first_version: int,
        max_model_length: int | None,
    ) -> None:
        self.client, self.backend, self.max_model_length = client, backend, max_model_length
        self.weight_version = first_version

    def generate(self, requests: Sequence[RolloutRequest] | None, on_done: OnDone) -> list[RolloutOutput] | None:
        if self.client is None:
            return None
        assert requests is not None
        outputs = self.client.generate(requests, on_done)
        for output in outputs:
            for completion in output.completions:
                if completion.finish_reason == "abort" or completion.weight_version != self.weight_version:
                    raise RunFailed(
                        f"the rollout server answered with weight version {completion.weight_version} "
                        f"({completion.finish_reason}) where {self.weight_version} was published: "
                        "another trainer may be writing to it"
                    )
        return outputs

    def resume(self, weight_version: int) -> None:
        """Nothing to do: a server counts by itself, over all runs that it has served."""

    def publish_weights(self) -> None:
        self.weight_version += 1
        buckets = self.backend.weight_buckets(policy_weights(self.backend.model))
        if self.client is None:
            for _bucket in buckets:
                pass
        else:
            self.client.push_weights(self.weight_version, buckets)


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

    def generate(self, requests: Sequence[RolloutRequest] | None, on_done: OnDone) -> list[RolloutOutput] | None:
        tensors = self.ranks.broadcast(_flatten_requests(requests) if requests is not None else None)
        everyones = _restore_requests(tensors)
        mine = everyones[self.ranks.rank :: self.ranks.world_size]
        outputs = self.engine.generate(mine, self.weight_version, on_done)
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
                restored[number] = RolloutOutput(request_id=request.request_id, completions=tuple(taken))
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
