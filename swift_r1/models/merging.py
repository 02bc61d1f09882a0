"""Adapters merged into the model under them: the same numbers that training gave to the engine."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from swift_r1.errors import UsageError, one_line
from swift_r1.flags.adapters import WEIGHTS
from swift_r1.models.expected import (
    Shapes,
    as_in_checkpoint,
    own_weights,
    parts_of,
    use_checkpoint_form,
)
from swift_r1.models.loading import (
    Quantization,
    as_readable_as_its_config,
    load_model,
    load_tokenizer,
)
from swift_r1.models.lora import take_adapter
from swift_r1.models.multimodal import copy_processor, kept_on_disk
from swift_r1.models.older_readers import write_older_rope
from swift_r1.models.shape import skeleton, tied_names
from swift_r1.models.tokenizer_files import stored_files, tokenizer_files, write_tokenizer
from swift_r1.models.weights import ADAPTER, has_adapters, policy_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ADDED = re.compile(
    r"base_model\.model\.(.+?)(?:\.lora_([AB])\.weight|\.lora_(magnitude)_vector|\.weight|\.bias)"
)
_OF_EXPERT = re.compile(r"\.experts\.(.+\.)?lora_")
BASE = "base_model.json"  # in a checkpoint of adapters: how the model under them was loaded


def write_base(model: PreTrainedModel, folder: Path, quantization: Quantization | None) -> None:
    """Writes what `merge` must know of the model under the adapters; nothing where there are none."""
    if has_adapters(model):
        content = {
            "dtype": str(model.dtype).removeprefix("torch."),
            "quantization": None if quantization is None else asdict(quantization),
        }
        (folder / BASE).write_text(json.dumps(content) + "\n", encoding="utf-8")


def merge(base: str, adapters: Path, output: Path) -> None:
    """Writes the merged model, with the tokenizer, to `output`.

    4-bit weights are merged as the numbers that they stand for: over these the adapters were trained.

    Args:
        base: folder or id of the model under the adapters.
        adapters: their folder, as peft or a checkpoint has them.

    Raises UsageError: the adapters are not of this model.
    """
    from peft import PeftConfig

    path = adapters / BASE
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    quantization = Quantization(**known["quantization"]) if known.get("quantization") else None

    shapes = _shapes(adapters)
    of_expert = next(filter(_OF_EXPERT.search, shapes), None)
    if of_expert is not None:
        raise UsageError(
            f"--adapters {adapters} adapt experts ({of_expert}), which transformers has in one tensor a layer: only "
            "adapters of other modules can be merged"
        )
    towers = parts_of(shapes) != {"llm"}
    fault = misfit(base, shapes, towers)
    if fault is not None:
        raise UsageError(f"--adapters {adapters} are not of --model {base}: {fault}")
    model = load_model(base, known.get("dtype"), False, quantization=quantization, towers=towers)
    try:
        # Not by transformers' `load_adapter`, which leaves DoRA's magnitudes out and unties what is trained whole.
        model.add_adapter(PeftConfig.from_pretrained(str(adapters)), ADAPTER)
    except (ValueError, RuntimeError, KeyError) as error:
        raise UsageError(
            f"--adapters {adapters} are not of --model {base}: {one_line(error)}"
        ) from error

    take_adapter(model, ADAPTER, adapters, "--adapters")

    plain = plain_like(model)
    weights = {weight.name: weight.base for weight in policy_weights(plain)}
    with torch.no_grad():
        for weight in policy_weights(model):
            weights[weight.name].copy_(weight.value())
    plain.generation_config = model.generation_config

    use_checkpoint_form(plain, base)
    tensors = as_in_checkpoint(
        plain, {weight.name: weight.base for weight in policy_weights(plain)}
    )
    for name, path in kept_on_disk(plain, base).items():
        with safe_open(path, "pt") as file:
            tensors[name] = file.get_tensor(name)

    plain._weight_conversions = []  # type: ignore[assignment]  # they have their names in the checkpoint
    plain.save_pretrained(output, state_dict=tensors)
    write_older_rope(output)
    copy_processor(base, output)
    as_readable_as_its_config(output)

    write_tokenizer(stored_files(adapters) or tokenizer_files(load_tokenizer(base)), output)


def _shapes(adapters: Path) -> Shapes:
    """Returns the shapes of the tensors in a folder of adapters."""
    with safe_open(adapters / WEIGHTS, "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def misfit(base: str, shapes: Shapes, towers: bool = False) -> str | None:
    """Says why adapters with tensors of these shapes cannot be of the model `base`, with its `towers` or without; None
    where they fit."""
    empty: Any = skeleton(base, towers)
    expected = own_weights(empty)
    tied = tuple(tied_names(empty))
    for name, shape in sorted(shapes.items()):
        match = _ADDED.fullmatch(name)
        under = (
            expected.get(f"{match[1]}{'.bias' if name.endswith('.bias') else '.weight'}")
            if match
            else None
        )
        if tied and name.endswith(tied):
            continue
        if match is None or under is None:
            return f"it has no {match[1] if match else name}"

        # Of a whole weight (`--modules_to_save`), and of DoRA's magnitudes, the first side stands for the others.
        side = 1 if match[2] == "A" else 0
        if shape[side] != under[side]:
            return f"{match[1]} is {list(under)} there, and they are for one with {shape[side]} in place of {under[side]}"

    return None


def plain_like(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a model of the same class, config and dtype whose parameters are ordinary, whole and without adapters."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    make: Callable[..., PreTrainedModel] = type(model)._from_config
    plain = make(config, dtype=model.dtype)
    plain.requires_grad_(False).train(False)
    return plain
