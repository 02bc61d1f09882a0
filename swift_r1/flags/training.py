"""Flags of the model, of its optimisation, and of the processes that do it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from swift_r1.flags.data import EVALUATED
from swift_r1.flags.fields import RATE, Scope, check_pattern, flag, resumable_flag

EIGHT_BIT = (
    "adamw_8bit",
    "adamw_bnb_8bit",
    "paged_adamw_8bit",
)
"""bitsandbytes' AdamW, with 8-bit moments (arXiv 2110.02861)."""
DTYPES = ("float32", "bfloat16", "float16")

DEEPSPEED_NAMES = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds_of(duration: str) -> float:
    """Returns a time like 90s, 45m, 2h or 1d in seconds, a number alone is in seconds; ValueError for any other."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", duration)
    if match is None or not (seconds := float(match[1]) * _UNITS[match[2]]):
        raise ValueError(f"{duration}: must be a time like 90s, 45m, 2h or 1d")
    return seconds


def _named_or_json(names: Sequence[str], value: str) -> None:
    text = value.strip()
    if text.startswith("{"):
        try:
            json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"holds JSON that is not valid: {error.msg} at {error.pos}") from error
    elif text not in names and not text.endswith(".json"):
        raise ValueError(f"must be one of {', '.join(names)}, a .json file or JSON, not {text!r}")


_FULL = Scope(lambda args: args.train_type == "full", "with --train_type {train_type}: use full")
_ADAM = Scope(lambda args: args.optim != "sgd", "with --optim sgd")
_WARMS_UP = Scope(
    lambda args: (
        args.lr_scheduler_type != "constant" or not (args.warmup_ratio or args.warmup_steps)
    ),
    "with --lr_scheduler_type constant: use constant_with_warmup",
)
_FROZEN = Scope(lambda args: args.freezes, "where nothing is frozen", allow_default=True)
_EVALUATED = replace(EVALUATED, warn_only=True)
_BATCHES = Scope(
    lambda args: not args.use_vllm,
    "with --use_vllm true: the engine batches by itself",
    warn_only=True,
)

_ZERO = Scope(lambda args: args.deepspeed is not None, "without --deepspeed: use zero3")


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """Model."""

    model: str = flag("", "folder of the model, or its Hugging Face id", required=True)
    torch_dtype: str | None = flag(
        None,
        "dtype of the model's weights in compute (default: its config's; float32 on a CPU without instructions for it)",
        choices=DTYPES,
        aliases=("dtype",),
    )
    bf16: bool | None = flag(None, "true: --torch_dtype bfloat16, with float32 masters")
    fp16: bool | None = flag(
        None, "true: --torch_dtype float16, with float32 masters and a loss scale"
    )
    model_type: str | None = flag(
        None, "checked against config.json, which says what the model is: qwen2_5, llama3_1"
    )
    train_type: str = flag(
        "full",
        "what to train: all weights, adapters, or adapters over 4-bit weights",
        choices=("full", "lora", "qlora"),
        aliases=("tuner_type",),
        ms_swift="lora",
    )
    freeze_parameters: list[str] = flag([], "freeze weights whose names begin with these", _FULL)
    freeze_parameters_regex: str | None = flag(
        None, "freeze weights whose names match this pattern", _FULL, check=check_pattern
    )
    freeze_parameters_ratio: float = flag(
        0.0,
        "freeze this share of the model, counted from its first weight",
        _FULL,
        at_least=0,
        less_than=1,
    )
    trainable_parameters: list[str] = flag(
        [], "train weights whose names begin with these, although frozen above", _FULL, _FROZEN
    )
    trainable_parameters_regex: str | None = flag(
        None,
        "train weights whose names match this pattern, although frozen above",
        _FULL,
        _FROZEN,
        check=check_pattern,
    )
    freeze_llm: bool = flag(
        False, "rows with images: freeze the language model, so that only its tower is trained"
    )
    freeze_vit: bool = flag(
        True, "rows with images: freeze the tower that reads them (with adapters: it gets none)"
    )
    freeze_aligner: bool = flag(
        True, "rows with images: freeze what joins tower and language model"
    )
    gradient_checkpointing: bool = flag(
        True, "recompute activations in the backward pass: less memory, ~30 % slower"
    )
    attn_impl: str | None = resumable_flag(
        None,
        "attention implementation (default: the config's, else SDPA); only SDPA shares prompts and spreads rows over "
        "ranks; flash and flex attention need a GPU: on a CPU it is SDPA",
        choices=("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"),
        synonyms={"flash_attn": "flash_attention_2"},
    )
    tf32: bool = flag(
        False,
        "float32 matrix products in TF32, with 10 bits of mantissa: faster",
        gpu_only=True,
        ms_swift="PyTorch's",
    )

    @property
    def dtype(self) -> str | None:
        """`--torch_dtype`, or what `--bf16` and `--fp16` say; None: as the model's config says."""
        named = {"bfloat16": self.bf16, "float16": self.fp16}
        return self.torch_dtype or next((name for name, wanted in named.items() if wanted), None)

    @property
    def frozen_parts(self) -> set[str]:
        """Returns the parts of a multimodal model that are not trained."""
        parts = {"llm": self.freeze_llm, "vit": self.freeze_vit, "aligner": self.freeze_aligner}
        return {name for name, frozen in parts.items() if frozen}

    @property
    def freezes(self) -> bool:
        """Whether full training leaves some weights of a language model as they are."""
        return bool(
            self.freeze_parameters
            or self.freeze_parameters_regex
            or self.freeze_parameters_ratio
            or self.freeze_llm
        )

    def dtype_faults(self) -> Iterator[str]:
        """Yields what `--bf16` and `--fp16` say against each other and `--torch_dtype`."""
        for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
            value = getattr(self, name)
            if value and self.dtype != dtype:
                yield (
                    f"--{name} true is --torch_dtype {dtype} here (masters are float32 all the same), and "
                    f"{f'--torch_dtype {self.torch_dtype}' if self.torch_dtype else '--bf16 true'} is given: keep one"
                )
            if value is False and self.dtype in (None, dtype):
                yield f"--{name} false does not say which dtype to use: give --torch_dtype float32, or another"


@dataclass(frozen=True, kw_only=True)
class TrainingArguments:
    """Training."""

    learning_rate: float | None = flag(
        None, "peak learning rate (default: 1e-5, of adapters 1e-4)", **RATE
    )
    vit_lr: float | None = flag(
        None,
        "peak learning rate of the tower that reads images (default: --learning_rate)",
        **RATE,
    )
    aligner_lr: float | None = flag(
        None,
        "peak learning rate of what joins tower and language model (default: --learning_rate)",
        **RATE,
    )
    weight_decay: float = flag(
        0.1, "weight decay; with --optim sgd its gradient is added to the loss's", at_least=0
    )
    adam_beta1: float = flag(0.9, "AdamW beta 1", _ADAM, at_least=0, less_than=1)
    adam_beta2: float = flag(0.95, "AdamW beta 2", _ADAM, at_least=0, less_than=1)
    adam_epsilon: float = flag(1e-8, "AdamW epsilon", _ADAM, more_than=0)
    max_grad_norm: float = flag(1.0, "maximum gradient norm", more_than=0)
    lr_scheduler_type: str = flag(
        "cosine",
        "learning rate schedule",
        choices=(
            *(
                "linear",
                "cosine",
                "cosine_with_min_lr",
                "cosine_with_restarts",
                "polynomial",
                "inverse_sqrt",
            ),
            *("constant", "constant_with_warmup"),
        ),
    )
    lr_scheduler_kwargs: dict[str, Any] = flag(
        {}, "arguments of the scheduler: '{\"min_lr\": 1e-7}'"
    )
    warmup_ratio: float = flag(
        0.0, "share of steps with a rising learning rate", _WARMS_UP, at_least=0, at_most=1
    )
    warmup_steps: int | None = flag(
        None, "steps with a rising learning rate, in place of --warmup_ratio", _WARMS_UP, at_least=0
    )
    num_train_epochs: float = flag(1.0, "passes over the prompts", more_than=0, ms_swift="3")
    max_steps: int = flag(-1, "optimizer steps; -1: from --num_train_epochs", at_least=-1)
    max_epochs: int | None = flag(
        None,
        "most passes over the prompts, where --max_steps or --num_train_epochs would come to more",
        at_least=1,
    )
    per_device_train_batch_size: int = flag(
        1,
        "completions per micro-batch and process; shorter ones share it (--max_tokens_per_micro_batch)",
        at_least=1,
    )
    per_device_eval_batch_size: int = resumable_flag(
        1,
        "completions per process generated at once in evaluation",
        _EVALUATED,
        _BATCHES,
        at_least=1,
    )
    gradient_accumulation_steps: int = flag(
        1,
        "micro-batches per optimizer step; where no flag sizes the round, as many as hold whole groups and at least 16 "
        "completions if 1 does not",
        at_least=1,
        ms_swift="with PPO so that about 16 completions make a step",
    )
    max_tokens_per_micro_batch: int | None = flag(
        None,
        "tokens, padding included, that one process puts through the model at once (default: as many as "
        "--per_device_train_batch_size of the step's longest completions; on a GPU as many as the memory estimate has "
        "room for)",
        at_least=1,
    )
    share_prompt: str = flag(
        "auto",
        "compute what rows of a group begin with once per micro-batch: the prompt, the histories of an agent's calls; "
        "same numbers; auto: where that saves a quarter of the tokens and the model has full attention by SDPA",
        choices=("auto", "true", "false"),
    )
    sequence_parallel_size: int = flag(
        1,
        "ranks that share each row, with a part of its tokens each (Ulysses): for completions too long for one; rows "
        "are packed then. It must divide the processes and the attention heads",
        at_least=1,
    )
    packing: bool = flag(
        False,
        "one row per micro-batch, without padding, where prompts are not shared (which packs too)",
        aliases=("padding_free",),
    )
    optim: str = flag(
        "adamw_torch_fused",
        "the optimizer; 8bit: 8-bit moments, by bitsandbytes; paged: those move between GPU and host; muon: Muon for "
        "the matrices inside the layers, AdamW for the rest, at the same learning rate",
        choices=("adamw_torch_fused", "adamw_torch", *EIGHT_BIT, "muon", "sgd"),
    )
    estimate: bool = resumable_flag(
        False, "say how much memory a rank will need, and end; loads neither weights nor data"
    )
    seed: int = flag(42, "seed of everything random", at_least=0)
    max_skipped_steps: int = resumable_flag(
        3, "most steps in a row that are skipped because loss or gradient is not finite", at_least=0
    )
    step_timeout: int = resumable_flag(
        3600,
        "seconds without progress (a completion, an optimizer step, a save) after which a process prints the stacks of "
        "all its threads and ends the run; 0: never",
        at_least=0,
    )
    deterministic: bool = flag(
        False,
        "the same bits in every run, also in one that was killed and resumed: deterministic kernels, request ids from "
        "--seed (docs/checkpoints.md)",
        aliases=("full_determinism",),
    )
    max_runtime: str | None = resumable_flag(
        None,
        "save and end within this time from the start: 90s, 45m, 2h, 1d (default: no limit); the exit code is 0",
        check=seconds_of,
    )
    deepspeed: str | None = flag(
        None,
        "zero0, zero1, zero2, zero3, zero2_offload, zero3_offload, a JSON file or JSON (default: plain torch, which in "
        "several processes is DDP)",
        check=partial(_named_or_json, DEEPSPEED_NAMES),
        objects=True,
    )
    zero_hpz_partition_size: int | None = flag(
        None,
        "ZeRO-3 with a second copy of the weights in each group of so many ranks, of one machine: gathered from there "
        "for the backward pass",
        _ZERO,
        at_least=1,
    )
    fsdp: str | None = flag(
        None,
        "shard by torch's FSDP2",
        instead_of=("deepspeed",),
        choices=("fsdp2",),
    )
    ddp_timeout: int = resumable_flag(
        600,
        "seconds of a rank's silence after which those that wait for it end the run",
        at_least=1,
        ms_swift="18000000",
    )
    ddp_backend: str | None = flag(
        None,
        "what exchanges gradients and weights between ranks (default: nccl between GPUs, else gloo)",
        choices=("nccl", "gloo"),
    )
    shutdown_timeout: int = resumable_flag(
        0,
        "seconds that the processes of a run of several may take to end after SIGTERM or Ctrl-C (the current step, a "
        "save) before they are killed; 0: as long as they make progress (--step_timeout)",
        at_least=0,
    )

    @property
    def distributed(self) -> bool:
        """Whether the backend makes a group of ranks even of one process."""
        return self.deepspeed is not None or self.fsdp is not None
