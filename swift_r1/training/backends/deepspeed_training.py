"""DeepSpeed ZeRO 0 to 3: a model and its optimizer, with their state spread over the ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import deepspeed
import torch
from accelerate import init_empty_weights
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
from deepspeed.runtime.config import DeepSpeedConfigError
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from pydantic import ValidationError
from torch import Tensor, nn
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from swift_r1.errors import UsageError
from swift_r1.models.lora import Weight, parameters_of
from swift_r1.models.quantization import whole_shape
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.base import WeightBucket, bucketed
from swift_r1.training.backends.deepspeed_config import resolved
from swift_r1.training.backends.offload import Movable, states_of, weights_of
from swift_r1.training.backends.optimizer_state import (
    LOSS_SCALE,
    MASTER,
    UPDATES,
    ReadTensor,
    StateBucket,
    codes_of,
    load_codes,
    moments_of,
    parameter_buckets,
    start_state,
    state_buckets,
    state_name,
    updates_of,
)
from swift_r1.training.optimizer import OptimizerConfig, build_optimizer, parameter_groups

logger = logging.getLogger(__name__)


class DeepSpeedTraining:
    """Trains a model under ZeRO.

    Args:
        load: makes the model inside the module that computes with it, its `model`.
        dtype: of the weights; 16-bit ones keep float32 masters, partitioned by ZeRO.
        config: of DeepSpeed, from `read_config`.
        quantized: `load` makes a model with weights of 4 bits.

    Raises:
        UsageError: DeepSpeed does not take the config.
    """

    def __init__(
        self,
        load: Callable[[], nn.Module],
        dtype: torch.dtype,
        optimizer: OptimizerConfig,
        config: dict[str, Any],
        ranks: Ranks,
        quantized: bool = False,
    ) -> None:
        self.ranks, self._load, self._quantized = ranks, load, quantized
        self.stage = int(config.get("zero_optimization", {}).get("stage", 0))
        if self.stage == 0:
            logger.warning(
                "ZeRO-0 keeps no float32 master weights in bf16 and reports no gradient norm: "
                "running ZeRO-1, which gives the same numbers with less memory"
            )
            self.stage = 1
            config = config | {"zero_optimization": config.get("zero_optimization", {}) | {"stage": 1}}
        self.resolved = resolved(config, str(dtype).removeprefix("torch."), optimizer.max_grad_norm)
        # DeepSpeed would compile an all-reduce through shared memory at its first start: a C++ compiler and up to
        # two minutes for something that only its inference uses.
        deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False
        try:
            deepspeed.DeepSpeedConfig(self.resolved)
        except (ValidationError, DeepSpeedConfigError, AssertionError) as error:
            raise UsageError(f"DeepSpeed does not take this --deepspeed: {_one_line(error)}") from error
        if dtype == torch.float16 and not get_accelerator().is_fp16_supported():
            raise UsageError(
                f"DeepSpeed does not compute in float16 on this {get_accelerator().device_name()}: "
                "--torch_dtype bfloat16, or plain torch without --deepspeed"
            )
        self.module = self.load_module()
        ranks.barrier()
        self.module.train()
        self.model: nn.Module = self.module.model
        groups = parameter_groups(self.model.parameters(), optimizer.weight_decay)
        self.engine, self.optimizer, *_ = deepspeed.initialize(
            model=self.module, optimizer=build_optimizer(groups, optimizer), config=self.resolved
        )
        if dtype == torch.float16:
            # At the least scale the loop decides what becomes of the run (--max_skipped_steps).
            self.optimizer.loss_scaler.raise_error_at_min_scale = False
        self._float16 = dtype == torch.float16
        self.weights, self.states = Movable(lambda: weights_of(self.module)), Movable(self._states)

    def _states(self) -> Iterator[Tensor]:
        yield from self._flat_masters
        yield from states_of(self.optimizer.optimizer)
        if self.stage == 3:
            yield self.optimizer.grad_partitions_flat_buffer
        yield from getattr(self.optimizer, "fp32_groups_gradients_flat", ())

    @property
    def loss_scale(self) -> float | None:
        return float(self.optimizer.loss_scaler.loss_scale) if self._float16 else None

    def backward(self, loss: Tensor, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over ranks; our shares are to be added.
        self.engine.backward(loss * self.ranks.world_size)

    def step(self, learning_rate: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        # DeepSpeed itself leaves the update out, on every rank, where the norm is not finite.
        self.engine.step()
        if self._float16 and self.optimizer.overflow:
            return math.inf  # of such a step DeepSpeed gives the norm of the step before
        return float(self.engine.get_global_grad_norm())

    def weight_buckets(self, weights: Sequence[Weight], to: int = 0, on_host: bool = True) -> Iterator[WeightBucket]:
        self.weights.come_back()
        device = torch.device("cpu") if on_host else self.ranks.device
        gathers = self.stage == 3
        for bucket in bucketed(weights):
            if gathers:
                self.ranks.barrier()  # whoever has a bucket may take long over it
            with deepspeed.zero.GatheredParameters(parameters_of(bucket), enabled=gathers):
                whole = []
                if self.ranks.rank == to:
                    whole = [(weight.name, weight.value().to(device, copy=gathers)) for weight in bucket]
            yield whole

    def training_state(self) -> Iterator[StateBucket]:
        self.weights.come_back()
        self.states.come_back()
        updates = updates_of(self.optimizer.optimizer)
        yield [(UPDATES, updates)] if self.ranks.is_main else []
        if self._float16:
            yield [(LOSS_SCALE, self._loss_scale_fields())] if self.ranks.is_main else []
        kinds = moments_of(self.optimizer.optimizer)
        started = bool(updates)
        if started and kinds and self.stage < 3:
            self._link_moments()
        for number, bucket in enumerate(state_buckets(self.model, kinds)):
            self.ranks.barrier()  # whoever has a bucket may take long over it
            tensors = []
            for kind, name, parameter in bucket:
                if kind == MASTER:
                    value = safe_get_full_fp32_param(parameter)
                elif started:
                    value = safe_get_full_optimizer_state(parameter, kind)
                else:  # no moments yet where every step so far was skipped
                    value = torch.zeros(whole_shape(parameter))
                if self.ranks.takes(number):
                    tensors.append((state_name(kind, name), value.to("cpu", copy=True)))
            yield tensors
        yield from codes_of(self.optimizer.optimizer, self._flat_masters, self.ranks)

    @property
    def _flat_masters(self) -> list[Tensor]:
        """What the optimizer works on: this rank's parts of the parameters, float32, end to end in each group."""
        zero = self.optimizer
        if self.stage == 3:
            return zero.fp32_partitioned_groups_flat
        # ZeRO-1 in bf16 is a class of its own in DeepSpeed, with a name of its own for them.
        names = ("fp32_groups_flat_partition", "single_partition_of_fp32_groups")
        return next(getattr(zero, name) for name in names if hasattr(zero, name))

    def _loss_scale_fields(self) -> Tensor:
        scaler = self.optimizer.loss_scaler
        counts = [getattr(scaler, name, 0) for name in ("cur_iter", "last_overflow_iter")]
        return torch.tensor([scaler.cur_scale, *counts], dtype=torch.float64)

    @torch.no_grad()
    def load_training_state(self, read: ReadTensor) -> None:
        zero = self.optimizer
        start_state(zero.optimizer, self._flat_masters, read(UPDATES))
        load_codes(zero.optimizer, self._flat_masters, self.ranks.rank, read)
        if self._float16:
            scale, steps, last_overflow = read(LOSS_SCALE).tolist()
            zero.loss_scaler.cur_scale = scale
            zero.loss_scaler.cur_iter, zero.loss_scaler.last_overflow_iter = int(steps), int(last_overflow)
        kinds = moments_of(zero.optimizer)
        if kinds and self.stage < 3:
            self._link_moments()
        for bucket in parameter_buckets(self.model):
            masters = []
            for name, parameter in bucket:
                masters.append(read(state_name(MASTER, name)))
                self._set_own_part(parameter, masters[-1], None)
                for kind in kinds:
                    self._set_own_part(parameter, read(state_name(kind, name)), kind)
            parameters = [parameter for _, parameter in bucket]
            self.ranks.barrier()  # one may have read longer than another
            with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0, enabled=self.stage == 3):
                if self.stage < 3 or self.ranks.is_main:
                    for parameter, master in zip(parameters, masters, strict=True):
                        parameter.copy_(master)

    def _link_moments(self) -> None:
        """Tells each parameter where its part of the flat moments is.

        DeepSpeed does so itself at its first step, but as soon as the first parameter group has moments: those of the
        others it then never finds.
        """
        self.optimizer._hp_optimizer_states_linked = False
        self.optimizer._lazy_init_hp_params_optimizer_state()

    def _set_own_part(self, parameter: nn.Parameter, value: Tensor, moment: str | None) -> None:
        """Takes this rank's part of a whole float32 tensor: of the master weight, or of a moment."""
        if self.stage < 3:
            if moment is None:
                safe_set_full_fp32_param(parameter, value)
            else:
                safe_set_full_optimizer_state(parameter, value, moment)
            return
        # DeepSpeed's own way of setting a whole ZeRO-3 tensor cannot do sizes that the ranks do not divide.
        size = safe_get_local_fp32_param(parameter).numel()
        part = value.new_zeros(size)
        own = value.flatten()[size * self.ranks.rank : size * (self.ranks.rank + 1)]
        part[: own.numel()] = own
        if moment is None:
            safe_set_local_fp32_param(parameter, part)
        else:
            safe_set_local_optimizer_state(parameter, part, moment)

    def load_module(self) -> nn.Module:
        """Under ZeRO-3, transformers gives each rank its part of the weights.

        Weights of 4 bits are loaded whole and cut up by DeepSpeed afterwards.
        """
        self.ranks.barrier()
        if self.stage < 3 or self._quantized:
            return self._load()
        config = HfDeepSpeedConfig(self.resolved)
        try:
            module = self._load()
        finally:
            del config
            unset_hf_deepspeed_config()
        _compute_buffers(module.model)
        return module

    def describe(self) -> dict[str, Any]:
        return {"backend": f"DeepSpeed ZeRO-{self.stage}", "deepspeed": self.resolved}


def _compute_buffers(model: nn.Module) -> None:
    """Computes what a model computes for itself, as the frequencies of rotary positions, in its own dtype.

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


def _one_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
    return str(error).splitlines()[0]
