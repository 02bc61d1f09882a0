"""What the loop asks of a backend: hold a model, accumulate gradients, step, and hand out weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from swift_r1.models.logprobs import TokenLogprobs
from swift_r1.models.lora import Weight, adapters_off
from swift_r1.models.policy import ModelInputs
from swift_r1.training.backends.offload import Movable
from swift_r1.training.backends.optimizer_state import ReadTensor, StateBucket

WeightBucket = Sequence[tuple[str, Tensor]]
"""Whole tensors in the policy's dtype under their Hugging Face names."""

BUCKET_BYTES = 64 * 2**20


class Training(Protocol):
    """One rank's part of a model and its optimizer. Methods marked collective are called on every rank."""

    model: nn.Module
    """The transformers model being trained (its parameters may be partitioned)."""
    module: nn.Module
    """What computes with it: a `Policy` or a `Critic`."""
    weights: Movable
    """All that `module` computes with; whoever asks for weights or states below has them back on the device."""
    states: Movable
    """All that only an optimizer step needs: float32 masters, gradients, moments."""

    @property
    def loss_scale(self) -> float | None:
        """What the coming step's losses are multiplied by in float16; None in other dtypes."""
        ...

    def backward(self, loss: Tensor, last: bool) -> None:
        """Adds the gradient of `loss` (collective).

        `loss` is this rank's share of the whole optimizer step's loss: shares of all ranks and micro-batches
        add up. `last` marks the step's last micro-batch.
        """
        ...

    def step(self, learning_rate: float) -> float:
        """Clips, updates, clears gradients (collective). Returns the global gradient norm before clipping.

        Where that is not finite nothing is updated; in float16 the loss scale is halved then.
        """
        ...

    def weight_buckets(self, weights: Sequence[Weight], to: int = 0, on_host: bool = True) -> Iterator[WeightBucket]:
        """The whole values of `weights`, bucket by bucket (collective: every rank must exhaust it).

        A bucket is on the CPU (without `on_host` on the device) of the rank `to`, holds its values until the next
        optimizer step, and is empty elsewhere; only one bucket is gathered at a time.
        """
        ...

    def training_state(self) -> Iterator[StateBucket]:
        """Float32 weights, the optimizer's memory and the loss scale, bucket by bucket (collective, as
        `weight_buckets`); the ranks take turns in getting a bucket."""
        ...

    def load_training_state(self, read: ReadTensor) -> None:
        """Goes on from a saved `training_state` (collective: every rank reads). The model's weights follow.

        Raises:
            KeyError: the state lacks a parameter that is trained here.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """The resolved settings, for the log."""
        ...


class Backend(Training, Protocol):
    """The policy."""

    def logprobs(self, inputs: ModelInputs, temperature: float) -> TokenLogprobs:
        """The policy's forward (collective); see `Policy.forward`."""
        ...

    def generation_model(self) -> nn.Module:
        """A model with whole, current weights for embedded generation (collective)."""
        ...

    def reference(self, offload: bool = False) -> ReferencePolicy:
        """The frozen policy of the run's start; with adapters the model without them (collective).

        `offload`: where training is on a GPU, its weights are in host memory but while they are used.
        """
        ...


class CriticBackend(Training, Protocol):
    """The critic of PPO."""

    def values(self, inputs: ModelInputs) -> Tensor:
        """The critic's forward (collective); see `Critic.forward`."""
        ...


class ReferencePolicy(Protocol):
    """A policy that gets no gradient."""

    weights: Movable

    def logprobs(self, inputs: ModelInputs, temperature: float) -> TokenLogprobs: ...

    def mix_in_policy(self, alpha: float) -> None:
        """Its weights become `alpha` of the policy's current ones and `1 - alpha` of its own (collective)."""
        ...

    def weight_buckets(self) -> Iterator[WeightBucket]:
        """Its own whole weights (collective, as `training_state`); none where it is the model as loaded."""
        ...

    def load_weights(self, read: ReadTensor) -> None:
        """Takes weights that `weight_buckets` gave (collective: every rank reads)."""
        ...


class AdaptersOff:
    """The reference of a policy with adapters: the same model with them switched off, so no second copy."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.weights = Movable(tuple)  # they are the policy's

    @torch.no_grad()
    def logprobs(self, inputs: ModelInputs, temperature: float) -> TokenLogprobs:
        with adapters_off(self.backend.model):
            return self.backend.logprobs(inputs, temperature)

    def mix_in_policy(self, alpha: float) -> None:
        raise NotImplementedError("--sync_ref_model needs a reference with weights of its own")

    def weight_buckets(self) -> Iterator[WeightBucket]:
        return iter(())

    def load_weights(self, read: ReadTensor) -> None:
        """Nothing to do: it is the model as loaded."""


@torch.no_grad()
def mix_weights(target: Tensor, source: Tensor, alpha: float) -> None:
    """`target = alpha * source + (1 - alpha) * target` in place; added in float32."""
    target.copy_(torch.lerp(target.float(), source.float(), alpha))


def bucketed(weights: Sequence[Weight], limit: int = BUCKET_BYTES) -> Iterator[list[Weight]]:
    """Consecutive weights whose whole sizes add up to at most `limit` bytes (a larger one goes alone)."""
    bucket: list[Weight] = []
    filled = 0
    for weight in weights:
        if bucket and filled + weight.nbytes > limit:
            yield bucket
            bucket, filled = [], 0
        bucket.append(weight)
        filled += weight.nbytes
    if bucket:
        yield bucket
