"""Low-rank adapters (LoRA, arXiv 2106.09685): what peft adds to the model, and switching it off.

The adapters live inside the plain transformers model, so everything that takes a model takes one with adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from swift_r1.errors import UsageError, one_line
from swift_r1.models.weights import ADAPTER, output_head
from swift_r1.wire.protocol import AdapterConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Fields are the flags `--lora_rank`, `--lora_alpha` and `--target_modules`."""

    rank: int
    alpha: int
    target_modules: tuple[str, ...]


def add_lora(model: PreTrainedModel, settings: LoraSettings) -> None:
    """Freezes `model` and adds trainable adapters to it, in place; they start as the identity. Raises UsageError: if
    the model has none of the target modules."""
    from peft import LoraConfig

    modules = list(settings.target_modules)
    experts = _expert_modules(model)
    if modules == [ALL_LINEAR] and experts:
        head = output_head(model)
        linear = (name for name, one in model.named_modules() if isinstance(one, nn.Linear) and one is not head)
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
        model.add_adapter(config, ADAPTER)
    except ValueError as error:
        raise UsageError(f"--target_modules {' '.join(modules)}: {one_line(error)}") from error
    if hasattr(output_head(model), "lora_A"):
        # Log-probs are computed from its weight alone.
        raise UsageError(f"--target_modules {' '.join(modules)}: the output head gets no adapter; leave it out")


def _expert_modules(model: PreTrainedModel) -> set[str]:
    """What a checkpoint calls the parts of experts that this model has in one tensor per layer, and their router; empty
    where there are none. For adapters of modules of these names peft would rewrite the tensor at each use."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping = get_model_conversion_mapping(model, add_legacy=False)
    sources = [source for one in mapping for source in one.source_patterns if ".experts.*." in source]
    parts = {source.removesuffix(".weight").rpartition(".")[2] for source in sources}
    return parts | {"gate"} if parts else parts


@contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[None]:
    """The model as it was loaded, while this is open."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


def adapter_config(model: nn.Module, settings: LoraSettings) -> AdapterConfig:
    """Which adapters `model` has, `all-linear` spelled out."""
    from peft.tuners.lora import LoraLayer

    modules = set(settings.target_modules)
    if modules == {ALL_LINEAR}:
        modules = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    return AdapterConfig(rank=settings.rank, alpha=settings.alpha, target_modules=tuple(sorted(modules)))
