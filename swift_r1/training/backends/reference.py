"""Reference policies: a frozen copy with weights of its own, or the policy with its adapters switched off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from swift_r1.models.logprobs import TokenLogprobs
from swift_r1.models.lora import adapters_off
from swift_r1.models.policy import ModelInputs, Policy
from swift_r1.models.weights import parameters_of, policy_weights
from swift_r1.training.backends.base import Backend, Movable, WeightBucket, weight_groups, weights_of
from swift_r1.training.backends.optimizer_state import ReadTensor


class FrozenReference:
    """A frozen policy beside the one that `backend` trains; partitioned as that one is.

    Args:
        offload: its weights are on the host between its uses (`--offload_ref_model`).

    Attributes:
        forward: computes with it; `policy` unless a backend wraps that.
    """

    def __init__(self, policy: Policy, backend: Backend, offload: bool = False) -> None:
        policy.eval().requires_grad_(False)
        if offload:
            policy.cpu()
        self.policy, self._backend, self._offload = policy, backend, offload
        self.forward: Callable[..., Any] = policy
        self.weights = Movable(lambda: weights_of(policy))

    @torch.no_grad()
    def logprobs(self, inputs: ModelInputs, temperature: float) -> TokenLogprobs:
        if self._offload:
            self.policy.to(inputs.token_ids.device)
        try:
            found: TokenLogprobs = self.forward(temperature, *inputs)
            return found
        finally:
            if self._offload:
                self.policy.cpu()

    def mix_in_policy(self, alpha: float) -> None:
        gathered = self._backend.gathered
        targets = {weight.name: weight for weight in policy_weights(self.policy.model)}
        for bucket in weight_groups(policy_weights(self._backend.model)):
            own = [targets[weight.name] for weight in bucket]
            with torch.no_grad(), gathered(parameters_of(bucket)), gathered(parameters_of(own), modifier_rank=0):
                for target, weight in zip(own, bucket, strict=True):
                    base, value = target.base, weight.value().to(target.base.device)
                    base.copy_(torch.lerp(base.float(), value.float(), alpha))

    def weight_buckets(self) -> Iterator[WeightBucket]:
        self.weights.come_back()
        return self._backend.weight_buckets(policy_weights(self.policy.model), to=None)

    @torch.no_grad()
    def load_weights(self, read: ReadTensor) -> None:
        for bucket in weight_groups(policy_weights(self.policy.model)):
            values = [read(weight.name) for weight in bucket]
            self._backend.ranks.barrier()  # one may have read longer than another
            with self._backend.gathered(parameters_of(bucket), modifier_rank=0):
                for weight, value in zip(bucket, values, strict=True):
                    weight.base.copy_(value)


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
        """It is the model as loaded."""
