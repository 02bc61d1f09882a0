"""Flags of the model that is trained."""

from __future__ import annotations

from dataclasses import dataclass

from swift_r1.arguments.fields import flag

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """Model."""

    model: str = flag("", "folder of the model, or its Hugging Face id", required=True)
    torch_dtype: str | None = flag(
        None, "dtype of the model's weights in compute (default: its config's)", choices=DTYPES, aliases=("dtype",)
    )
    train_type: str = flag(
        "full",
        "which weights are trained",
        choices=("full", "lora"),
        not_yet=("qlora",),
        aliases=("tuner_type",),
        ms_swift="lora",
    )
    lora_rank: int = flag(8, "rank of the adapters of --train_type lora", at_least=1)
    lora_alpha: int = flag(32, "the adapters' product is scaled by --lora_alpha / --lora_rank", at_least=1)
    target_modules: list[str] = flag(
        ["all-linear"], "names of the modules that get adapters; all-linear: every linear one but the output head"
    )
    gradient_checkpointing: bool = flag(True, "recompute activations in the backward pass: less memory, ~30 % slower")
