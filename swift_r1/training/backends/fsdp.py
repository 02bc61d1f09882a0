"""FSDP2, torch's own sharding: weights, float32 masters, gradients and optimizer state spread over the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from swift_r1.models.policy import Critic, Policy
from swift_r1.models.weights import has_adapters, part_of
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.base import AdaptersOff, FrozenReference, ReferencePolicy
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.optimizer import OptimizerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FsdpBackend(LocalBackend):
    """Trains a model that `load` makes. Each rank has its rows of every weight, and of its float32 master.

    What FSDP2 does: a decoder layer's weights are gathered while it computes, and its gradients, added up over the
    ranks in float32, come back as each rank's rows. All else is plain torch on these rows. Weights of 4 bits are not
    sharded: every rank has all of them.
    """

    partitioned = True

    def __init__(
        self,
        load: Callable[[], PreTrainedModel],
        optimizer: OptimizerConfig,
        ranks: Ranks,
        wrap: type[Policy] | type[Critic] = Policy,
    ) -> None:
        self.ranks = ranks
        self.device = ranks.device
        self._load = load
        self._wrap = wrap
        self._mesh = init_device_mesh(self.device.type, (ranks.world_size,))
        module = self._sharded_module()
        self._begin(module, optimizer)
        self.device = ranks.device
        self.forward = _gathering(module)

    def _sharded_module(
        self,
        load: Callable[[], PreTrainedModel] | None = None,
        trained: bool = True,
        offload: bool = False,
    ) -> Any:
        """The policy's, or that of `load`."""
        self.ranks.barrier()  # one may have worked longer than another
        with _reading_on_rank0():
            module = self._wrap((load or self._load)()).train(trained)
        if not trained:
            module.requires_grad_(False)
        whole = {one for one in module.parameters() if not one.is_floating_point()}
        if whole:
            module.to(self.device)
        self.ranks.barrier()  # as above
        places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        layers = [one for one in module.modules() if isinstance(one, GradientCheckpointingLayer)]
        self._take_from_rank0(module.buffers())
        for one in (*reversed(layers), module):
            self._take_from_rank0(
                own for own in one.parameters() if not isinstance(own, DTensor) and own not in whole
            )
            fully_shard(
                one,
                mesh=self._mesh,
                # What the module itself has is needed again as soon as the backward pass begins.
                reshard_after_forward=one is not module,
                mp_policy=MixedPrecisionPolicy(
                    reduce_dtype=torch.float32, cast_forward_inputs=False
                ),
                offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
                ignored_params=whole,
            )
        for owner in module.modules():
            if isinstance(owner, FSDPModule):
                owner.set_gradient_divide_factor(1.0)  # shares of the loss add up
                owner.set_force_sum_reduction_for_comms(True)
                if hasattr(owner, "set_reduce_scatter_unused_params"):  # since torch 2.13
                    owner.set_reduce_scatter_unused_params(True)
            for name, parameter in owner._parameters.items():
                if isinstance(parameter, DTensor):
                    places.setdefault(parameter, []).append((owner, name))
        for parameter, own in places.items():
            parameter.places = own  # type: ignore[attr-defined]  # for `gathered`
        return module

    def _take_from_rank0(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            tensor.data = tensor.data.to(self.device)
            dist.broadcast(tensor.data, 0)

    @contextmanager
    def gathered(self, parameters: Sequence[nn.Parameter], write: bool = False) -> Iterator[None]:
        sharded = [one for one in parameters if isinstance(one, DTensor)]
        whole = [nn.Parameter(self._whole(one), requires_grad=False) for one in sharded]
        _put(sharded, whole)
        try:
            yield
        finally:
            _put(sharded, sharded)
        for one, value in zip(sharded, whole, strict=True) if write else ():
            part_of(one).copy_(value.detach()[self._own_rows(one)])

    @contextmanager
    def callable_model(self) -> Iterator[None]:
        module: Any = self.module
        module.unshard()
        try:
            yield
        finally:
            module.reshard()

    def _whole(self, parameter: Any, part: Tensor | None = None) -> Tensor:
        """A sharded parameter's whole value; or that of which `part` is this rank's, as it is of the parameter's."""
        if part is None:
            part = part_of(parameter)
        sharded = DTensor.from_local(
            part.detach().to(self.device),
            self._mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return sharded.full_tensor()

    def _own_rows(self, parameter: Tensor) -> slice:
        rows = -(-len(parameter) // self.ranks.world_size)
        return slice(rows * self.ranks.rank, rows * (self.ranks.rank + 1))

    def _grad_norm(self) -> Tensor:
        squared = super()._grad_norm().double().to(self.device) ** 2
        dist.all_reduce(squared)
        return squared.sqrt().float()

    def _state_value(self, kind: str, parameter: nn.Parameter) -> Tensor:
        return self._whole(parameter, super()._state_value(kind, parameter))

    def _set_state(self, kind: str, parameter: nn.Parameter, value: Tensor) -> None:
        super()._state_value(kind, parameter).copy_(value)

    @property
    def _kind(self) -> str:
        return f"FSDP2, {self.ranks.world_size} ranks"

    def reference(
        self, offload: bool = False, load: Callable[[], PreTrainedModel] | None = None
    ) -> ReferencePolicy:
        """With `offload` FSDP2 fetches each layer from the host."""
        if load is None and has_adapters(self.model):
            return AdaptersOff(self)
        module = self._sharded_module(load, trained=False, offload=offload)
        reference = FrozenReference(module, self)
        reference.forward = _gathering(module)
        return reference


def _gathering(module: Any) -> Callable[..., Any]:
    """`module`'s forward. Without a gradient no backward pass frees what it has gathered, which is then freed here."""

    def forward(*inputs: Any) -> Any:
        found = module(*inputs)
        if not torch.is_grad_enabled():
            module.reshard()
        return found

    return forward


def _put(sharded: Sequence[Any], values: Sequence[Tensor]) -> None:
    for one, value in zip(sharded, values, strict=True):
        for owner, name in one.places:
            owner._parameters[name] = value


@contextmanager
def _reading_on_rank0() -> Iterator[None]:
    """Has transformers read a model's weights on a machine's first rank alone, and make empty ones on the others."""
    names = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "true"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
