"""Low-rank adapters (LoRA, arXiv 2106.09685): what peft adds to the model, and switching it off.

The adapters live inside the plain transformers model, so everything that takes a model takes one with adapters.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from swift_r1.errors import UsageError, one_line
from swift_r1.flags.adapters import ALL_LINEAR, WEIGHTS, AdapterArguments, adapter_flags
from swift_r1.models.expected import adapter_name, module_in_checkpoint
from swift_r1.models.multimodal import part_of_model
from swift_r1.models.weights import ADAPTER, added_weights, output_head
from swift_r1.wire.protocol import AdapterConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REFERENCE = "reference"  # peft's name for the frozen adapter of `--ref_adapters`
_KINDS = {"all-embedding": re.compile("Embedding$"), "all-norm": re.compile("Norm$")}
"""ms-swift's words in `--modules_to_save`, and the classes of the modules that they stand for."""


class _GradientDropout(nn.Dropout):
    """Dropout where a gradient is computed, whatever the mode: completions, old log-probs and the reference are those
    of the whole adapter."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.p, training=torch.is_grad_enabled())


def add_lora(model: PreTrainedModel, args: AdapterArguments) -> None:
    """Freezes `model` and adds trainable adapters to it, in place; they start as the identity, or as `--adapters` are
    (at most one folder, as of `--ref_adapters`).
    Raises UsageError: the model has none of the modules, or the given adapters are not of it."""
    # Frozen first: peft leaves the parameters of modules without adapters as they are.
    model.requires_grad_(False)
    for folder in args.ref_adapters:
        _add(
            model,
            AdapterArguments(train_type="lora", **adapter_flags("--ref_adapters", folder)),
            REFERENCE,
            f"--ref_adapters {folder}:",
        )
        take_adapter(model, REFERENCE, folder, "--ref_adapters")
    _add(model, args, ADAPTER, *(f"--adapters {folder}:" for folder in args.adapters))
    for folder in args.adapters:
        take_adapter(model, ADAPTER, folder, "--adapters")
    for weight in added_weights(model, REFERENCE):
        weight.base.requires_grad_(False)
    for module in _lora_layers(model) if args.lora_dropout else ():
        module.lora_dropout[ADAPTER] = _GradientDropout(args.lora_dropout)


def _add(
    model: PreTrainedModel, args: AdapterArguments, name: str, flag: str | None = None
) -> None:
    """Adds the adapter `name`, whose weights peft makes. Raises UsageError, naming the `flag` of adapters that are given:
    it cannot be over these modules."""
    from peft import LoraConfig

    flag = flag or ("--target_modules" if args.target_regex is None else "--target_regex")
    modules = list(args.target_modules) if args.target_regex is None else [args.target_regex]
    linear = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".lora_" not in path:
            # Under an adapter that is there already, a layer is its `base_layer`.
            linear.append(path.removesuffix(".base_layer"))

    frozen = [path for path in linear if part_of_model(f"{path}.") in args.frozen_parts]
    experts = _expert_modules(model)
    if modules == [ALL_LINEAR] and experts:
        head = output_head(model)
        own = [
            path
            for path in linear
            if model.get_submodule(path) is not head and ".indexer." not in path
        ]
        modules = sorted(_last_parts(own) - experts)
    chosen = filter(args.adapts, linear) if args.target_regex else modules
    refused = sorted(experts & _last_parts(chosen))
    if refused:
        raise UsageError(
            f"{flag} {' '.join(refused)}: the experts and routers of {type(model).__name__}, which transformers has in "
            "one tensor a layer, get no adapters, nor do modules of their names; all-linear adapts the others"
        )

    copied = _modules_to_save(model, args.modules_to_save)
    config = LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        target_modules=modules[0] if args.target_regex or modules == [ALL_LINEAR] else modules,
        exclude_modules=frozen or None,
        lora_dropout=args.lora_dropout,
        use_rslora=args.use_rslora,
        use_dora=args.use_dora,
        init_lora_weights="gaussian" if args.init_weights == "gaussian" else True,
        modules_to_save=copied or None,
        ensure_weight_tying=bool(copied) and _tied(model),
        task_type="CAUSAL_LM",
    )

    # With `--ref_adapters` the model has two.
    warnings.filterwarnings("ignore", "Already found a `peft_config` attribute", UserWarning)
    try:
        model.add_adapter(config, name)
    except ValueError as error:
        raise UsageError(f"{flag} {' '.join(modules)}: {one_line(error)}") from error

    adapted = {module.get_base_layer() for module in _lora_layers(model)}
    for module, what in (
        (output_head(model), "output head"),
        (model.get_input_embeddings(), "embedding"),
    ):
        if getattr(module, "base_layer", None) in adapted:
            # Log-probs are computed from the head's weight alone, which may be the embedding's.
            raise UsageError(
                f"{flag} {' '.join(modules)}: the {what} gets no adapter; leave it out, or train it whole: "
                "--modules_to_save"
            )


def _modules_to_save(model: PreTrainedModel, words: Iterable[str]) -> list[str]:
    """Returns the names of the modules that `--modules_to_save` trains whole. Raises UsageError: a word names none."""
    names: set[str] = set()
    for word in words:
        named = set()
        for name, module in model.named_modules():
            kind = _KINDS.get(word)
            is_named = (
                kind.search(type(module).__name__) if kind else f".{name}".endswith(f".{word}")
            )
            if is_named and any(True for _ in module.parameters()):
                named.add(name)
        if not named:
            raise UsageError(f"--modules_to_save {word}: {type(model).__name__} has no such module")
        names |= named

    return sorted(names)


def take_adapter(model: PreTrainedModel, name: str, folder: str | Path, flag: str) -> None:
    """Takes the weights of the adapter `name` from a folder; raises UsageError where these are others."""
    from safetensors.torch import load_file

    saved = load_file(Path(folder).expanduser() / WEIGHTS)
    for weight in added_weights(model, name):
        value = saved.pop(adapter_name(weight.name, name), None)
        if value is None or value.shape != weight.base.shape:
            has = (
                "is not in it"
                if value is None
                else f"has there {list(value.shape)}, not {list(weight.base.shape)}"
            )
            raise UsageError(
                f"{flag} {folder} does not fit --model and the flags: {weight.name} {has}"
            )
        with torch.no_grad():
            weight.base.copy_(value)

    left = [name for name in saved if not (_tied(model) and name.endswith("lm_head.weight"))]
    if left:
        raise UsageError(
            f"{flag} {folder} does not fit --model and the flags: {left[0]} has no place there"
        )


def _tied(model: PreTrainedModel) -> bool:
    """Says whether the output head is the embedding."""
    return output_head(model).weight is model.get_input_embeddings().weight


def _lora_layers(model: nn.Module) -> list[Any]:
    """Returns peft's modules around those that have adapters."""
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def _expert_modules(model: PreTrainedModel) -> set[str]:
    """Returns what a checkpoint calls the parts of experts that this model has in one tensor a layer, and their router.

    It is empty where there are none. For adapters of modules of these names peft would rewrite the tensor at each use.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping = get_model_conversion_mapping(model, add_legacy=False)
    sources = [
        source
        for conversion in mapping
        for source in conversion.source_patterns
        if ".experts.*." in source
    ]
    parts = _last_parts(source.removesuffix(".weight") for source in sources)
    if parts:
        parts.add("gate")
    for name, module in model.named_modules():
        # Llama 4's router is a linear layer that returns two tensors.
        if isinstance(module, nn.Linear) and type(module).__module__.startswith(
            "transformers.models."
        ):
            parts.add(name.rpartition(".")[2])

    return parts


def _last_parts(paths: Iterable[str]) -> set[str]:
    """Returns what modules are called in the modules that they are of."""
    return {path.rpartition(".")[2] for path in paths}


@contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[None]:
    """Makes the model what it was when it was loaded, or what it is with `--ref_adapters` alone, while it is open."""
    from peft.utils.other import AuxiliaryTrainingWrapper

    other = [module for module in model.modules() if isinstance(module, AuxiliaryTrainingWrapper)]
    layers = _lora_layers(model)
    # Not by peft's own methods: those change what is trained too, and transformers' forget the modules to save.
    off = other if REFERENCE in model.peft_config else other + layers
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


def adapter_config(model: nn.Module, args: AdapterArguments) -> AdapterConfig:
    """Returns which adapters `model` has, `all-linear` and patterns spelled out."""
    modules = set(args.target_modules)
    if args.target_regex is not None or modules == {ALL_LINEAR}:
        adapted = set(_lora_layers(model))
        names = {name for name, module in model.named_modules() if module in adapted}
        if args.target_regex is not None:
            modules = {module_in_checkpoint(model, name) for name in names}
        else:
            modules = _last_parts(names)
    return AdapterConfig(
        rank=args.lora_rank,
        alpha=args.lora_alpha,
        target_modules=tuple(sorted(modules)),
        rslora=args.use_rslora,
    )
