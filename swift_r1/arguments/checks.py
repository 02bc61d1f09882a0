"""Faults of `swift rlhf` arguments taken together: pure functions, each yields `Fault`s.

A value that no branch would read is refused: a flag that does nothing misleads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from swift_r1.arguments.parser import Fault
from swift_r1.arguments.world import World
from swift_r1.errors import UsageError

if TYPE_CHECKING:
    from swift_r1.arguments.rlhf import RlhfArguments

DEEPSPEED_NAMES = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_SCHEDULER_KWARGS = {
    "cosine": {"num_cycles"},
    "cosine_with_min_lr": {"num_cycles", "min_lr", "min_lr_rate"},
    "cosine_with_restarts": {"num_cycles"},
    "inverse_sqrt": {"timescale"},
    "polynomial": {"lr_end", "power"},
}


def rollout_faults(args: RlhfArguments, given: frozenset[str]) -> Iterator[Fault]:
    """Where completions come from, and how they are sampled."""
    server_flags = ("vllm_mode", "vllm_server_host", "vllm_server_port", "vllm_server_base_url", "vllm_server_timeout")
    if not args.use_vllm:
        unused = [
            f"--{name}"
            for name in (*server_flags, "weight_transport", "weight_check_steps", "api_key")
            if name in given
        ]
        if unused:
            yield Fault(
                f"{', '.join(unused)} {'has' if len(unused) == 1 else 'have'} no effect without --use_vllm true",
                ("use_vllm",),
            )
    elif args.vllm_server_base_url is None and args.vllm_server_host is None:
        yield Fault(
            "--use_vllm true needs --vllm_server_host (and --vllm_server_port) or --vllm_server_base_url",
            ("vllm_server_host", "vllm_server_base_url", "use_vllm"),
        )
    elif args.vllm_server_base_url is not None:
        if "vllm_server_host" in given or "vllm_server_port" in given:
            yield Fault("give either --vllm_server_base_url or --vllm_server_host/--vllm_server_port, not both")
        if not args.vllm_server_base_url.startswith(("http://", "https://")):
            yield Fault(f"--vllm_server_base_url must begin with http:// or https://: {args.vllm_server_base_url!r}")
    bias = "the rollouts' log-probs would not be the trainer's and every importance ratio would be biased"
    if args.top_p != 1.0:
        yield Fault(f"--top_p {args.top_p:g} is refused: {bias}; leave it at 1.0", ("top_p",))
    if args.top_k != -1:
        yield Fault(f"--top_k {args.top_k} is refused: {bias}; leave it at -1", ("top_k",))
    if "" in args.stop_words:
        yield Fault("--stop_words holds an empty string, which would end every completion at once", ("stop_words",))


def round_faults(args: RlhfArguments, given: frozenset[str], world: World) -> Iterator[Fault]:
    """The arithmetic of a round: completions, groups, micro-batches."""
    names = (
        "generation_batch_size",
        "steps_per_generation",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "num_generations",
    )
    if args.generation_batch_size is not None and args.steps_per_generation is not None:
        yield Fault("give either --generation_batch_size or --steps_per_generation, not both", names)
        return
    micro_batch = args.per_device_train_batch_size * world.size
    across = f"per_device_train_batch_size {args.per_device_train_batch_size} x {world.size} processes"
    accumulation = args.gradient_accumulation_steps
    if args.generation_batch_size is not None:
        if args.generation_batch_size % micro_batch:
            near = _near_multiples(args.generation_batch_size, micro_batch)
            yield Fault(
                f"--generation_batch_size {args.generation_batch_size} is no multiple of {micro_batch} ({across}): "
                f"{near}",
                names,
            )
            return
        micro_batches = args.generation_batch_size // micro_batch
    else:
        micro_batches = args.steps_per_generation or accumulation
    if micro_batches % accumulation:
        yield Fault(
            f"{micro_batches} micro-batches are generated at once, which is no multiple of "
            f"--gradient_accumulation_steps {accumulation}: {_near_multiples(micro_batches, accumulation)} "
            "for --steps_per_generation",
            names,
        )
        return
    completions = micro_batch * micro_batches
    if completions % args.num_generations:
        yield Fault(
            f"a round of {completions} completions ({across} x {micro_batches} micro-batches) does not divide into "
            f"groups of --num_generations {args.num_generations}: change --per_device_train_batch_size, "
            "--steps_per_generation, --gradient_accumulation_steps or --num_generations so that it does",
            names,
        )


def loss_faults(args: RlhfArguments, given: frozenset[str]) -> Iterator[Fault]:
    """Values that the chosen loss or estimator does not read."""
    taus = ("tau_pos", "tau_neg")
    unread = {"cispo": ("epsilon", "delta", *taus), "sapo": ("epsilon", "epsilon_high", "delta")}
    for name in unread.get(args.loss_type, taus):
        if name in given and getattr(args, name) is not None:
            yield Fault(f"--{name} has no effect with --loss_type {args.loss_type}: leave it out", ("loss_type", name))
    clip_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if args.loss_type not in unread and args.delta is not None and args.delta <= 1 + clip_high:
        yield Fault(
            f"--delta {args.delta:g} is not above 1 + epsilon_high = {1 + clip_high:g}: it would not bound negative "
            "advantages but clip positive ones, which is what --epsilon_high does",
            ("delta", "epsilon", "epsilon_high"),
        )
    estimator = args.advantage_estimator
    if estimator.startswith("reinforce_plus_plus") and "scale_rewards" in given and args.scale_rewards == "group":
        yield Fault(
            f"--scale_rewards group has no effect with --advantage_estimator {estimator}, which normalises over "
            "the batch: use batch or none",
            ("scale_rewards", "advantage_estimator"),
        )
    if "rollout_importance_sampling_threshold" in given and args.rollout_importance_sampling_mode is None:
        yield Fault("--rollout_importance_sampling_threshold has no effect without --rollout_importance_sampling_mode")
    if args.dynamic_sample and estimator == "reinforce_plus_plus":
        yield Fault(
            "--dynamic_sample true makes no sense with --advantage_estimator reinforce_plus_plus, whose baseline is "
            "the batch: groups of equal rewards teach there too",
            ("dynamic_sample", "advantage_estimator"),
        )
    elif "max_resample_times" in given and not args.dynamic_sample:
        yield Fault("--max_resample_times has no effect without --dynamic_sample true")
    longest = (args.max_length or 0) + args.max_completion_length
    if args.max_tokens_per_micro_batch is not None and args.max_tokens_per_micro_batch < longest:
        yield Fault(
            f"--max_tokens_per_micro_batch {args.max_tokens_per_micro_batch} is less than one completion may take with "
            f"its prompt: {longest} tokens (--max_length and --max_completion_length)",
            ("max_tokens_per_micro_batch",),
        )


def reference_faults(args: RlhfArguments, given: frozenset[str]) -> Iterator[Fault]:
    """What is done with the reference policy needs one."""
    for name in ("kl_in_reward", "sync_ref_model"):
        if getattr(args, name) and args.beta == 0:
            yield Fault(f"--{name} true has no effect without a KL: give --beta above 0", (name, "beta"))
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


def reward_faults(args: RlhfArguments, given: frozenset[str]) -> Iterator[Fault]:
    """Names and weights of the reward functions."""
    if not args.reward_funcs and not args.use_gym_env and args.command == "rlhf":
        yield Fault(
            "--reward_funcs is missing: names of reward functions; their weighted sum is the reward", ("reward_funcs",)
        )
    if args.reward_weights is not None and len(args.reward_weights) != len(args.reward_names):
        yield Fault(
            f"--reward_weights has {len(args.reward_weights)} values for {len(args.reward_names)} reward functions: "
            "give one weight a function, in their order",
            ("reward_weights", "reward_funcs"),
        )
    if args.reward_api is None and "api" in args.reward_funcs:
        yield Fault("--reward_funcs api needs --reward_api URL", ("reward_funcs", "reward_api"))
    elif args.reward_api is not None and "api" not in args.reward_funcs:
        yield Fault("--reward_api has no effect without api among --reward_funcs", ("reward_funcs", "reward_api"))
    elif args.reward_api is not None and not args.reward_api.startswith(("http://", "https://")):
        yield Fault(f"--reward_api must begin with http:// or https://: {args.reward_api!r}")
    if args.truncated_reward is not None and args.missing_eos_penalty is not None:
        yield Fault("give either --truncated_reward or --missing_eos_penalty, not both")
    if args.multi_objective_aggregation == "normalize_then_sum":
        for name in ("truncated_reward", "missing_eos_penalty"):
            if getattr(args, name) is not None:
                yield Fault(
                    f"--{name} is on the scale of the rewards, which --multi_objective_aggregation "
                    "normalize_then_sum takes away: leave one of them out",
                    ("multi_objective_aggregation", name),
                )
        if "scale_rewards" in given and args.scale_rewards == "group":
            yield Fault(
                "--scale_rewards group would scale each group twice with --multi_objective_aggregation "
                "normalize_then_sum: use batch (GDPO) or none",
                ("scale_rewards", "multi_objective_aggregation"),
            )
    if args.reward_isolation == "inline":
        for name in ("reward_num_workers", "reward_memory_limit", "reward_env"):
            if name in given:
                yield Fault(f"--{name} has no effect with --reward_isolation inline", ("reward_isolation", name))
    twice = sorted({name for name in args.reward_funcs if args.reward_funcs.count(name) > 1})
    if twice:
        yield Fault(f"--reward_funcs names {', '.join(twice)} twice: use --reward_weights to count one more")


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
    if args.lr_scheduler_type == "cosine_with_min_lr" and not {"min_lr", "min_lr_rate"} & set(args.lr_scheduler_kwargs):
        yield Fault(
            "--lr_scheduler_type cosine_with_min_lr needs the minimum: "
            "--lr_scheduler_kwargs '{\"min_lr_rate\": 0.1}' (or min_lr)",
            ("lr_scheduler_type", "lr_scheduler_kwargs"),
        )


def process_faults(args: RlhfArguments, given: frozenset[str], world: World) -> Iterator[Fault]:
    """DeepSpeed and the number of processes."""
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


def template_faults(args: Any) -> Iterator[Fault]:
    """A `--prompt_template` that is none, or that leaves `--enable_thinking` unread."""
    if args.prompt_template is not None:
        from swift_r1.data.prompt_templates import TEMPLATES, prompt_template

        if args.prompt_template in TEMPLATES and args.enable_thinking is not None:
            yield Fault(
                f"--enable_thinking has no effect with --prompt_template {args.prompt_template}", ("enable_thinking",)
            )
        try:
            prompt_template(args.prompt_template)
        except UsageError as error:
            yield Fault(str(error), ("prompt_template",))


def data_faults(args: RlhfArguments, given: frozenset[str]) -> Iterator[Fault]:
    """Data flags that go together, or that nothing would read."""
    if args.streaming:
        if args.max_steps <= 0:
            yield Fault("--streaming true needs --max_steps: how long streamed data is, is not known", ("max_steps",))
        if args.split_dataset_ratio:
            yield Fault("--streaming true cannot split rows off: give --val_dataset", ("split_dataset_ratio",))
        for name in ("dataset_num_proc", "load_from_cache_file"):
            if name in given:
                yield Fault(f"--{name} has no effect with --streaming true: rows are prepared as they come", (name,))
    elif "shuffle_buffer_size" in given:
        yield Fault("--shuffle_buffer_size has no effect without --streaming true", ("shuffle_buffer_size",))
    if args.streaming and "shuffle_buffer_size" in given and not args.dataset_shuffle:
        yield Fault("--shuffle_buffer_size has no effect with --dataset_shuffle false", ("shuffle_buffer_size",))
    yield from template_faults(args)
    if args.truncation_strategy != "delete" and args.max_length is None:
        yield Fault(
            f"--truncation_strategy {args.truncation_strategy} has no effect without --max_length",
            ("truncation_strategy",),
        )


def best_checkpoint_faults(args: RlhfArguments, given: frozenset[str]) -> Iterator[Fault]:
    """The metric that checkpoints are compared by must be there at every save."""
    name = args.metric_for_best_model
    if name is None:
        if "greater_is_better" in given:
            yield Fault("--greater_is_better has no effect without --metric_for_best_model", ("metric_for_best_model",))
        return
    known = ["accuracy", "reward", *(f"rewards/{reward}/mean" for reward in args.reward_names)]
    if name not in known:
        yield Fault(f"--metric_for_best_model {name}: it must be one of {', '.join(known)}", ("reward_funcs",))
    if args.eval_unit == "rollout":
        yield Fault("--metric_for_best_model needs --eval_unit step", ("eval_unit",))
    elif args.eval_steps is None or args.save_steps % args.eval_steps:
        yield Fault(
            f"--metric_for_best_model needs an evaluation at every save: --save_steps {args.save_steps} must be a "
            f"multiple of --eval_steps{'' if args.eval_steps is None else f' {args.eval_steps}'}",
            ("eval_steps", "save_steps"),
        )


def evaluation_faults(args: RlhfArguments, given: frozenset[str]) -> Iterator[Fault]:
    """Flags of evaluation need evaluation to happen."""
    if args.eval_steps is None and not args.eval_on_start:
        names = (
            "val_dataset",
            "split_dataset_ratio",
            "per_device_eval_batch_size",
            "eval_limit",
            "eval_unit",
            "eval_datasets",
            "num_generations_eval",
            "eval_temperature",
            "eval_top_p",
            "eval_max_completion_length",
        )
        unused = [f"--{name}" for name in names if name in given and getattr(args, name) not in ([], 0.0)]
        if unused:
            verb = "has" if len(unused) == 1 else "have"
            yield Fault(f"{', '.join(unused)} {verb} no effect without --eval_steps (or --eval_on_start true)")
    if args.val_dataset and args.split_dataset_ratio:
        yield Fault("give either --val_dataset or --split_dataset_ratio, not both")
    if "eval_unit" in given and args.eval_steps is None:
        yield Fault("--eval_unit has no effect without --eval_steps", ("eval_steps", "eval_unit"))
    try:
        args.eval_tasks()
    except UsageError as error:
        yield from (Fault(fault, ("eval_datasets", "prompt_template")) for fault in error.faults)


def output_faults(args: RlhfArguments, given: frozenset[str]) -> Iterator[Fault]:
    """Trackers."""
    if "none" in args.report_to and len(args.report_to) > 1:
        yield Fault("--report_to none cannot be combined with other trackers", ("report_to",))
    if args.run_name is not None and not {"wandb", "swanlab"} & set(args.report_to):
        yield Fault("--run_name has no effect without --report_to wandb or swanlab", ("report_to", "run_name"))


def ending_faults(args: RlhfArguments, given: frozenset[str]) -> Iterator[Fault]:
    """How a run ends early and goes on."""
    if args.max_runtime is not None and not (_DURATION.fullmatch(args.max_runtime) and seconds_of(args.max_runtime)):
        yield Fault(f"--max_runtime {args.max_runtime}: wants a time like 90s, 45m, 2h or 1d", ("max_runtime",))
    if "resume_force" in given and args.resume_from_checkpoint is None:
        yield Fault("--resume_force has no effect without --resume_from_checkpoint", ("resume_force",))
    if args.deterministic and args.use_vllm:
        yield Fault(
            "--deterministic true cannot be promised with --use_vllm true: vLLM's numbers depend on what it computes "
            "at the same time; leave one of them out",
            ("deterministic", "use_vllm"),
        )


def seconds_of(duration: str) -> float:
    """A time like 90s, 45m, 2h or 1d in seconds; a number alone is in seconds."""
    match = _DURATION.fullmatch(duration)
    assert match is not None
    return float(match[1]) * _UNITS[match[2]]


def _near_multiples(value: int, divisor: int) -> str:
    below = value // divisor * divisor
    return f"use {below} or {below + divisor}" if below else f"use {below + divisor}"
