"""Which weights a whole model has, or a LoRA adapter of it, by the names and shapes of their files."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from swift_r1.models.shape import skeleton, tied_names
from swift_r1.wire.protocol import AdapterConfig, HTTPError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

Shapes = dict[str, tuple[int, ...]]
"""The shapes of weights, by their names."""
_PEFT_PREFIX = "base_model.model."


def expected_weights(model: str, towers: bool = False) -> Shapes:
    """Returns the shapes of all weights and persistent buffers of a causal LM, by their names in its checkpoint; with
    those of its `towers` too.

    A tied output head is left out: it is the embedding, and is sent once.

    Args:
        model: folder or id.
        towers: of a multimodal one, with those beside the language model.
    """
    import torch

    empty = skeleton(model, towers)
    use_checkpoint_form(empty, model)
    own = {name: torch.empty(shape, device="meta") for name, shape in own_weights(empty).items()}
    return {name: tuple(weight.shape) for name, weight in as_in_checkpoint(empty, own).items()}


def parts_of(names: Iterable[str]) -> set[str]:
    """Returns the parts of a multimodal model that have weights of these names, and the language model."""
    from swift_r1.models.multimodal import part_of_model

    return {"llm", *map(part_of_model, names)}


def of_parts(weights: Shapes, parts: Container[str]) -> Shapes:
    """Returns those of a whole model's weights that are in these parts of it."""
    from swift_r1.models.multimodal import part_of_model

    return {name: shape for name, shape in weights.items() if part_of_model(name) in parts}


def own_weights(model: nn.Module) -> Shapes:
    """Returns the shapes of the weights and persistent buffers by their names in the model itself, tied ones once."""
    tied = tied_names(model)  # in a skeleton they are not tied yet
    shapes = {
        name: tuple(weight.shape) for name, weight in model.named_parameters() if name not in tied
    }
    lasting = model.state_dict(keep_vars=True)
    return shapes | {
        name: tuple(buffer.shape) for name, buffer in model.named_buffers() if name in lasting
    }


def use_checkpoint_form(model: nn.Module, path: str) -> None:
    """Makes `model` be saved and sent in the form of its family's checkpoints, whichever its own file was in.

    The server, which has not loaded that file, knows no other form. A model without its towers gets the form of the
    files in `path` (a folder or id), where these are.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    from swift_r1.models.multimodal import is_multimodal, own_names, stored_tensors

    pretrained = cast("PreTrainedModel", model)
    conversions = get_model_conversion_mapping(pretrained, add_legacy=False)
    if is_multimodal(pretrained.config):
        own_names(pretrained, conversions, stored_tensors(path))
        used = [conversion for conversion in conversions if conversion.was_used()]
    else:
        used = [
            conversion for conversion in conversions if not isinstance(conversion, PrefixChange)
        ]
    # To mypy every attribute of a module is a tensor or a module.
    pretrained._weight_conversions = used  # type: ignore[assignment]


def as_in_checkpoint(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights of `model` as its checkpoint has them, which is how vLLM loads them.

    transformers keeps a layer's experts in one tensor, and has names of its own for some modules.
    """
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, Tensor] = revert_weight_conversion(
        cast("PreTrainedModel", model), dict(weights)
    )
    return converted


def module_in_checkpoint(model: nn.Module, module: str) -> str:
    """Returns the name that a linear module of `model` has in its checkpoint."""
    import torch

    (weight,) = as_in_checkpoint(model, {f"{module}.weight": torch.empty(0)})
    return weight.removesuffix(".weight")


def adapter_in_checkpoint(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns an adapter's weights by the names that its modules have in the checkpoint: vLLM knows no others."""
    renamed = {}
    for name, tensor in weights.items():
        module, lora, kind = name.removeprefix(_PEFT_PREFIX).partition(".lora_")
        renamed[_PEFT_PREFIX + module_in_checkpoint(model, module) + lora + kind] = tensor
    return renamed


def adapter_name(parameter: str, adapter: str = "default") -> str:
    """Returns peft's name in a file for a parameter that it adds to the model (`x.lora_A.default.weight`)."""
    name = parameter.replace(".modules_to_save.", ".").replace(f".{adapter}.", ".")
    return _PEFT_PREFIX + name.replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")


def adapter_shapes(model: Shapes, config: AdapterConfig) -> Shapes:
    """Returns the shapes of all weights of an adapter, by peft's names.

    They are `A [rank, in]` and `B [out, rank]` for each linear weight `[out, in]` of `model` whose module is, or ends
    in, a target module. Raises HTTPError (422) for a target that the model does not have.
    """
    shapes: Shapes = {}
    adapted = set()
    for name, shape in model.items():
        module = name.removesuffix(".weight")
        targets = {
            target for target in config.target_modules if f".{module}".endswith(f".{target}")
        }
        if targets and len(shape) == 2:
            shapes[f"{_PEFT_PREFIX}{module}.lora_A.weight"] = (config.rank, shape[1])
            shapes[f"{_PEFT_PREFIX}{module}.lora_B.weight"] = (shape[0], config.rank)
            adapted |= targets

    missing = sorted(set(config.target_modules) - adapted)
    if missing:
        raise HTTPError(422, f"the served model has no linear module {', '.join(missing)}")
    return shapes


def write_adapter(folder: Path, files: Sequence[Path], config: AdapterConfig) -> None:
    """Makes `folder` as peft would save the adapter whose tensors are in `files`."""
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": config.rank,
        "lora_alpha": config.alpha,
        "use_rslora": config.rslora,
        "target_modules": list(config.target_modules),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(about), encoding="utf-8")
