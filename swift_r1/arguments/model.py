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
        "which weights are trained: all, adapters, or adapters over weights of 4 bits",
        choices=("full", "lora", "qlora"),
        aliases=("tuner_type",),
        ms_swift="lora",
    )
    lora_rank: int = flag(8, "rank of the adapters of --train_type lora and qlora", at_least=1)
    lora_alpha: int = flag(32, "the adapters' product is scaled by --lora_alpha / --lora_rank", at_least=1)
    target_modules: list[str] = flag(
        ["all-linear"], "names of the modules that get adapters; all-linear: every linear one but the output head"
    )
    quant_bits: int | None = flag(
        None, "bits of the weights under the adapters: 4 with --train_type qlora (or lora)", at_least=4, at_most=4
    )
    quant_method: str = flag("bnb", "who stores weights in 4 bits: bitsandbytes", choices=("bnb",))
    bnb_4bit_quant_type: str = flag("nf4", "the 16 numbers that 4 bits stand for", choices=("nf4", "fp4"))
    bnb_4bit_use_double_quant: bool = flag(True, "store the scales of the blocks of 4-bit weights in 8 bits too")
    freeze_parameters: list[str] = flag(
        [], "--train_type full: beginnings of the names of weights that stay as they are"
    )
    freeze_parameters_regex: str | None = flag(None, "pattern of the names of weights that stay as they are")
    freeze_parameters_ratio: float = flag(
        0.0, "share of the model's numbers, from its first weight on, that stays as it is", at_least=0, less_than=1
    )
    trainable_parameters: list[str] = flag([], "beginnings of the names of weights that are trained all the same")
    gradient_checkpointing: bool = flag(True, "recompute activations in the backward pass: less memory, ~30 % slower")
