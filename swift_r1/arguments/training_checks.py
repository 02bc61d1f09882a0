"""Faults of arguments about what is trained, how, and by how many processes; as `checks.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from swift_r1.arguments.parser import Fault
from swift_r1.arguments.world import World

if TYPE_CHECKING:
    from swift_r1.arguments.rlhf import RlhfArguments

DEEPSPEED_NAMES = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
_SCHEDULER_KWARGS = {
    "cosine": {"num_cycles"},
    "cosine_with_min_lr": {"num_cycles", "min_lr", "min_lr_rate"},
    "cosine_with_restarts": {"num_cycles"},
    "inverse_sqrt": {"timescale"},
    "polynomial": {"lr_end", "power"},
}


_NEED_REFERENCE = ("kl_in_reward", "sync_ref_model", "offload_ref_model")


def reference_faults(args: RlhfArguments, given: frozenset[str]) -> Iterator[Fault]:
    """What is done with the reference policy needs one."""
    kl = "kl_coef" if args.rlhf_type == "ppo" else "beta"
    # In PPO the KL is always in the reward, and the flag is refused as such.
    names = ("sync_ref_model", "offload_ref_model") if args.rlhf_type == "ppo" else _NEED_REFERENCE
    for name in names:
        if getattr(args, name) and not args.wants_reference:
            yield Fault(f"--{name} true has no effect without a KL: give --{kl} above 0", (name, kl))
    for name in ("ref_model_sync_steps", "ref_model_mixup_alpha"):
        if name in given and not args.sync_ref_model:
            yield Fault(f"--{name} has no effect without --sync_ref_model true", (name, "sync_ref_model"))


def tuner_faults(args: RlhfArguments, given: frozenset[str]) -> Iterator[Fault]:
    """What is trained, and the flags that only adapters, or only full training, read."""
    kind = args.train_type
    if kind != "full":
        if args.sync_ref_model:
            yield Fault(
                f"--sync_ref_model true has nothing to move with --train_type {kind}: the reference is the model "
                "without its adapters",
                ("sync_ref_model", "train_type"),
            )
        if args.offload_ref_model:
            yield Fault(
                f"--offload_ref_model true has nothing to move with --train_type {kind}: the reference is the model "
                "without its adapters",
                ("offload_ref_model", "train_type"),
            )
        if not args.target_modules:
            yield Fault(
                "--target_modules names no module to adapt: all-linear means every linear one", ("target_modules",)
            )
    flags = {
        "lora": ("lora_rank", "lora_alpha", "target_modules", "quant_bits"),
        "full": ("freeze_parameters", "freeze_parameters_regex", "freeze_parameters_ratio", "trainable_parameters"),
        "qlora": ("quant_method", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
    }
    read = {"full": ("full",), "lora": ("lora", "qlora") if args.quant_bits else ("lora",), "qlora": ("lora", "qlora")}
    for wanted, names in flags.items():
        unused = [f"--{name}" for name in names if name in given]
        if unused and wanted not in read[kind]:
            verb = "has" if len(unused) == 1 else "have"
            yield Fault(
                f"{', '.join(unused)} {verb} no effect with --train_type {kind}: use {wanted}",
                (*(name.lstrip("-") for name in unused), "train_type"),
            )
    if args.trainable_parameters and not (
        args.freeze_parameters or args.freeze_parameters_regex or args.freeze_parameters_ratio
    ):
        yield Fault("--trainable_parameters has no effect where nothing is frozen", ("trainable_parameters",))
    if args.freeze_parameters_regex is not None:
        try:
            re.compile(args.freeze_parameters_regex)
        except re.error as error:
            yield Fault(f"--freeze_parameters_regex {args.freeze_parameters_regex}: no pattern ({error})")


def optimizer_faults(args: RlhfArguments, given: frozenset[str]) -> Iterator[Fault]:
    """Flags that the chosen optimizer does not read."""
    unused = [f"--{name}" for name in ("adam_beta1", "adam_beta2", "adam_epsilon") if name in given]
    if unused and args.optim == "sgd":
        verb = "has" if len(unused) == 1 else "have"
        yield Fault(f"{', '.join(unused)} {verb} no effect with --optim sgd", ("optim",))


def schedule_faults(args: RlhfArguments, given: frozenset[str]) -> Iterator[Fault]:
    """Steps, warm-up and learning-rate schedule."""
    if args.max_steps == 0:
        yield Fault("--max_steps 0 trains nothing: -1 means as many as --num_train_epochs says", ("max_steps",))
    if {"warmup_ratio", "warmup_steps"} <= given and args.warmup_steps:
        yield Fault("give either --warmup_steps or --warmup_ratio, not both", ("warmup_ratio", "warmup_steps"))
    if args.lr_scheduler_type == "constant":
        for name in ("warmup_ratio", "warmup_steps"):
            if name in given and getattr(args, name):
                yield Fault(
                    f"--{name} has no effect with --lr_scheduler_type constant: use constant_with_warmup",
                    ("lr_scheduler_type", name),
                )
    allowed = _SCHEDULER_KWARGS.get(args.lr_scheduler_type, set())
    for name in sorted(set(args.lr_scheduler_kwargs) - allowed):
        yield Fault(
            f"--lr_scheduler_kwargs: {args.lr_scheduler_type} does not take {name!r}"
            + (f" (it takes {', '.join(sorted(allowed))})" if allowed else ""),
            ("lr_scheduler_type", "lr_scheduler_kwargs"),
        )
    if args.lr_scheduler_type == "polynomial":
        end = args.lr_scheduler_kwargs.get("lr_end", 1e-7)
        rates = {"learning_rate": args.peak_learning_rate, "critic_learning_rate": args.critic_learning_rate}
        for name, rate in rates.items():
            if rate is not None and isinstance(end, int | float) and rate <= end:
                yield Fault(
                    f"--{name} {rate:g} is not above the end of --lr_scheduler_type polynomial, {end:g}: "
                    f"give a smaller one, --lr_scheduler_kwargs '{{\"lr_end\": 0}}'",
                    (name, "lr_scheduler_kwargs"),
                )
    if args.lr_scheduler_type == "cosine_with_min_lr" and not {"min_lr", "min_lr_rate"} & set(args.lr_scheduler_kwargs):
        yield Fault(
            "--lr_scheduler_type cosine_with_min_lr needs the minimum: "
            "--lr_scheduler_kwargs '{\"min_lr_rate\": 0.1}' (or min_lr)",
            ("lr_scheduler_type", "lr_scheduler_kwargs"),
        )


def process_faults(args: RlhfArguments, given: frozenset[str], world: World) -> Iterator[Fault]:
    """DeepSpeed and the number of processes."""
    if args.colocates and world.nnodes > 1:
        yield Fault(
            "--vllm_mode colocate is for one machine: use `swift rollout` servers (--vllm_mode server) with several",
            ("vllm_mode",),
        )
    if world.size == 1 and "shutdown_timeout" in given:
        yield Fault("--shutdown_timeout has no effect on one process: leave it out")
    if args.deepspeed is None:
        if world.size > 1:
            yield Fault(
                f"{world.size} processes (NPROC_PER_NODE={world.nproc_per_node}, NNODES={world.nnodes}) need "
                "--deepspeed, for example --deepspeed zero2; without it this version trains in one process",
                ("deepspeed",),
            )
        if "ddp_timeout" in given:
            yield Fault("--ddp_timeout has no effect without --deepspeed: leave it out", ("deepspeed",))
        return
    text = args.deepspeed.strip()
    if text.startswith("{"):
        try:
            json.loads(text)
        except json.JSONDecodeError as error:
            yield Fault(f"--deepspeed holds JSON that is not valid: {error.msg} at {error.pos}")
    elif text not in DEEPSPEED_NAMES and not text.endswith(".json"):
        yield Fault(f"--deepspeed must be one of {', '.join(DEEPSPEED_NAMES)}, a .json file or JSON, not {text!r}")
