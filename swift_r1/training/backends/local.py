"""Plain torch in one process: the reference for what every other backend must compute."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from swift_r1.models.critic import Critic
from swift_r1.models.logprobs import TokenLogprobs
from swift_r1.models.lora import Weight, has_adapters, policy_weights
from swift_r1.models.policy import ModelInputs, Policy
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.base import AdaptersOff, ReferencePolicy, WeightBucket, bucketed, mix_weights
from swift_r1.training.backends.offload import Home, Movable, states_of, weights_of
from swift_r1.training.backends.optimizer_state import (
    LOSS_SCALE,
    MASTER,
    UPDATES,
    ReadTensor,
    StateBucket,
    codes_of,
    load_codes,
    moments_of,
    start_state,
    state_buckets,
    state_name,
    trained_parameters,
    updates_of,
)
from swift_r1.training.loss_scale import LossScale
from swift_r1.training.optimizer import OptimizerConfig, build_optimizer, parameter_groups


class LocalTraining:
    """Trains `model` in place, through `module`, which computes with it.

    Weights of 16 bits keep a float32 master copy that the optimizer works on: at a learning rate of 1e-6 an
    update is smaller than bf16 can add. Gradients are added up in float32 as soon as each is complete. In float16 the
    loss is scaled.
    """

    def __init__(self, model: nn.Module, module: nn.Module, config: OptimizerConfig) -> None:
        self.model, self.config = model, config
        self.module = module.train()
        self._scale = LossScale() if model.dtype == torch.float16 else None
        self._ranks = Ranks(0, 1, torch.device("cpu"), None)
        self._trained = [parameter for _, parameter in trained_parameters(model)]
        self._masters = self._trained
        if any(parameter.dtype != torch.float32 for parameter in self._trained):
            self._masters = [nn.Parameter(parameter.detach().float().clone()) for parameter in self._trained]
            for parameter, master in zip(self._trained, self._masters, strict=True):
                parameter.register_post_accumulate_grad_hook(_move_gradient_to(master))
        for master in self._masters:
            # For good: made and freed between activations, they leave holes that the allocator cannot fill.
            master.grad = torch.zeros_like(master)
        self.optimizer = build_optimizer(parameter_groups(self._masters, config.weight_decay), config)
        self.weights, self.states = Movable(lambda: weights_of(self.module)), Movable(self._states)

    def _states(self) -> Iterator[Tensor]:
        yield from () if self._masters is self._trained else self._masters
        yield from (master.grad for master in self._masters if master.grad is not None)
        yield from states_of(self.optimizer)

    @property
    def loss_scale(self) -> float | None:
        return self._scale and self._scale.scale

    def backward(self, loss: Tensor, last: bool) -> None:
        (loss if self._scale is None else loss * self._scale.scale).backward()

    def step(self, learning_rate: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if self._scale is not None:
            for master in self._masters:
                assert master.grad is not None
                master.grad /= self._scale.scale
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters, self.config.max_grad_norm))
        if math.isfinite(norm):
            self.optimizer.step()
            self._round_masters()
        if self._scale is not None:
            self._scale.update(overflow=not math.isfinite(norm))
        self.optimizer.zero_grad(set_to_none=False)
        return norm

    @torch.no_grad()
    def _round_masters(self) -> None:
        """The weights become their masters, rounded to the weights' own dtype."""
        if self._masters is not self._trained:
            for parameter, master in zip(self._trained, self._masters, strict=True):
                parameter.copy_(master)

    def weight_buckets(self, weights: Sequence[Weight], to: int = 0, on_host: bool = True) -> Iterator[WeightBucket]:
        self.weights.come_back()
        for bucket in bucketed(weights):
            values = [(weight.name, weight.value()) for weight in bucket]
            yield [(name, value.cpu()) for name, value in values] if on_host else values

    def training_state(self) -> Iterator[StateBucket]:
        self.weights.come_back()
        self.states.come_back()
        yield [(UPDATES, updates_of(self.optimizer))]
        if self._scale is not None:
            yield [(LOSS_SCALE, self._scale.to_tensor())]
        masters = dict(zip(self._trained, self._masters, strict=True))
        for bucket in state_buckets(self.model, moments_of(self.optimizer)):
            tensors = []
            for kind, name, parameter in bucket:
                master = masters[parameter]
                # Without moments where every step so far was skipped.
                moments = self.optimizer.state.get(master) or {kind: torch.zeros_like(master)}
                value = master if kind == MASTER else moments[kind]
                tensors.append((state_name(kind, name), value.detach().cpu()))
            yield tensors
        yield from codes_of(self.optimizer, self._masters, self._ranks)

    @torch.no_grad()
    def load_training_state(self, read: ReadTensor) -> None:
        start_state(self.optimizer, self._masters, read(UPDATES))
        if self._scale is not None:
            self._scale = LossScale.of_tensor(read(LOSS_SCALE))
        for (name, _), master in zip(trained_parameters(self.model), self._masters, strict=True):
            master.copy_(read(state_name(MASTER, name)))
            for kind in moments_of(self.optimizer):
                self.optimizer.state[master][kind].copy_(read(state_name(kind, name)))
        load_codes(self.optimizer, self._masters, 0, read)
        self._round_masters()

    def describe(self) -> dict[str, Any]:
        masters = self._masters is not self._trained
        return {"backend": "plain torch", "float32_master_weights": masters, "optimizer": self.config.optim}


class LocalBackend(LocalTraining):
    """The policy."""

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        super().__init__(model, Policy(model), config)

    def logprobs(self, inputs: ModelInputs, temperature: float) -> TokenLogprobs:
        return self.module(*inputs, temperature)

    def generation_model(self) -> nn.Module:
        return self.model

    def reference(self, offload: bool = False) -> ReferencePolicy:
        return AdaptersOff(self) if has_adapters(self.model) else LocalReference(self.model, offload)


class LocalCritic(LocalTraining):
    """The critic, from `load_critic`."""

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        super().__init__(model, Critic(model), config)

    def values(self, inputs: ModelInputs) -> Tensor:
        return self.module(*inputs)


class LocalReference:
    """A frozen copy of the policy as it is when this is made; with `offload` on the host between its uses."""

    def __init__(self, model: nn.Module, offload: bool = False) -> None:
        # Hooks of the original belong to its optimizer.
        frozen = copy.deepcopy(model)
        for parameter in frozen.parameters():
            parameter.requires_grad_(False)
        self._home = Home(Policy(frozen).eval(), offload)
        self.policy = self._home.module
        self.weights = Movable(lambda: weights_of(self.policy))
        self._trained = model

    def mix_in_policy(self, alpha: float) -> None:
        for target, source in zip(self.policy.model.parameters(), self._trained.parameters(), strict=True):
            mix_weights(target, source.to(target.device), alpha)

    def weight_buckets(self) -> Iterator[WeightBucket]:
        self.weights.come_back()
        for bucket in bucketed(policy_weights(self.policy.model)):
            yield [(weight.name, weight.value().to("cpu", copy=True)) for weight in bucket]

    @torch.no_grad()
    def load_weights(self, read: ReadTensor) -> None:
        for weight in policy_weights(self.policy.model):
            weight.base.copy_(read(weight.name))

    @torch.no_grad()
    def logprobs(self, inputs: ModelInputs, temperature: float) -> TokenLogprobs:
        with self._home.at_work(inputs.token_ids.device):
            return self.policy(*inputs, temperature)


def _move_gradient_to(master: nn.Parameter) -> Any:
    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None and master.grad is not None
        master.grad += parameter.grad
        parameter.grad = None

    return move
