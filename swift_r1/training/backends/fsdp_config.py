"""`--fsdp`: reading it. Without torch, so before anything loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swift_r1.errors import UsageError

# whether weights are freed after a layer's forward
_STRATEGIES = {"full_shard": True, "shard_grad_op": False}
_OFFLOAD = "keeps no weights in host memory: --deepspeed zero3_offload does"
_REFUSED = {
    "offload": _OFFLOAD,
    "hybrid_shard": "shards over all ranks: full_shard",
    "hybrid_shard_zero2": "shards over all ranks: shard_grad_op",
}
_VERSION_1 = "belongs to version 1 of FSDP: leave it out"


@dataclass(frozen=True, slots=True)
class FsdpConfig:
    """How FSDP2 shards.

    Attributes:
        reshard_after_forward: free a layer's weights after its forward pass and gather them again for the backward
            pass, as ZeRO-3 does; else they stay whole from one to the other.
        layers: names of the classes that are gathered as a whole; empty: the model's decoder layers.
        rank0_loads: rank 0 alone reads the weights and sends them.
        checkpointing: recomputes activations, which `--gradient_checkpointing` decides.
    """

    reshard_after_forward: bool = True
    layers: tuple[str, ...] = field(default=())
    rank0_loads: bool = True
    checkpointing: bool = False


def read_fsdp(name_path_or_json: str) -> FsdpConfig:
    """`fsdp2`, a JSON file, or JSON, in ms-swift's form: `fsdp` names the strategy, `fsdp_config` has the rest, where
    names may begin with `fsdp_`. Raises UsageError: it is none of these, or asks for what is not done here."""
    text = name_path_or_json.strip()
    if text == "fsdp2":
        return FsdpConfig()
    try:
        content = json.loads(
            text if text.startswith("{") else Path(text).read_text(encoding="utf-8")
        )
    except OSError as error:
        raise UsageError(f"--fsdp {text}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"--fsdp {text}: not valid JSON ({error})") from error
    if not isinstance(content, dict) or not isinstance(content.get("fsdp_config", {}), dict):
        raise UsageError("--fsdp: it and its fsdp_config must be JSON objects")
    faults = [
        f"--fsdp: {key} is not known"
        for key in content
        if key[:1] != "_" and key not in ("fsdp", "fsdp_config")
    ]
    found: dict[str, Any] = {}
    for word in str(content.get("fsdp", "full_shard auto_wrap")).split():
        if word in _STRATEGIES:
            found["reshard_after_forward"] = _STRATEGIES[word]
        elif word != "auto_wrap":
            faults.append(
                f"--fsdp: {word} {_REFUSED.get(word, 'is not known: full_shard or shard_grad_op')}"
            )
    for key, value in content.get("fsdp_config", {}).items():
        try:
            found |= _setting(key.removeprefix("fsdp_"), value)
        except ValueError as error:
            faults.append(f"--fsdp: {key} {json.dumps(value)} {error}")
    if faults:
        raise UsageError(*faults)
    return FsdpConfig(**found)


def _setting(key: str, value: Any) -> Mapping[str, Any]:
    """Fields of FsdpConfig that an entry of `fsdp_config` sets; raises ValueError with the end of a sentence."""
    match key:
        case "reshard_after_forward" | "cpu_ram_efficient_loading" | "activation_checkpointing":
            if not isinstance(value, bool):
                raise ValueError("must be true or false")
            names = {
                "cpu_ram_efficient_loading": "rank0_loads",
                "activation_checkpointing": "checkpointing",
            }
            return {names.get(key, key): value}
        case "transformer_layer_cls_to_wrap":
            return {"layers": tuple(value.split(",") if isinstance(value, str) else value)}
        case "version" if value != 2:
            raise ValueError("must be 2")
        case "auto_wrap_policy" if value != "TRANSFORMER_BASED_WRAP":
            raise ValueError(
                "must be TRANSFORMER_BASED_WRAP: decoder layers are gathered one by one"
            )
        case "offload_params" if value:
            raise ValueError(_OFFLOAD)
        case "state_dict_type" if value not in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
            raise ValueError("must be SHARDED_STATE_DICT or FULL_STATE_DICT: a checkpoint is both")
        case "version" | "auto_wrap_policy" | "offload_params" | "state_dict_type":
            return {}
        case (
            "sync_module_states"
            | "use_orig_params"
            | "forward_prefetch"
            | "backward_prefetch"
            | "limit_all_gathers"
        ):
            raise ValueError(_VERSION_1)
    raise ValueError("is not known")
