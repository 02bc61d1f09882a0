"""DeepSpeed ZeRO 0 to 3: the same policy with its state spread over the ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from swift_r1.errors import UsageError
from swift_r1.training.backends.base import AdaptersOff, ReferencePolicy, WeightBucket, bucketed, mix_weights
from swift_r1.training.backends.optimizer_state import (
    MASTER,
    MOMENTS,
    UPDATES,
    ReadTensor,
    StateBucket,
    parameter_buckets,
    start_adamw,
    state_name,
    updates_of,
)
from swift_r1.training.distributed import Ranks
from swift_r1.training.logprobs import TokenLogprobs
from swift_r1.training.lora import Weight, has_adapters, parameters_of, policy_weights
from swift_r1.training.optimizer import OptimizerConfig, build_adamw, parameter_groups
from swift_r1.training.policy import ModelInputs, Policy

logger = logging.getLogger(__name__)

_OURS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")


def read_config(name_path_or_json: str) -> dict[str, Any]:
    """`--deepspeed`: one of our names (`zero3`), a JSON file, or JSON itself.

    Keys that the flags decide (batch sizes, clipping, dtype, optimizer, scheduler) must be absent or "auto".

    Raises:
        UsageError: if it is none of the three, or contradicts the flags.
    """
    text = name_path_or_json.strip()
    packaged = resources.files(__package__).joinpath("deepspeed_configs", f"{text}.json")
    try:
        if text.startswith("{"):
            config = json.loads(text)
        elif packaged.is_file():
            config = json.loads(packaged.read_text())
        else:
            config = json.loads(Path(text).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UsageError(f"--deepspeed {text}: not a preset, a readable JSON file or JSON ({error})") from error
    config = _without_auto(config)
    decided = [key for key in (*_OURS, "bf16", "fp16", "optimizer", "scheduler") if key in config]
    if decided:
        raise UsageError(f"--deepspeed sets {', '.join(decided)}: the flags decide these; leave them out or 'auto'")
    return config


def _without_auto(value: Any) -> Any:
    """Drops every "auto" (and what is empty without it), as ms-swift's own files have them."""
    if not isinstance(value, dict):
        return value
    cleaned = {key: _without_auto(item) for key, item in value.items() if item != "auto"}
    return {key: item for key, item in cleaned.items() if item != {} or value[key] == {}}


class DeepSpeedBackend:
    """Trains under ZeRO.

    Args:
        load: makes the plain model; called once for the policy and once more for the reference.
        dtype: of the weights; 16-bit ones keep float32 masters, partitioned by ZeRO.
        config: of DeepSpeed, from `read_config`.
    """

    def __init__(
        self,
        load: Callable[[], nn.Module],
        dtype: torch.dtype,
        optimizer: OptimizerConfig,
        config: dict[str, Any],
        ranks: Ranks,
    ) -> None:
        self.ranks, self._load = ranks, load
        self.stage = int(config.get("zero_optimization", {}).get("stage", 0))
        if self.stage == 0:
            logger.warning(
                "ZeRO-0 keeps no float32 master weights in bf16 and reports no gradient norm: "
                "running ZeRO-1, which gives the same numbers with less memory"
            )
            self.stage = 1
            config = config | {"zero_optimization": config.get("zero_optimization", {}) | {"stage": 1}}
        self.resolved = config | {
            "train_micro_batch_size_per_gpu": 1,
            # The loop marks the boundary itself and scales the loss; DeepSpeed must do neither.
            "gradient_accumulation_steps": 1,
            "gradient_clipping": optimizer.max_grad_norm,
        }
        if dtype == torch.bfloat16:
            self.resolved |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        elif dtype != torch.float32:
            raise UsageError(f"DeepSpeed training in {dtype} is not supported yet: use bfloat16 or float32")
        # DeepSpeed would compile an all-reduce through shared memory at its first start: a C++ compiler and up to
        # two minutes for something that only its inference uses.
        deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False
        with self._partitioned_loading():
            policy = Policy(load())
        policy.train()
        groups = parameter_groups(policy.model.parameters(), optimizer.weight_decay)
        self.engine, self.optimizer, *_ = deepspeed.initialize(
            model=policy, optimizer=build_adamw(groups, optimizer), config=self.resolved
        )
        self.policy = policy
        self.model = policy.model
        self._copy_for_generation: nn.Module | None = None

    def logprobs(self, inputs: ModelInputs, temperature: float) -> TokenLogprobs:
        return self.engine(*inputs, temperature)

    def backward(self, loss: Tensor, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over ranks; our shares are to be added.
        self.engine.backward(loss * self.ranks.world_size)

    def step(self, learning_rate: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        # DeepSpeed itself leaves the update out, on every rank, where the norm is not finite.
        self.engine.step()
        return float(self.engine.get_global_grad_norm())

    def weight_buckets(self, weights: Sequence[Weight]) -> Iterator[WeightBucket]:
        for bucket in bucketed(weights):
            with deepspeed.zero.GatheredParameters(parameters_of(bucket), enabled=self.stage == 3):
                whole = []
                if self.ranks.is_main:
                    whole = [(weight.name, weight.value().to("cpu", copy=self.stage == 3)) for weight in bucket]
            yield whole

    def generation_model(self) -> nn.Module:
        """Under ZeRO-3 a whole copy of the weights on each rank, refreshed here; else the trained model."""
        if self.stage < 3:
            return self.model
        if self._copy_for_generation is None:
            self._copy_for_generation = _plain_like(self.model)
        targets = dict(self._copy_for_generation.named_parameters())
        for bucket in bucketed(policy_weights(self.model)):
            with deepspeed.zero.GatheredParameters(parameters_of(bucket)), torch.no_grad():
                for weight in bucket:
                    targets[weight.name].copy_(weight.value())
        return self._copy_for_generation

    def training_state(self) -> Iterator[StateBucket]:
        updates = updates_of(self.optimizer.optimizer)
        yield [(UPDATES, updates)] if self.ranks.is_main else []
        started = bool(updates)
        if started and self.stage < 3:
            self._link_moments()
        for bucket in parameter_buckets(self.model):
            tensors = []
            for name, parameter in bucket:
                master = safe_get_full_fp32_param(parameter)
                whole = {MASTER: master}
                for kind in MOMENTS:
                    # No moments yet where every step so far was skipped.
                    whole[kind] = (
                        safe_get_full_optimizer_state(parameter, kind) if started else torch.zeros_like(master)
                    )
                if self.ranks.is_main:
                    tensors += [(state_name(kind, name), value.to("cpu", copy=True)) for kind, value in whole.items()]
            yield tensors

    @torch.no_grad()
    def load_training_state(self, read: ReadTensor) -> None:
        zero = self.optimizer
        flat = zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        start_adamw(zero.optimizer, flat, read(UPDATES))
        if self.stage < 3:
            self._link_moments()
        for bucket in parameter_buckets(self.model):
            masters = []
            for name, parameter in bucket:
                masters.append(read(state_name(MASTER, name)))
                self._set_own_part(parameter, masters[-1], None)
                for kind in MOMENTS:
                    self._set_own_part(parameter, read(state_name(kind, name)), kind)
            parameters = [parameter for _, parameter in bucket]
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

    def reference(self) -> ReferencePolicy:
        if has_adapters(self.model):
            return AdaptersOff(self)
        with self._partitioned_loading():
            policy = Policy(self._load())
        return DeepSpeedReference(policy, self.policy, self.resolved, self.stage)

    @contextmanager
    def _partitioned_loading(self) -> Iterator[None]:
        """Under ZeRO-3, transformers gives each rank its part of the weights while this is open."""
        if self.stage < 3:
            yield
            return
        config = HfDeepSpeedConfig(self.resolved)
        try:
            yield
        finally:
            del config
            unset_hf_deepspeed_config()

    def describe(self) -> dict[str, Any]:
        return {"backend": f"DeepSpeed ZeRO-{self.stage}", "deepspeed": self.resolved}


class DeepSpeedReference:
    """The model as loaded, frozen; partitioned like the policy under ZeRO-3, whole on every rank otherwise."""

    def __init__(self, policy: Policy, trained: Policy, resolved: dict[str, Any], stage: int) -> None:
        self._frozen, self._trained, self._stage = policy, trained, stage
        policy.eval()
        for parameter in policy.parameters():
            parameter.requires_grad_(False)
        if stage == 3:
            self.forward, *_ = deepspeed.initialize(model=policy, config=resolved)
            self.forward.eval()
        else:
            self.forward = policy

    def mix_in_policy(self, alpha: float) -> None:
        """Under ZeRO-3 the two are gathered bucket by bucket; what rank 0 computes is partitioned again."""
        gathered, partitioned = deepspeed.zero.GatheredParameters, self._stage == 3
        targets = dict(self._frozen.model.named_parameters())
        for bucket in bucketed(policy_weights(self._trained.model)):
            own = [targets[weight.name] for weight in bucket]
            with (
                gathered(parameters_of(bucket), enabled=partitioned),
                gathered(own, modifier_rank=0, enabled=partitioned),
            ):
                for target, weight in zip(own, bucket, strict=True):
                    mix_weights(target, weight.value(), alpha)

    def weight_buckets(self) -> Iterator[WeightBucket]:
        for bucket in bucketed(policy_weights(self._frozen.model)):
            with deepspeed.zero.GatheredParameters(parameters_of(bucket), enabled=self._stage == 3):
                whole = [(weight.name, weight.value().to("cpu", copy=True)) for weight in bucket]
            yield whole

    @torch.no_grad()
    def load_weights(self, read: ReadTensor) -> None:
        for bucket in bucketed(policy_weights(self._frozen.model)):
            own = parameters_of(bucket)
            with deepspeed.zero.GatheredParameters(own, modifier_rank=0, enabled=self._stage == 3):
                for weight in bucket:
                    weight.base.copy_(read(weight.name))

    @torch.no_grad()
    def logprobs(self, inputs: ModelInputs, temperature: float) -> TokenLogprobs:
        return self.forward(*inputs, temperature)


def _plain_like(model: nn.Module) -> nn.Module:
    """A model of the same class, config and dtype whose parameters are ordinary and whole."""
    plain = type(model)._from_config(model.config, dtype=model.dtype)
    return plain.requires_grad_(False).eval()
