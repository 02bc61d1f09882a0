"""Low-rank adapters (LoRA, arXiv 2106.09685): what peft adds to the model, and switching it off.

The adapters live inside the plain transformers model, so everything that takes a model takes one with adapters.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from swift_r1.errors import UsageError, one_line
from swift_r1.flags.adapters import WEIGHTS, AdapterArguments, adapter_flags
from swift_r1.models.expected import adapter_name, module_in_checkpoint
from swift_r1.models.weights import ADAPTER, added_weights, output_head
from swift_r1.wire.protocol import AdapterConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"
REFERENCE = "reference"  # peft's name for the frozen adapter of `--ref_adapters`
_KINDS = {"all-embedding": re.compile("Embedding$"), "all-norm": re.compile("Norm$")}
"""ms-swift's words in `--modules_to_save`, and the classes of the modules that they stand for."""


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Fields are the flags `--lora_rank`, `--lora_alpha`, `--target_modules`, `--target_regex`, `--lora_dropout`,
    `--use_rslora`, `--use_dora`, `--init_weights`, `--modules_to_save`, `--adapters` and `--ref_adapters`."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    target_regex: str | None = None
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    init: str = "true"
    modules_to_save: tuple[str, ...] = ()
    adapters: str | None = None
    ref_adapters: str | None = None

    @classmethod
    def of(cls, args: AdapterArguments) -> Self | None:
        """Returns the settings of the flags; None where all weights are trained."""
        return None if args.train_type == "full" else cls._of(args)

    @classmethod
    def _of(cls, args: AdapterArguments) -> Self:
        return cls(
            args.lora_rank,
            args.lora_alpha,
            tuple(args.target_modules),
            args.target_regex,
            args.lora_dropout,
            args.use_rslora,
            args.use_dora,
            args.init_weights,
            tuple(args.modules_to_save),
            next(iter(args.adapters), None),
            next(iter(args.ref_adapters), None),
        )

    @property
    def low_rank_alone(self) -> bool:
        """Whether they are nothing but `B A`, which is what vLLM takes as an adapter."""
        return not self.dora and not self.modules_to_save

    def adapts(self, module: str) -> bool:
        """Whether the linear layer of this name gets an adapter."""
        if self.target_regex is not None:
            return re.fullmatch(self.target_regex, module) is not None
        ends = tuple(f".{target}" for target in self.target_modules)
        return self.target_modules == (ALL_LINEAR,) or f".{module}".endswith(ends)


class _GradientDropout(nn.Dropout):
    """Dropout where a gradient is computed, whatever the mode: completions, old log-probs and the reference are those
    of the whole adapter."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.p, training=torch.is_grad_enabled())


def add_lora(model: PreTrainedModel, settings: LoraSettings) -> None:
    """Freezes `model` and adds trainable adapters to it, in place; they start as the identity, or as `--adapters` are.
    Raises UsageError: the model has none of the modules, or the given adapters are not of it."""
    # Frozen first: peft leaves the parameters of modules without adapters as they are.
    model.requires_grad_(False)
    if settings.ref_adapters is not None:
        flags = adapter_flags("--ref_adapters", settings.ref_adapters)
        _add(model, LoraSettings._of(AdapterArguments(train_type="lora", **flags)), REFERENCE)
        take_adapter(model, REFERENCE, settings.ref_adapters, "--ref_adapters")
    _add(model, settings, ADAPTER)
    if settings.adapters is not None:
        take_adapter(model, ADAPTER, settings.adapters, "--adapters")
    for weight in added_weights(model, REFERENCE):
        weight.base.requires_grad_(False)
    for module in _lora_layers(model) if settings.dropout else ():
        module.lora_dropout[ADAPTER] = _GradientDropout(settings.dropout)


def _add(model: PreTrainedModel, settings: LoraSettings, name: str) -> None:
    from peft import LoraConfig

    flag = "--target_modules" if settings.target_regex is None else "--target_regex"
    modules = list(settings.target_modules) if settings.target_regex is None else [settings.target_regex]
    # Under an adapter that is there already, a layer is its `base_layer`.
    named = ((one, module) for one, module in model.named_modules() if isinstance(module, nn.Linear))
    linear = [one.removesuffix(".base_layer") for one, _ in named if ".lora_" not in one]
    experts = _expert_modules(model)
    if modules == [ALL_LINEAR] and experts:
        head = output_head(model)
        own = (one for one in linear if model.get_submodule(one) is not head and ".indexer." not in one)
        modules = sorted({one.rpartition(".")[2] for one in own} - experts)
    chosen = filter(settings.adapts, linear) if settings.target_regex else modules
    found = sorted(experts & {module.rpartition(".")[2] for module in chosen})
    if found:
        raise UsageError(
            f"{flag} {' '.join(found)}: the experts and routers of {type(model).__name__} get no adapters, "
            "nor do modules of their names; all-linear adapts the others"
        )
    copied = _modules_to_save(model, settings.modules_to_save)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # a float does
        target_modules=modules[0] if settings.target_regex or modules == [ALL_LINEAR] else modules,
        lora_dropout=settings.dropout,
        use_rslora=settings.rslora,
        use_dora=settings.dora,
        init_lora_weights="gaussian" if settings.init == "gaussian" else True,
        modules_to_save=copied or None,
        ensure_weight_tying=bool(copied) and _tied(model),
        task_type="CAUSAL_LM",
    )
    # That there are two, those of `--ref_adapters` too.
    warnings.filterwarnings("ignore", "Already found a `peft_config` attribute", UserWarning)
    try:
        model.add_adapter(config, name)
    except ValueError as error:
        raise UsageError(f"{flag} {' '.join(modules)}: {one_line(error)}") from error
    adapted = {module.get_base_layer() for module in _lora_layers(model)}
    for module, what in ((output_head(model), "output head"), (model.get_input_embeddings(), "embedding")):
        if getattr(module, "base_layer", None) in adapted:
            # Log-probs are computed from the head's weight alone, which may be the embedding's.
            raise UsageError(
                f"{flag} {' '.join(modules)}: the {what} gets no adapter; leave it out, or train it whole: "
                "--modules_to_save"
            )


def _modules_to_save(model: PreTrainedModel, words: tuple[str, ...]) -> list[str]:
    """Names of the modules that `--modules_to_save` trains whole; raises UsageError for a word that names none."""
    names: list[str] = []
    for word in words:
        kind = _KINDS.get(word)
        found = [
            name
            for name, module in model.named_modules()
            if (kind.search(type(module).__name__) if kind else f".{name}".endswith(f".{word}"))
            and any(True for _ in module.parameters())
        ]
        if not found:
            raise UsageError(f"--modules_to_save {word}: {type(model).__name__} has no such module")
        names += found
    return sorted(set(names))


def take_adapter(model: PreTrainedModel, name: str, folder: str | Path, flag: str) -> None:
    """Takes the weights of the adapter `name` from a folder; raises UsageError where these are others."""
    from safetensors.torch import load_file

    saved = load_file(Path(folder).expanduser() / WEIGHTS)
    for weight in added_weights(model, name):
        value = saved.pop(adapter_name(weight.name, name), None)
        if value is None or value.shape != weight.base.shape:
            has = "is not in it" if value is None else f"has there {list(value.shape)}, not {list(weight.base.shape)}"
            raise UsageError(f"{flag} {folder} does not fit --model and the flags: {weight.name} {has}")
        with torch.no_grad():
            weight.base.copy_(value)
    left = [one for one in saved if not (_tied(model) and one.endswith("lm_head.weight"))]
    if left:
        raise UsageError(f"{flag} {folder} does not fit --model and the flags: {left[0]} has no place there")


def _tied(model: PreTrainedModel) -> bool:
    """Whether the output head is the embedding."""
    return output_head(model).weight is model.get_input_embeddings().weight


def _lora_layers(model: nn.Module) -> list[Any]:
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def _expert_modules(model: PreTrainedModel) -> set[str]:
    """What a checkpoint calls the parts of experts that this model has in one tensor per layer, and their router; empty
    where there are none. For adapters of modules of these names peft would rewrite the tensor at each use."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping = get_model_conversion_mapping(model, add_legacy=False)
    sources = [source for one in mapping for source in one.source_patterns if ".experts.*." in source]
    parts = {source.removesuffix(".weight").rpartition(".")[2] for source in sources}
    # Llama 4's router is a linear layer that returns two tensors.
    linear = ((name, type(one)) for name, one in model.named_modules() if isinstance(one, nn.Linear))
    own = {name.rpartition(".")[2] for name, kind in linear if kind.__module__.startswith("transformers.models.")}
    return parts | own | {"gate"} if parts else own


@contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[None]:
    """The model as it was loaded, while this is open; or with the adapters of `--ref_adapters` alone."""
    from peft.utils.other import AuxiliaryTrainingWrapper

    other = [module for module in model.modules() if isinstance(module, AuxiliaryTrainingWrapper)]
    layers = _lora_layers(model)
    # Not by peft's own methods: those change what is trained too, and transformers' forget the modules to save.
    off = [*other, *(layer for layer in layers if REFERENCE not in model.peft_config)]
    try:
        for layer in off:
            layer._disable_adapters = True
        for layer in layers:
            layer._active_adapter = [REFERENCE]
        yield
    finally:
        for layer in off:
            layer._disable_adapters = False
        for layer in layers:
            layer._active_adapter = [ADAPTER]


def adapter_config(model: nn.Module, settings: LoraSettings) -> AdapterConfig:
    """Returns which adapters `model` has, `all-linear` and patterns spelled out."""
    modules = set(settings.target_modules)
    if settings.target_regex is not None or modules == {ALL_LINEAR}:
        adapted = set(_lora_layers(model))
        names = {name for name, module in model.named_modules() if module in adapted}
        if settings.target_regex is not None:
            modules = {module_in_checkpoint(model, name) for name in names}
        else:
            modules = {name.rpartition(".")[2] for name in names}
    return AdapterConfig(
        rank=settings.rank, alpha=settings.alpha, target_modules=tuple(sorted(modules)), rslora=settings.rslora
    )
