"""`--deepspeed`: reading it, and holding it against the flags. Without DeepSpeed itself, so before anything loads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from swift_r1.errors import UsageError

_DEFAULTS = {
    # The optimizer is the flags': plain torch's or bitsandbytes', also with offload.
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 2**31 - 1,
}
_NOT_OURS = {
    "optimizer": "--optim, --learning_rate, --weight_decay, --adam_beta1 and the like decide it",
    "scheduler": "--lr_scheduler_type, --lr_scheduler_kwargs and --warmup_ratio decide it",
    "amp": "--torch_dtype decides the dtype",
}
ON_GPU = {
    "overlap_comm": True,
    "pin_memory": True,
    "reduce_bucket_size": 200_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
}
"""What NCCL and a bus want where a file says "auto", and in our own files, which are for gloo and few cores otherwise:
exchanges beside computing, large ones, and host memory that a GPU reads by itself. Not yet measured."""
LOSS_SCALE = {
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 1,
    "min_loss_scale": 1,
}
"""DeepSpeed's own fields; 0 is dynamic."""


def read_config(
    name_path_or_json: str, hpz: int | None = None, gpu: bool = False
) -> dict[str, Any]:
    """One of our names (`zero3`), a JSON file, or JSON itself, without every "auto" and with our defaults; `hpz` is
    `--zero_hpz_partition_size`, and on a `gpu` there are other values for some "auto" (`ON_GPU`). Raises UsageError: if
    it is none of the three."""
    text = name_path_or_json.strip()
    config: Any
    ours = False
    packaged = resources.files(__package__).joinpath("deepspeed_configs", f"{text}.json")
    try:
        if text.startswith("{"):
            config = json.loads(text)
        elif packaged.is_file():
            config = json.loads(packaged.read_text())
            ours = True
        else:
            config = json.loads(Path(text).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--deepspeed {text}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"--deepspeed {text}: not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise UsageError(f"--deepspeed {text}: holds no JSON object")
    if gpu:
        config = _on_gpu(config, ours)
    filled: dict[str, Any] = _DEFAULTS | dict(_without_auto(config))
    if hpz is not None and isinstance(zero := filled.get("zero_optimization", {}), dict):
        filled["zero_optimization"] = zero | {"zero_hpz_partition_size": hpz}
    return filled


def contradictions(
    config: Mapping[str, Any],
    *,
    dtype: str,
    micro_batch: int,
    accumulation: int,
    step: int,
    world_size: int,
    max_grad_norm: float,
) -> Iterator[str]:
    """What `config` (of `read_config`) says against the flags, one line each; the same value in both is fine. `dtype`
    is `float32`, `bfloat16` or `float16`; an optimizer step has `step` completions."""
    decided = {
        "train_micro_batch_size_per_gpu": (micro_batch, "--per_device_train_batch_size"),
        "gradient_accumulation_steps": (accumulation, "--gradient_accumulation_steps"),
        "train_batch_size": (
            step,
            "--per_device_train_batch_size x --gradient_accumulation_steps x processes",
        ),
        "gradient_clipping": (max_grad_norm, "--max_grad_norm"),
    }
    for key, (value, flag) in decided.items():
        if key in config and config[key] != value:
            yield f'--deepspeed sets {key} {config[key]}, but {flag} is {value:g}: leave it out, or write "auto"'
    for key, why in _NOT_OURS.items():
        if key in config:
            yield f'--deepspeed sets {key}: {why}; leave it out, or write "auto"'
    for key, name in (("bf16", "bfloat16"), ("fp16", "float16")):
        section = config.get(key, {})
        if not isinstance(section, Mapping):
            yield f"--deepspeed: {key} must be an object"
        elif "enabled" in section and section["enabled"] != (dtype == name):
            yield f"--deepspeed sets {key}.enabled {json.dumps(section['enabled'])}, but --torch_dtype is {dtype}"
    if config["zero_force_ds_cpu_optimizer"]:
        yield "--deepspeed sets zero_force_ds_cpu_optimizer: --optim decides the optimizer; leave it out"
    zero = config.get("zero_optimization", {})
    if not isinstance(zero, Mapping) or zero.get("stage", 0) not in (0, 1, 2, 3):
        yield "--deepspeed: zero_optimization must be an object whose stage is 0, 1, 2 or 3"
    elif (size := zero.get("zero_hpz_partition_size", 1)) > 1 and (
        zero.get("stage") != 3 or world_size % size
    ):
        yield (
            f"--zero_hpz_partition_size {size} needs ZeRO-3, and a number of processes that it divides "
            f"(here stage {zero.get('stage', 0)} and {world_size})"
        )


def offloads(config: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether `config` keeps optimizer and parameters in host memory."""
    zero = config.get("zero_optimization")
    parts = [
        zero.get(key) if isinstance(zero, Mapping) else None
        for key in ("offload_optimizer", "offload_param")
    ]
    optimizer, model = (
        isinstance(one, Mapping) and one.get("device") not in (None, "none") for one in parts
    )
    return optimizer, model


def moved_twice(config: Mapping[str, Any], model: bool, optimizer: bool) -> Iterator[str]:
    """Tells what `config` keeps in host memory already, against `--offload_model` and `--offload_optimizer`."""
    optimizer_away, model_away = offloads(config)
    for key, flag, twice in (
        ("offload_param", "--offload_model", model and model_away),
        ("offload_optimizer", "--offload_optimizer", optimizer and optimizer_away),
    ):
        if twice:
            yield f"--deepspeed sets {key}, which stays on the host: leave {flag} true out"


def resolved(config: Mapping[str, Any], dtype: str, max_grad_norm: float) -> dict[str, Any]:
    """Returns what DeepSpeed is given: `config` (of `read_config`) with what the flags decide; its own loss scale
    stays."""
    filled = {
        key: value
        for key, value in config.items()
        if key not in ("bf16", "fp16", "train_batch_size")
    }
    filled |= {
        # The loop makes micro-batches and marks the step's end itself: DeepSpeed must neither scale nor wait.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,
    }
    if dtype == "bfloat16":
        filled |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    if dtype == "float16":
        own = {key: value for key, value in config.get("fp16", {}).items() if key in LOSS_SCALE}
        filled |= {
            "fp16": {"enabled": True, **LOSS_SCALE, **own},
            "data_types": {"grad_accum_dtype": "fp32"},
        }
    return filled


def _on_gpu(value: Any, ours: bool) -> Any:
    """Puts in what GPUs want: for "auto", or all of it where the file is `ours`."""
    if not isinstance(value, dict):
        return value
    return {
        key: ON_GPU[key] if key in ON_GPU and (ours or item == "auto") else _on_gpu(item, ours)
        for key, item in value.items()
    }


def _without_auto(value: Any) -> Any:
    """Drops every "auto" (and what is empty without it), as ms-swift's own files have them."""
    if not isinstance(value, dict):
        return value
    cleaned = {key: _without_auto(item) for key, item in value.items() if item != "auto"}
    return {key: item for key, item in cleaned.items() if item != {} or value[key] == {}}
