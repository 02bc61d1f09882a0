"""DeepSpeed ZeRO 0 to 3: policy and critic, with weights, gradients and optimizer state spread over the ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from accelerate import init_empty_weights
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
from deepspeed.runtime.config import DeepSpeedConfigError
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import groups
from pydantic import ValidationError
from torch import Tensor, nn
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from swift_r1.errors import UsageError, one_line
from swift_r1.models.policy import Critic, Policy
from swift_r1.models.weights import has_adapters, whole_shape
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
from swift_r1.training.backends.deepspeed_config import resolved
from swift_r1.training.backends.optimizer_state import MASTER
from swift_r1.training.optimizer import (
    OptimizerConfig,
    build_optimizer,
    parameter_groups,
    set_learning_rate,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


class DeepSpeedBackend(Backend):
    """Trains a model that `load` makes (`quantized`: with 4-bit weights) under ZeRO; 16-bit weights keep float32
    masters. Raises UsageError: DeepSpeed does not take the config (of `read_config`)."""

    def __init__(
        self,
        load: Callable[[], PreTrainedModel],
        dtype: torch.dtype,
        optimizer: OptimizerConfig,
        config: dict[str, Any],
        ranks: Ranks,
        quantized: bool = False,
        wrap: type[Policy] | type[Critic] = Policy,
    ) -> None:
        self.ranks = ranks
        self.device = ranks.device
        self._load = load
        self._quantized = quantized
        self._wrap = wrap
        self.stage = int(config.get("zero_optimization", {}).get("stage", 0))
        if self.stage == 0:
            logger.warning(
                "ZeRO-0 keeps no float32 master weights in bf16 and reports no gradient norm: "
                "running ZeRO-1, which gives the same numbers with less memory"
            )
            self.stage = 1
            config = config | {
                "zero_optimization": config.get("zero_optimization", {}) | {"stage": 1}
            }
        self.partitioned = self.stage == 3
        self.resolved = resolved(config, str(dtype).removeprefix("torch."), optimizer.max_grad_norm)
        # DeepSpeed would compile an all-reduce through shared memory at its first start: a C++ compiler and up to
        # two minutes for something that only its inference uses.
        deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False
        try:
            deepspeed.DeepSpeedConfig(self.resolved)
        except (ValidationError, DeepSpeedConfigError, AssertionError) as error:
            raise UsageError(
                f"DeepSpeed does not take this --deepspeed: {one_line(error)}"
            ) from error
        if dtype == torch.float16 and not get_accelerator().is_fp16_supported():
            raise UsageError(
                f"DeepSpeed does not compute in float16 on this {get_accelerator().device_name()}: "
                "--torch_dtype bfloat16, or plain torch without --deepspeed"
            )
        module = self.load_module()
        ranks.barrier()
        self.module = module.train()
        self.model = module.model
        trained = parameter_groups(self.model.named_parameters(), optimizer)
        self.engine, self.optimizer, *_ = deepspeed.initialize(
            model=self.module, optimizer=build_optimizer(trained, optimizer), config=self.resolved
        )
        self.forward = self.engine
        self.torch_optimizer = self.optimizer.optimizer
        # ZeRO-3 has a name of its own for them, and so has ZeRO-1 in bf16.
        names = (
            "fp32_partitioned_groups_flat",
            "fp32_groups_flat_partition",
            "single_partition_of_fp32_groups",
        )
        self.masters = next(
            getattr(self.optimizer, name) for name in names if hasattr(self.optimizer, name)
        )
        if dtype == torch.float16:
            # At the least scale the loop decides what becomes of the run (--max_skipped_steps).
            self.optimizer.loss_scaler.raise_error_at_min_scale = False
        self._float16 = dtype == torch.float16
        self.weights = Movable(lambda: weights_of(self.module))
        self.states = Movable(self._states)

    def _states(self) -> Iterator[Tensor]:
        yield from self.masters
        yield from states_of(self.torch_optimizer)
        if self.partitioned:
            yield self.optimizer.grad_partitions_flat_buffer
        yield from getattr(self.optimizer, "fp32_groups_gradients_flat", ())

    def gathered(
        self, parameters: Sequence[nn.Parameter], write: bool = False
    ) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
            parameters, modifier_rank=0 if write else None, enabled=self.partitioned
        )
        return context

    @property
    def loss_scale(self) -> float | None:
        return float(self.optimizer.loss_scaler.loss_scale) if self._float16 else None

    def backward(self, loss: Tensor, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over ranks; our shares are to be added.
        self.engine.backward(loss * self.ranks.world_size)

    def step(self, learning_rate: float) -> float:
        set_learning_rate(self.optimizer, learning_rate)
        # DeepSpeed itself leaves the update out, on every rank, where the norm is not finite.
        self.engine.step()
        if self._float16 and self.optimizer.overflow:
            return math.inf  # DeepSpeed still has the norm of the step before
        return float(self.engine.get_global_grad_norm())

    def _state_value(self, kind: str, parameter: nn.Parameter) -> Tensor:
        value: Tensor = (
            deepspeed.utils.safe_get_full_fp32_param(parameter)
            if kind == MASTER
            else deepspeed.utils.safe_get_full_optimizer_state(parameter, kind)
        )
        return value

    def _scale_fields(self) -> Sequence[float]:
        scaler = self.optimizer.loss_scaler
        return [
            scaler.cur_scale,
            *(getattr(scaler, name, 0) for name in ("cur_iter", "last_overflow_iter")),
        ]

    def _set_scale(self, scale: float, steps: int, last_overflow: int) -> None:
        scaler = self.optimizer.loss_scaler
        scaler.cur_scale = scale
        scaler.cur_iter = steps
        scaler.last_overflow_iter = last_overflow

    def _find_moments(self) -> None:
        """Tells each parameter where its part of the flat moments is.

        DeepSpeed does so itself at its first step, but as soon as the first parameter group has moments: those of the
        others it then never finds.
        """
        if not self.partitioned:
            self.optimizer._hp_optimizer_states_linked = False
            self.optimizer._lazy_init_hp_params_optimizer_state()

    def _set_state(self, kind: str, parameter: nn.Parameter, value: Tensor) -> None:
        if not self.partitioned:
            if kind == MASTER:
                deepspeed.utils.safe_set_full_fp32_param(parameter, value)
            else:
                deepspeed.utils.safe_set_full_optimizer_state(parameter, value, kind)
            return
        # DeepSpeed's own way of setting a whole ZeRO-3 tensor cannot do sizes that the ranks do not divide.
        start, size = self._own_numbers(parameter)
        part = value.new_zeros(size)
        own = value.flatten()[start % _width(parameter) :][:size]
        part[: own.numel()] = own
        if kind == MASTER:
            deepspeed.utils.safe_set_local_fp32_param(parameter, part)
        else:
            deepspeed.utils.safe_set_local_optimizer_state(parameter, part, kind)

    def _own_numbers(self, parameter: Any) -> tuple[int, int]:
        """Returns where this rank's part of a parameter begins in the flat, padded whole under ZeRO-3, and its size."""
        size: int = parameter.ds_tensor.numel()
        return size * self.ranks.rank, size

    def _own_rows(self, parameter: nn.Parameter) -> slice:
        if not self.partitioned or not whole_shape(parameter):
            return slice(None)
        start, size = self._own_numbers(parameter)
        return slice(start // _width(parameter), -(-(start + size) // _width(parameter)))

    def _set_weights(self, parameters: Sequence[Any], masters: Sequence[Tensor]) -> None:
        if not self.partitioned:
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
            return
        for parameter in parameters:
            parameter.ds_tensor.copy_(deepspeed.utils.safe_get_local_fp32_param(parameter))
            # a small one, which every rank keeps whole
            if parameter.ds_status == ZeroParamStatus.AVAILABLE:
                parameter.partition()
                parameter.all_gather()

    def load_module(self, load: Callable[[], PreTrainedModel] | None = None) -> Any:
        """The policy's, or that of `load`. Under ZeRO-3 transformers gives each rank its part of the weights, unless
        these are 4-bit, which DeepSpeed partitions afterwards."""
        self.ranks.barrier()
        # With zero_hpz_partition_size DeepSpeed makes its group for each model, and refuses to for the second one.
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
        if not self.partitioned or (self._quantized and load is None):
            return self._wrap((load or self._load)())
        config = HfDeepSpeedConfig(self.resolved)  # type: ignore[no-untyped-call]  # transformers has no types here
        try:
            module = self._wrap((load or self._load)())
        finally:
            del config
            unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]  # as above
        _compute_buffers(module.model)
        return module

    def describe(self) -> str:
        zero = self.resolved.get("zero_optimization", {})
        settings = (f"{name} {value}" for name, value in zero.items() if name != "stage")
        return f"DeepSpeed ZeRO-{self.stage}, {self.ranks.world_size} ranks: {', '.join(settings)}"

    def reference(
        self, offload: bool = False, load: Callable[[], PreTrainedModel] | None = None
    ) -> ReferencePolicy:
        """Under ZeRO-3 with `offload` DeepSpeed fetches each layer from the host; else all of them come for a forward
        pass."""
        if load is None and has_adapters(self.model):
            return AdaptersOff(self)
        module = self.load_module(load)
        self.ranks.barrier()
        if not self.partitioned:
            module.to(self.device)
        reference = FrozenReference(module, self, offload and not self.partitioned)
        if self.partitioned:
            config = self.resolved
            if offload:
                zero = config["zero_optimization"] | {
                    "offload_param": {"device": "cpu", "pin_memory": True}
                }
                config = config | {"zero_optimization": zero}
            engine, *_ = deepspeed.initialize(model=module, config=config)
            engine.eval()
            reference.forward = engine
        return reference


def _width(parameter: Tensor) -> int:
    """Returns how many numbers a row of the whole parameter has."""
    return whole_shape(parameter)[1:].numel()


def _compute_buffers(model: PreTrainedModel) -> None:
    """Computes what a model computes for itself, such as the frequencies of rotary positions, in its own dtype.

    While DeepSpeed partitions a model it makes every new tensor in the weights' dtype. In 16 bits positions then turn
    by up to half a percent too much or too little, which after some hundred tokens is another position.
    """
    with init_empty_weights(include_buffers=False):
        skeleton = type(model)(model.config)
    computed = {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in skeleton.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name in module._non_persistent_buffers_set
    }
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            right = computed.get(f"{prefix}.{name}" if prefix else name)
            if right is not None:
                module.register_buffer(name, right.to(buffer.device), persistent=False)
