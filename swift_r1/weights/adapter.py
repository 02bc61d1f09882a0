"""LoRA adapters on their way to the engine: a few megabytes in place of the whole model (arXiv 2106.09685)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from swift_r1.weights.expected import Shapes
from swift_r1.wire.http_errors import HTTPError
from swift_r1.wire.protocol import AdapterConfig

_PREFIX = "base_model.model."


def adapter_name(parameter: str, adapter: str = "default") -> str:
    """peft's name in a file for the parameter that it adds to the model: `x.lora_A.default.weight`, say."""
    return _PREFIX + parameter.replace(f".{adapter}.", ".")


def adapter_shapes(model: Shapes, config: AdapterConfig) -> dict[str, tuple[int, ...]]:
    """Every weight of the adapter: `A [rank, in]` and `B [out, rank]` for each linear weight `[out, in]` of `model`
    whose module is, or ends in, one of the target modules.

    Raises:
        HTTPError: 422 where a target module is none of the model's.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    found = set()
    for name, shape in model.items():
        module = name.removesuffix(".weight")
        targets = {one for one in config.target_modules if module == one or module.endswith(f".{one}")}
        if targets and len(shape) == 2:
            shapes[f"{_PREFIX}{module}.lora_A.weight"] = (config.rank, shape[1])
            shapes[f"{_PREFIX}{module}.lora_B.weight"] = (shape[0], config.rank)
            found |= targets
    if missing := sorted(set(config.target_modules) - found):
        raise HTTPError(422, f"the served model has no linear module {', '.join(missing)}")
    return shapes


def write_adapter(folder: Path, files: Sequence[Path], config: AdapterConfig) -> None:
    """Makes `folder`, as peft would save the adapter whose tensors are in the safetensors `files`."""
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": list(config.target_modules),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(about), encoding="utf-8")
