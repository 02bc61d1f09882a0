"""DeepSpeed ZeRO 0 to 3: policy, reference and critic, each with its state spread over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from swift_r1.models.critic import Critic
from swift_r1.models.logprobs import TokenLogprobs
from swift_r1.models.lora import has_adapters, parameters_of, policy_weights
from swift_r1.models.merging import plain_like
from swift_r1.models.policy import ModelInputs, Policy
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.base import AdaptersOff, ReferencePolicy, WeightBucket, bucketed, mix_weights
from swift_r1.training.backends.deepspeed_training import DeepSpeedTraining
from swift_r1.training.backends.offload import Home, Movable, weights_of
from swift_r1.training.backends.optimizer_state import ReadTensor
from swift_r1.training.optimizer import OptimizerConfig


class DeepSpeedBackend(DeepSpeedTraining):
    """The policy. `load` makes its plain model; it is called once more for the reference."""

    def __init__(
        self,
        load: Callable[[], nn.Module],
        dtype: torch.dtype,
        optimizer: OptimizerConfig,
        config: dict[str, Any],
        ranks: Ranks,
        quantized: bool = False,
    ) -> None:
        super().__init__(lambda: Policy(load()), dtype, optimizer, config, ranks, quantized)
        self._copy_for_generation: nn.Module | None = None

    def logprobs(self, inputs: ModelInputs, temperature: float) -> TokenLogprobs:
        return self.engine(*inputs, temperature)

    def generation_model(self) -> nn.Module:
        """Under ZeRO-3 a whole copy of the weights on each rank, refreshed here; else the trained model."""
        if self.stage < 3:
            return self.model
        if self._copy_for_generation is None:
            self._copy_for_generation = plain_like(self.model)
        targets = {weight.name: weight.base for weight in policy_weights(self._copy_for_generation)}
        for bucket in bucketed(policy_weights(self.model)):
            with deepspeed.zero.GatheredParameters(parameters_of(bucket)), torch.no_grad():
                for weight in bucket:
                    targets[weight.name].copy_(weight.value())
        return self._copy_for_generation

    def reference(self, offload: bool = False) -> ReferencePolicy:
        if has_adapters(self.model):
            return AdaptersOff(self)
        return DeepSpeedReference(self.load_module(), self.module, self.resolved, self.stage, self.ranks, offload)


class DeepSpeedCritic(DeepSpeedTraining):
    """The critic. `load` is `load_critic`."""

    def __init__(
        self,
        load: Callable[[], nn.Module],
        dtype: torch.dtype,
        optimizer: OptimizerConfig,
        config: dict[str, Any],
        ranks: Ranks,
    ) -> None:
        super().__init__(lambda: Critic(load()), dtype, optimizer, config, ranks)

    def values(self, inputs: ModelInputs) -> Tensor:
        return self.engine(*inputs)


class DeepSpeedReference:
    """The model as loaded, frozen; partitioned like the policy under ZeRO-3, whole on every rank otherwise.

    With `offload` its weights are on the host: under ZeRO-3 DeepSpeed fetches each layer for its use, else all of them
    come for a forward pass.
    """

    def __init__(
        self,
        policy: nn.Module,
        trained: nn.Module,
        resolved: dict[str, Any],
        stage: int,
        ranks: Ranks,
        offload: bool = False,
    ) -> None:
        self._frozen, self._trained, self._stage, self._ranks = policy, trained, stage, ranks
        ranks.barrier()
        policy.eval()
        for parameter in policy.parameters():
            parameter.requires_grad_(False)
        self._home = Home(policy, offload and stage < 3)
        self.weights = Movable(lambda: weights_of(policy))
        if stage == 3:
            if offload:
                zero = resolved["zero_optimization"] | {"offload_param": {"device": "cpu", "pin_memory": True}}
                resolved = resolved | {"zero_optimization": zero}
            self.forward, *_ = deepspeed.initialize(model=policy, config=resolved)
            self.forward.eval()
        else:
            self.forward = policy

    def mix_in_policy(self, alpha: float) -> None:
        """Under ZeRO-3 the two are gathered bucket by bucket; what rank 0 computes is partitioned again."""
        gathered, partitioned = deepspeed.zero.GatheredParameters, self._stage == 3
        targets = {weight.name: weight for weight in policy_weights(self._frozen.model)}
        for bucket in bucketed(policy_weights(self._trained.model)):
            own = [targets[weight.name] for weight in bucket]
            with (
                gathered(parameters_of(bucket), enabled=partitioned),
                gathered(parameters_of(own), modifier_rank=0, enabled=partitioned),
            ):
                for target, weight in zip(own, bucket, strict=True):
                    mix_weights(target.base, weight.value().to(target.base.device), alpha)

    def weight_buckets(self) -> Iterator[WeightBucket]:
        self.weights.come_back()
        for number, bucket in enumerate(bucketed(policy_weights(self._frozen.model))):
            self._ranks.barrier()
            with deepspeed.zero.GatheredParameters(parameters_of(bucket), enabled=self._stage == 3):
                whole = []
                if self._ranks.takes(number):
                    whole = [(weight.name, weight.value().to("cpu", copy=True)) for weight in bucket]
            yield whole

    @torch.no_grad()
    def load_weights(self, read: ReadTensor) -> None:
        for bucket in bucketed(policy_weights(self._frozen.model)):
            values = [read(weight.name) for weight in bucket]
            self._ranks.barrier()  # one may have read longer than another
            with deepspeed.zero.GatheredParameters(parameters_of(bucket), modifier_rank=0, enabled=self._stage == 3):
                for weight, value in zip(bucket, values, strict=True):
                    weight.base.copy_(value)

    @torch.no_grad()
    def logprobs(self, inputs: ModelInputs, temperature: float) -> TokenLogprobs:
        with self._home.at_work(inputs.token_ids.device):
            return self.forward(*inputs, temperature)
