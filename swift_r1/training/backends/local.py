"""Plain torch in one process: what every other backend must reproduce."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from swift_r1.models.policy import Critic, Policy
from swift_r1.models.weights import has_adapters, part_of
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.base import (
    AdaptersOff,
    Backend,
    FrozenReference,
    Movable,
    ReferencePolicy,
    states_of,
    weights_of,
)
from swift_r1.training.backends.optimizer_state import MASTER, trained_parameters
from swift_r1.training.optimizer import (
    LossScale,
    OptimizerConfig,
    build_optimizer,
    parameter_groups,
    set_learning_rate,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LocalBackend(Backend):
    """Trains `model` in place.

    16-bit weights keep a float32 master copy that the optimizer works on: at a learning rate of 1e-6 an update is
    smaller than bf16 can add. Gradients are added up in float32 as soon as each is complete. In float16 the loss is
    scaled.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: OptimizerConfig,
        device: torch.device | None = None,
        wrap: type[Policy] | type[Critic] = Policy,
    ) -> None:
        self.ranks = Ranks(0, 1, torch.device("cpu"), None)
        self._begin(wrap(model).to(device).train(), config)

    def _begin(self, module: Policy | Critic, config: OptimizerConfig) -> None:
        """The optimizer of a module that is where, and how, it trains."""
        self.module = self.forward = module
        model = module.model
        self.model = model
        self.config = config
        self.device = model.device
        self._scale = LossScale() if model.dtype == torch.float16 else None
        trained = [parameter for _, parameter in trained_parameters(model)]
        self._copies = self.partitioned or any(
            parameter.dtype != torch.float32 for parameter in trained
        )
        self._master_of = {
            parameter: nn.Parameter(part_of(parameter).detach().float().clone())
            if self._copies
            else parameter
            for parameter in trained
        }
        self.masters: Sequence[Tensor] = list(self._master_of.values())
        for parameter, master in self._master_of.items():
            if self._copies:
                on_gradient: Callable[..., object] = parameter.register_post_accumulate_grad_hook
                on_gradient(partial(_move_gradient, master))
            # For good: made and freed between activations, they leave holes that the allocator cannot fill.
            master.grad = torch.zeros_like(master)
        groups = parameter_groups(
            ((name, self._master_of[one]) for name, one in trained_parameters(model)), config
        )
        self.torch_optimizer = self.optimizer = build_optimizer(groups, config)
        self._skips_by_itself = bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))
        self.weights = Movable(lambda: weights_of(self.module))
        self.states = Movable(self._states, self._gradients)

    def _states(self) -> Iterator[Tensor]:
        yield from self.masters if self._copies else ()
        yield from states_of(self.optimizer)

    def _gradients(self) -> Iterator[Tensor]:
        """The sums, which are zeros between two steps."""
        yield from (master.grad for master in self.masters if master.grad is not None)

    @property
    def loss_scale(self) -> float | None:
        return None if self._scale is None else self._scale.scale

    def backward(self, loss: Tensor, last: bool) -> None:
        if loss.requires_grad:  # not of text, where the language model is frozen
            torch.autograd.backward(loss if self._scale is None else loss * self._scale.scale)

    def step(self, learning_rate: float) -> float:
        set_learning_rate(self.optimizer, learning_rate)
        for master in self.masters if self._scale is not None else ():
            assert master.grad is not None and self._scale is not None
            master.grad /= self._scale.scale
        total = self._grad_norm()
        torch.nn.utils.clip_grads_with_norm_(self.masters, self.config.max_grad_norm, total)
        if self._skips_by_itself:
            # Without the host's knowing, which would wait for the device; what float16 training in torch does.
            vars(self.optimizer)["found_inf"] = (~total.isfinite()).float()
            self.optimizer.step()
        elif total.isfinite():
            self.optimizer.step()
        if self._copies:
            with torch.no_grad():
                # Rounds to their dtype.
                torch._foreach_copy_(
                    [part_of(parameter) for parameter in self._master_of], list(self.masters)
                )
        norm = float(total)
        if self._scale is not None:
            self._scale.update(overflow=not math.isfinite(norm))
        self.optimizer.zero_grad(set_to_none=False)
        return norm

    def _grad_norm(self) -> Tensor:
        """Returns the norm of all ranks' gradients."""
        return torch.nn.utils.get_total_norm(list(self._gradients()))

    def _state_value(self, kind: str, parameter: nn.Parameter) -> Tensor:
        master = self._master_of[parameter]
        value: Tensor = master if kind == MASTER else self.optimizer.state[master][kind]
        return value

    def _set_state(self, kind: str, parameter: nn.Parameter, value: Tensor) -> None:
        self._state_value(kind, parameter).copy_(value)

    def _set_weights(self, parameters: Sequence[nn.Parameter], masters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            part_of(parameter).copy_(self._master_of[parameter])

    def _scale_fields(self) -> Sequence[float]:
        return () if self._scale is None else astuple(self._scale)

    def _set_scale(self, scale: float, steps: int, last_overflow: int) -> None:
        self._scale = LossScale(scale, steps, last_overflow)

    def describe(self) -> str:
        masters = ", float32 master weights" if self._copies else ""
        return f"{self._kind}, {self.config.optim}{masters}"

    @property
    def _kind(self) -> str:
        """What computes."""
        return "plain torch"

    def reference(
        self, offload: bool = False, load: Callable[[], PreTrainedModel] | None = None
    ) -> ReferencePolicy:
        if load is None and has_adapters(self.model):
            return AdaptersOff(self)
        model = copy.deepcopy(self.model) if load is None else load()
        return FrozenReference(Policy(model).to(self.device), self, offload)


def _move_gradient(master: nn.Parameter, parameter: Tensor) -> None:
    assert parameter.grad is not None and master.grad is not None
    master.grad += part_of(parameter.grad)
    parameter.grad = None
