"""What the loop asks of a backend: hold a model, accumulate gradients, step, and hand out weights; and references."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from swift_r1.models import invariant
from swift_r1.models.block_functions import use_block_functions
from swift_r1.models.logprobs import TokenLogprobs
from swift_r1.models.lora import adapters_off
from swift_r1.models.merging import plain_like
from swift_r1.models.policy import Critic, ModelInputs, Policy
from swift_r1.models.weights import (
    Weight,
    bucketed,
    parameters_of,
    part_of,
    policy_weights,
    whole_shape,
)
from swift_r1.runtime.pace import Pace
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends import optimizer_state as saved
from swift_r1.training.backends.host_block import HostBlock
from swift_r1.training.backends.optimizer_state import (
    LOSS_SCALE,
    MASTER,
    UPDATES,
    ReadTensor,
    StateBucket,
    state_name,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# whole tensors in the policy's dtype under their Hugging Face names
WeightBucket = Sequence[tuple[str, Tensor]]

BUCKET_BYTES = 64 * 2**20
DEVICE_BUCKET_BYTES = 512 * 2**20
"""Bytes of a bucket that stays on the device: each costs an answer of the engine, beside which the copy is nothing."""


class Backend(ABC):
    """One rank's part of a policy or critic, and its optimizer. Methods marked collective are called on every rank."""

    # the transformers model being trained (its parameters may be partitioned)
    model: PreTrainedModel
    module: Policy | Critic
    forward: Callable[..., Any]  # `module`, or the engine around it
    # all that `module` computes with; whoever asks for weights or states below has them back
    weights: Movable
    states: Movable  # all that only an optimizer step needs: float32 masters, gradients, moments
    torch_optimizer: torch.optim.Optimizer
    # what it works on, float32, as many on each rank; this rank's parts where partitioned
    masters: Sequence[Tensor]
    ranks: Ranks
    device: torch.device
    replicated = False  # whether every rank has all masters, rather than its part of them
    # whether a parameter is a part of a weight, until it is gathered (ZeRO-3, FSDP2)
    partitioned = False
    _copy_for_generation: PreTrainedModel | None = None

    @cached_property
    def pace(self) -> Pace:
        return Pace(self.device)

    @property
    def vocab_size(self) -> int:
        size: int = self.model.config.get_text_config().vocab_size
        return size

    def logprobs(self, inputs: ModelInputs, temperature: float) -> TokenLogprobs:
        """The policy's forward (collective); see `Policy.forward`."""
        with self.pace.timed(inputs.token_ids.numel()):
            found: TokenLogprobs = self.forward(temperature, *inputs)
        return found

    def values(self, inputs: ModelInputs) -> Tensor:
        """The critic's forward (collective); see `Critic.forward`."""
        found: Tensor = self.forward(*inputs)
        return found

    @property
    @abstractmethod
    def loss_scale(self) -> float | None:
        """What the coming step's losses are multiplied by in float16; None in other dtypes."""

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Adds the gradient of a share of the optimizer step's loss (collective): the shares of all ranks and
        micro-batches, of which this is the `last` on this rank or not, add up."""

    @abstractmethod
    def step(self, learning_rate: float) -> float:
        """Clips, updates, clears gradients (collective). Returns the global gradient norm before clipping; where it is
        not finite nothing is updated, and in float16 the loss scale is halved."""

    def generation_model(self) -> PreTrainedModel:
        """A model with the policy's whole, current weights for embedded generation (collective): where parameters are
        partitioned a copy on each rank, refreshed here."""
        if not self.partitioned:
            return self.model
        if self._copy_for_generation is None:
            self._copy_for_generation = plain_like(self.model)
            if invariant.is_on():  # norms and MLPs must round as the trainer's do
                use_block_functions(self._copy_for_generation)
        targets = {weight.name: weight.base for weight in policy_weights(self._copy_for_generation)}
        for bucket in weight_groups(policy_weights(self.model)):
            with self.gathered(parameters_of(bucket)), torch.no_grad():
                for weight in bucket:
                    targets[weight.name].copy_(weight.value())
        return self._copy_for_generation

    @abstractmethod
    def reference(
        self, offload: bool = False, load: Callable[[], PreTrainedModel] | None = None
    ) -> ReferencePolicy:
        """The frozen policy of the run's start; with adapters the model without them; or the model that `load` makes
        (collective). With `offload` its weights are in host memory except while they are used."""

    @abstractmethod
    def describe(self) -> str:
        """The resolved settings in words, for the log."""

    def gathered(
        self, parameters: Sequence[nn.Parameter], write: bool = False
    ) -> AbstractContextManager[Any]:
        """Whole parameters in their places, while this is open; with `write` what every rank writes into them, the
        same, is partitioned again (collective)."""
        return nullcontext()

    def callable_model(self) -> AbstractContextManager[Any]:
        """While this is open `model` itself can be called, without a gradient, as `forward` always can (collective)."""
        return nullcontext()

    def weight_buckets(
        self, weights: Sequence[Weight], to: int | None = 0, on_host: bool = True
    ) -> Iterator[WeightBucket]:
        """The whole values of `weights`, bucket by bucket (collective: every rank must exhaust it).

        A bucket is on the CPU (without `on_host` on the device) of the rank `to` (None: ranks take turns), holds its
        values until the next optimizer step, and is empty elsewhere; only one bucket is gathered at a time.
        """
        self.weights.come_back()
        device = torch.device("cpu") if on_host else self.device
        # where torch puts copies that it does not wait for
        pinned = on_host and self.device.type == "cuda"
        for number, bucket in enumerate(
            weight_groups(weights, BUCKET_BYTES if on_host else DEVICE_BUCKET_BYTES)
        ):
            if self.partitioned:
                self.ranks.barrier()  # whoever has a bucket may take long over it
            whole = []
            with self.gathered(parameters_of(bucket)):
                if self.ranks.takes(number) if to is None else self.ranks.rank == to:
                    values = (one.value().to(device, non_blocking=pinned) for one in bucket)
                    whole = [(one.name, value) for one, value in zip(bucket, values, strict=True)]
                    if pinned:
                        torch.cuda.current_stream(self.device).synchronize()
            yield whole

    def training_state(self) -> Iterator[StateBucket]:
        """Float32 weights, the optimizer's memory and the loss scale, bucket by bucket (collective, as
        `weight_buckets`); the ranks take turns in getting a bucket."""
        self.weights.come_back()
        self.states.come_back()
        updates = saved.updates_of(self.torch_optimizer)
        yield [(UPDATES, updates)] if self.ranks.is_rank0 else []
        if self.loss_scale is not None:
            fields = torch.tensor(self._scale_fields(), dtype=torch.float64)
            yield [(LOSS_SCALE, fields)] if self.ranks.is_rank0 else []
        kinds = saved.moments_of(self.torch_optimizer)
        started = bool(updates)  # else every step so far was skipped, and there are no moments
        if started and kinds:
            self._find_moments()
        for number, bucket in enumerate(saved.state_buckets(self.model, (MASTER, *kinds))):
            self.ranks.barrier()  # whoever has a bucket may take long over it
            tensors = []
            for kind, name, parameter in bucket:
                known = started or kind == MASTER
                value = (
                    self._state_value(kind, parameter)
                    if known
                    else torch.zeros(whole_shape(parameter))
                )
                if self.ranks.takes(number):
                    tensors.append((state_name(kind, name), value.detach().cpu()))
            yield tensors
        yield from saved.codes_of(self.torch_optimizer, self.masters, self.ranks, self.replicated)

    @torch.no_grad()
    def load_training_state(self, read: ReadTensor) -> None:
        """Goes on from a saved `training_state` (collective: every rank reads its part). The model's weights follow.
        Raises KeyError: the state lacks a parameter that is trained here."""
        saved.start_state(self.torch_optimizer, self.masters, read(UPDATES))
        saved.load_codes(
            self.torch_optimizer, self.masters, 0 if self.replicated else self.ranks.rank, read
        )
        if self.loss_scale is not None:
            scale, *counts = read(LOSS_SCALE).tolist()
            self._set_scale(scale, *map(int, counts))
        kinds = saved.moments_of(self.torch_optimizer)
        if kinds:
            self._find_moments()
        for bucket in saved.state_buckets(self.model, [MASTER]):
            parameters = [parameter for *_, parameter in bucket]
            masters = []
            for _, name, parameter in bucket:
                rows = self._own_rows(parameter)
                masters.append(read(state_name(MASTER, name), rows))
                self._set_state(MASTER, parameter, masters[-1])
                for kind in kinds:
                    self._set_state(kind, parameter, read(state_name(kind, name), rows))
            self.ranks.barrier()  # one may have read longer than another
            self._set_weights(parameters, masters)

    @abstractmethod
    def _state_value(self, kind: str, parameter: nn.Parameter) -> Tensor:
        """A parameter's whole float32 master, or moment of this kind (collective)."""

    def _own_rows(self, parameter: nn.Parameter) -> slice:
        """The rows of a parameter that this rank has a part of."""
        return slice(None)

    @abstractmethod
    def _set_state(self, kind: str, parameter: nn.Parameter, value: Tensor) -> None:
        """Takes this rank's part of such a tensor, of which `value` are the `_own_rows`."""

    @abstractmethod
    def _set_weights(self, parameters: Sequence[nn.Parameter], masters: Sequence[Tensor]) -> None:
        """Makes the model compute with these float32 masters (their `_own_rows`), which are set already
        (collective)."""

    @abstractmethod
    def _scale_fields(self) -> Sequence[float]:
        """Returns the fields of `LossScale`."""

    @abstractmethod
    def _set_scale(self, scale: float, steps: int, last_overflow: int) -> None: ...

    def _find_moments(self) -> None:  # noqa: B027  most have nothing to find
        """Before moments are asked for or set."""


class Movable:
    """Tensors that can leave their device for host memory and come back (`--offload_model`, `--offload_optimizer`).

    What moves is their storage: all that shares it (tied weights, DeepSpeed's views into its flat buffers) goes along.
    Meanwhile none of it may be read. `zeros` are tensors that are all zeros whenever they leave: nothing is kept of
    them.
    """

    def __init__(
        self, tensors: Callable[[], Iterable[Tensor]], zeros: Callable[[], Iterable[Tensor]] = tuple
    ) -> None:
        # Asked each time: an optimizer has no moments before its first step.
        self._tensors = tensors
        self._zeros = zeros
        self._block: HostBlock | None = None
        # with their bytes; None for zeros
        self._away: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []

    def leave(self, device: torch.device) -> None:
        """Copies to the host what is on a device of this type, and frees it there; what is away stays away. Raises
        RunFailed: the host has no room."""
        if self._away:
            return
        moved = _storages(self._tensors(), device)
        if self._block is None:
            self._block = HostBlock(device)
        parts = self._block.parts([storage.nbytes() for storage in moved])
        for storage, part in zip(moved, parts, strict=True):
            part.copy_(_bytes_of(storage), non_blocking=True)  # before what reuses it
            self._away.append((storage, storage.nbytes(), part))
        self._away += [
            (storage, storage.nbytes(), None) for storage in _storages(self._zeros(), device)
        ]
        for storage, *_ in self._away:
            storage.resize_(0)

    def come_back(self) -> None:
        """Does nothing where all of it is here."""
        for storage, nbytes, on_host in self._away:
            storage.resize_(nbytes)
            here = _bytes_of(storage)
            here.zero_() if on_host is None else here.copy_(on_host, non_blocking=True)
        self._away = []


def _storages(tensors: Iterable[Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """Yields those on a device of this type, each once."""
    found = {
        storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)
    }
    return [one for one in found.values() if one.device.type == device.type and one.nbytes()]


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def weights_of(module: nn.Module) -> Iterator[Tensor]:
    """Its parameters, under ZeRO-3 with this rank's parts of them, under FSDP2 these alone."""
    for parameter in module.parameters():
        yield part_of(parameter)
        part = getattr(parameter, "ds_tensor", None)
        if part is not None:
            yield part


def states_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Returns what an optimizer remembers of its parameters, except single numbers."""
    for state in optimizer.state.values():
        yield from (
            value for value in state.values() if isinstance(value, Tensor) and value.numel() > 1
        )


def weight_groups(weights: Sequence[Weight], at_most: int = BUCKET_BYTES) -> Iterator[list[Weight]]:
    """Yields buckets of `at_most` bytes, or of one larger weight."""
    return bucketed(weights, lambda weight: weight.nbytes, at_most)


class FrozenReference:
    """A frozen policy beside the one that `backend` trains, partitioned as that one is. With `offload` its weights are
    on the host between its uses. `forward` computes with it: `policy`, unless a backend wraps that."""

    def __init__(self, policy: Policy, backend: Backend, offload: bool = False) -> None:
        policy.eval().requires_grad_(False)
        self.policy = policy
        self._backend = backend
        self._host = list[Tensor]()
        if offload:
            self._host = [*policy.cpu().parameters(), *policy.buffers()]
        if self._host and backend.device.type == "cuda":
            parts = HostBlock(backend.device).parts([one.nbytes for one in self._host])
            for one, part in zip(self._host, parts, strict=True):
                one.data = part.view(one.dtype).view(one.shape).copy_(one)
        self.forward: Callable[..., Any] = policy
        self.weights = Movable(lambda: weights_of(policy))

    @torch.no_grad()
    def logprobs(self, inputs: ModelInputs, temperature: float) -> TokenLogprobs:
        values = [one.data for one in self._host]
        for one in self._host:
            one.data = one.data.to(inputs.token_ids.device, non_blocking=True)
        try:
            found: TokenLogprobs = self.forward(temperature, *inputs)
            return found
        finally:
            for one, value in zip(self._host, values, strict=True):
                one.data = value  # where it has been all the time

    def mix_in_policy(self, alpha: float) -> None:
        """Its weights become `alpha` of the policy's and `1 - alpha` of its own, computed in float32 (collective)."""
        gathered = self._backend.gathered
        targets = {weight.name: weight for weight in policy_weights(self.policy.model)}
        for bucket in weight_groups(policy_weights(self._backend.model)):
            own = [targets[weight.name] for weight in bucket]
            with (
                torch.no_grad(),
                gathered(parameters_of(bucket)),
                gathered(parameters_of(own), write=True),
            ):
                for target, weight in zip(own, bucket, strict=True):
                    base = target.base
                    value = weight.value().to(target.base.device)
                    base.copy_(torch.lerp(base.float(), value.float(), alpha))

    def weight_buckets(self) -> Iterator[WeightBucket]:
        """Its own whole weights (collective, as `training_state`); none where it is the model as loaded."""
        self.weights.come_back()
        return self._backend.weight_buckets(policy_weights(self.policy.model), to=None)

    @torch.no_grad()
    def load_weights(self, read: ReadTensor) -> None:
        """Takes weights that `weight_buckets` gave (collective: every rank reads)."""
        for bucket in weight_groups(policy_weights(self.policy.model)):
            values = [read(weight.name) for weight in bucket]
            self._backend.ranks.barrier()  # one may have read longer than another
            with self._backend.gathered(parameters_of(bucket), write=True):
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


ReferencePolicy = FrozenReference | AdaptersOff  # a policy that gets no gradient
