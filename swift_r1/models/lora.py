"""Low-rank adapters (LoRA, arXiv 2106.09685): what peft adds to the model, switched off, and merged.

The adapters live inside the plain transformers model, so everything that takes a model takes one with adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from swift_r1.errors import UsageError
from swift_r1.models.quantization import plain_value, whole_dtype, whole_shape
from swift_r1.weights.expected import adapter_name
from swift_r1.wire.protocol import AdapterConfig

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

ALL_LINEAR = "all-linear"
_ADAPTER = "default"


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Fields are the flags `--lora_rank`, `--lora_alpha` and `--target_modules`."""

    rank: int
    alpha: int
    target_modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of the policy as every user of the model but the optimizer sees it.

    Attributes:
        name: its Hugging Face name, without adapters.
        base: the model's own parameter, or persistent buffer.
        layer: None, or peft's layer with the adapter to be merged: it knows `scaling * B A` in the base's layout.
    """

    name: str
    base: Tensor
    layer: LoraLayer | None = None

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """What must be gathered before `value` under ZeRO-3."""
        if not isinstance(self.base, nn.Parameter):
            return ()
        if self.layer is None:
            return (self.base,)
        return (self.base, self.layer.lora_A[_ADAPTER].weight, self.layer.lora_B[_ADAPTER].weight)

    @property
    def nbytes(self) -> int:
        """Of the whole value."""
        return whole_shape(self.base).numel() * whole_dtype(self.base).itemsize

    @torch.no_grad()
    def value(self) -> Tensor:
        """The weight with its adapter merged in float32, in the dtype that the base is computed in; without an adapter
        the parameter itself. Weights of 4 bits as the numbers that they stand for."""
        base = plain_value(self.base)
        if self.layer is None:
            return base
        return (base.float() + self.layer.get_delta_weight(_ADAPTER).float()).to(base.dtype)


def add_lora(model: nn.Module, settings: LoraSettings) -> None:
    """Freezes `model` and adds trainable adapters to it, in place; they start as the identity.

    Raises:
        UsageError: if the model has none of the target modules.
    """
    from peft import LoraConfig

    modules = list(settings.target_modules)
    experts = _expert_modules(model)
    if modules == [ALL_LINEAR] and experts:
        linear = (name for name, module in model.named_modules() if _is_linear(module, model))
        modules = sorted({name.rpartition(".")[2] for name in linear} - experts)
    elif found := sorted(experts & {module.rpartition(".")[2] for module in modules}):
        raise UsageError(
            f"--target_modules {' '.join(found)}: the experts and routers of {type(model).__name__} get no adapters, "
            "nor do modules of their names; all-linear adapts the others"
        )
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=ALL_LINEAR if modules == [ALL_LINEAR] else modules,
        task_type="CAUSAL_LM",
    )
    # Frozen first: peft leaves the parameters of modules without adapters as they are.
    model.requires_grad_(False)
    try:
        model.add_adapter(config, _ADAPTER)
    except ValueError as error:
        raise UsageError(f"--target_modules {' '.join(modules)}: {str(error).splitlines()[0]}") from error
    if hasattr(model.get_output_embeddings(), "lora_A"):
        # Log-probs are computed from its weight alone.
        raise UsageError(f"--target_modules {' '.join(modules)}: the output head gets no adapter; leave it out")


def _expert_modules(model: nn.Module) -> set[str]:
    """What a checkpoint calls the parts of experts that this model has in one tensor a layer, and their router; empty
    where there are none. For adapters of modules of these names peft would rewrite the tensor at each use."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    sources = [
        source for one in get_model_conversion_mapping(model, add_legacy=False) for source in one.source_patterns
    ]
    parts = {source.removesuffix(".weight").rpartition(".")[2] for source in sources if ".experts.*." in source}
    return parts | {"gate"} if parts else parts


def _is_linear(module: nn.Module, model: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module is not model.get_output_embeddings()


def has_adapters(model: nn.Module) -> bool:
    return bool(getattr(model, "_hf_peft_config_loaded", False))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model as it was loaded, while this is open."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


def policy_weights(model: nn.Module) -> list[Weight]:
    """The model's weights under their Hugging Face names, tied ones once, each with its adapter; then its persistent
    buffers, which belong to a checkpoint as weights do."""
    lasting = model.state_dict(keep_vars=True)
    buffers = [Weight(name, buffer) for name, buffer in model.named_buffers() if name in lasting]
    if not has_adapters(model):
        return [*(Weight(name, parameter) for name, parameter in model.named_parameters()), *buffers]
    from peft.tuners.lora import LoraLayer

    adapted = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    weights = []
    for name, parameter in model.named_parameters():
        owner, _, kind = name.rpartition(".base_layer.")
        if layer := adapted.get(owner):
            weights.append(Weight(f"{owner}.{kind}", parameter, layer if kind == "weight" else None))
        elif ".lora_" not in name:
            weights.append(Weight(name, parameter))
    return weights + buffers


def checkpoint_weights(model: nn.Module) -> list[Weight]:
    """What a checkpoint of `model` holds: its weights, or where it has adapters only those."""
    if not has_adapters(model):
        return policy_weights(model)
    return [Weight(name, parameter) for name, parameter in model.named_parameters() if ".lora_" in name]


def adapter_weights(model: nn.Module) -> list[Weight]:
    """The adapters alone, under the names that they have in peft's files."""
    return [replace(weight, name=adapter_name(weight.name, _ADAPTER)) for weight in checkpoint_weights(model)]


def adapter_config(model: nn.Module, settings: LoraSettings) -> AdapterConfig:
    """Which adapters `model` has, `all-linear` spelled out."""
    from peft.tuners.lora import LoraLayer

    modules = set(settings.target_modules)
    if modules == {ALL_LINEAR}:
        modules = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    return AdapterConfig(rank=settings.rank, alpha=settings.alpha, target_modules=tuple(sorted(modules)))


def trained_share(model: nn.Module) -> str:
    """For the log: how many of the model's parameters are trained."""
    sizes = [(whole_shape(p).numel(), p.requires_grad) for p in model.parameters()]
    trained, whole = sum(n for n, on in sizes if on), sum(n for n, _ in sizes)
    return f"{trained:,} of {whole:,} parameters are trained ({trained / whole:.2%})"


def parameters_of(weights: Sequence[Weight]) -> list[nn.Parameter]:
    return [parameter for weight in weights for parameter in weight.parameters]
