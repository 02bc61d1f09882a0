"""Flags of optimisation and of the processes that do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swift_r1.arguments.fields import flag


@dataclass(frozen=True, kw_only=True)
class TrainingArguments:
    """Training."""

    learning_rate: float | None = flag(
        None, "peak learning rate (default: 1e-5, of adapters 1e-4; as ms-swift's)", at_least=0
    )
    weight_decay: float = flag(0.1, "AdamW weight decay", at_least=0)
    adam_beta1: float = flag(0.9, "AdamW beta 1", at_least=0, less_than=1)
    adam_beta2: float = flag(0.95, "AdamW beta 2", at_least=0, less_than=1)
    adam_epsilon: float = flag(1e-8, "AdamW epsilon", more_than=0)
    max_grad_norm: float = flag(1.0, "gradients are clipped to this norm", more_than=0)
    lr_scheduler_type: str = flag(
        "cosine",
        "course of the learning rate",
        choices=(
            *("linear", "cosine", "cosine_with_min_lr", "cosine_with_restarts", "polynomial", "inverse_sqrt"),
            *("constant", "constant_with_warmup"),
        ),
    )
    lr_scheduler_kwargs: dict[str, Any] = flag({}, "more of the scheduler: '{\"min_lr\": 1e-7}'")
    warmup_ratio: float = flag(0.0, "share of the steps in which the learning rate rises", at_least=0, at_most=1)
    warmup_steps: int | None = flag(None, "steps in which the learning rate rises, instead of the ratio", at_least=0)
    num_train_epochs: float = flag(1.0, "passes over the prompts", more_than=0, ms_swift="3")
    max_steps: int = flag(-1, "optimizer steps; -1: as --num_train_epochs says", at_least=-1)
    per_device_train_batch_size: int = flag(
        1, "completions a micro-batch of one process; shorter ones share it (--max_tokens_per_micro_batch)", at_least=1
    )
    per_device_eval_batch_size: int = flag(1, "completions one process generates at once in evaluation", at_least=1)
    gradient_accumulation_steps: int = flag(
        1, "micro-batches an optimizer step", at_least=1, ms_swift="so that about 16 completions make a step"
    )
    max_tokens_per_micro_batch: int | None = flag(
        None,
        "tokens, padding included, that one process puts through the model at once (default: as many as "
        "--per_device_train_batch_size of the step's longest completions)",
        at_least=1,
    )
    share_prompt: str = flag(
        "auto",
        "compute a prompt once for the completions of its group in a micro-batch; same numbers; auto: where that "
        "saves a quarter of the tokens and the model attends in full by SDPA",
        choices=("auto", "true", "false"),
    )
    packing: bool = flag(
        False,
        "put a micro-batch's completions into one row, without padding, where prompts are not shared (which packs too)",
    )
    optim: str = flag(
        "adamw_torch_fused",
        "the optimizer; 8bit: moments of 8 bits, by bitsandbytes; paged: those move between GPU and host",
        choices=("adamw_torch_fused", "adamw_torch", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "sgd"),
    )
    estimate: bool = flag(False, "say how much memory a rank will need, and end; loads neither weights nor data")
    seed: int = flag(42, "seed of everything random", at_least=0)
    max_skipped_steps: int = flag(
        3, "steps in a row that may be skipped since loss or gradient is not finite; one more ends the run", at_least=0
    )
    step_timeout: int = flag(
        3600,
        "seconds without progress (a completion, an optimizer step, a save) after which a process prints the stacks of "
        "all its threads and ends the run; 0: never",
        at_least=0,
    )
    deterministic: bool = flag(
        False,
        "the same bits in every run, also in one that was killed and resumed: deterministic kernels, request ids from "
        "--seed (docs/checkpoints.md)",
    )
    max_runtime: str | None = flag(
        None, "save and end in this time from the start: 90s, 45m, 2h, 1d (default: no limit); the exit code is 0"
    )
    deepspeed: str | None = flag(
        None, "zero0, zero1, zero2, zero3, zero2_offload, zero3_offload, a JSON file or JSON (default: plain torch)"
    )
    ddp_timeout: int = flag(
        600,
        "seconds without a sign of life from a rank that others wait for, after which they end the run",
        at_least=1,
        ms_swift="18000000",
    )
    shutdown_timeout: int = flag(
        0,
        "seconds that the processes of a run of several may take to end after SIGTERM or Ctrl-C (the step in hand, a "
        "save) before they are killed; 0: as long as they make progress (--step_timeout)",
        at_least=0,
    )
