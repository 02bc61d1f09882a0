"""Faults of `swift rlhf` arguments taken together: pure functions, each yields `Fault`s.

A value that no branch would read is refused: a flag that does nothing misleads.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from swift_r1.arguments.parser import Fault
from swift_r1.arguments.world import World

if TYPE_CHECKING:
    from swift_r1.arguments.rlhf import RlhfArguments

_COLOCATE_FLAGS = ("vllm_max_model_len", "vllm_enforce_eager", "vllm_gpu_memory_utilization", "vllm_engine_kwargs")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def rollout_faults(args: RlhfArguments, given: frozenset[str]) -> Iterator[Fault]:
    """Where completions come from, and how they are sampled."""
    server_flags = ("vllm_mode", "vllm_server_host", "vllm_server_port", "vllm_server_base_url", "vllm_server_timeout")
    if not args.use_vllm:
        unused = [
            f"--{name}"
            for name in (*server_flags, "weight_transport", "weight_delta", "weight_check_steps", "api_key")
            if name in given
        ]
        if unused:
            yield Fault(
                f"{', '.join(unused)} {'has' if len(unused) == 1 else 'have'} no effect without --use_vllm true",
                ("use_vllm",),
            )
    elif args.colocates:
        yield from _colocate_faults(args, given, server_flags[1:4])
    else:
        yield from _server_faults(args, given)
    yield from _sleep_faults(args)
    if not args.colocates and (unused := [f"--{name}" for name in _COLOCATE_FLAGS if name in given]):
        yield Fault(
            f"{', '.join(unused)}: for --vllm_mode colocate alone; give them to `swift rollout`",
            ("vllm_mode", "use_vllm"),
        )
    if args.top_k == 0:
        yield Fault("--top_k 0 leaves no token to sample: -1 is off", ("top_k",))
    if args.cuts_sampling and args.rollout_importance_sampling_mode is not None:
        mode = args.rollout_importance_sampling_mode
        if mode.startswith("sequence"):
            yield Fault(
                f"--rollout_importance_sampling_mode {mode} with --top_p or --top_k would weigh a completion by how "
                "much of the distribution was cut at each of its tokens: use token_truncate",
                ("rollout_importance_sampling_mode", "top_p", "top_k"),
            )
    if "" in args.stop_words:
        yield Fault("--stop_words holds an empty string, which would end every completion at once", ("stop_words",))


def _sleep_faults(args: RlhfArguments) -> Iterator[Fault]:
    """Engine and trainer take turns only where they share a device, and only the engine's sleep makes room."""
    if args.sleep_level and not args.colocates:
        yield Fault(
            f"--sleep_level {args.sleep_level} is for --use_vllm true --vllm_mode colocate alone: an engine of its own "
            "device need not sleep",
            ("sleep_level", "vllm_mode", "use_vllm"),
        )
    for name in ("offload_model", "offload_optimizer"):
        if getattr(args, name) and not args.sleep_level:
            yield Fault(
                f"--{name} true makes room for nobody without --sleep_level 1 or 2 (and --vllm_mode colocate, on a "
                "GPU): an engine that never sleeps has all its memory already",
                (name, "sleep_level", "vllm_mode"),
            )
    if args.offload_optimizer and args.optim.startswith("paged"):
        yield Fault(
            f"--offload_optimizer true with --optim {args.optim}, whose moments move between GPU and host by "
            "themselves: leave one out",
            ("offload_optimizer", "optim"),
        )


def _colocate_faults(args: RlhfArguments, given: frozenset[str], addresses: tuple[str, ...]) -> Iterator[Fault]:
    """What engines of the run's own cannot do."""
    unused = [f"--{name}" for name in (*addresses, "api_key") if name in given]
    if unused:
        yield Fault(
            f"{', '.join(unused)}: --vllm_mode colocate starts engines of its own, which have addresses and a key "
            "already; use --vllm_mode server",
            ("vllm_mode",),
        )
    if args.async_generate and args.max_staleness:
        yield Fault(
            "--async_generate true gains nothing with --vllm_mode colocate, where engine and trainer share a device: "
            "use --vllm_mode server, or leave it out",
            ("async_generate", "vllm_mode"),
        )
    if args.weight_transport == "nccl":
        yield Fault(
            "--weight_transport nccl is for GPUs of which trainer and engine have one each; with --vllm_mode colocate "
            "use auto",
            ("weight_transport", "vllm_mode"),
        )


def _server_faults(args: RlhfArguments, given: frozenset[str]) -> Iterator[Fault]:
    """Which servers, and how weights go to them."""
    hosts, ports, urls = args.vllm_server_host, args.vllm_server_port, args.vllm_server_base_url
    if not urls and not hosts:
        yield Fault(
            "--use_vllm true needs --vllm_server_host (and --vllm_server_port), --vllm_server_base_url, or --vllm_mode "
            "colocate",
            ("vllm_server_host", "vllm_server_base_url", "use_vllm"),
        )
        return
    if urls and ("vllm_server_host" in given or "vllm_server_port" in given):
        yield Fault("give either --vllm_server_base_url or --vllm_server_host/--vllm_server_port, not both")
    for url in urls:
        if not url.startswith(("http://", "https://")):
            yield Fault(f"--vllm_server_base_url must begin with http:// or https://: {url!r}")
    if not urls and len(hosts) != len(ports) and 1 not in (len(hosts), len(ports)):
        yield Fault(
            f"--vllm_server_host has {len(hosts)} values and --vllm_server_port {len(ports)}: give one port for all "
            "hosts, or one for each",
            ("vllm_server_host", "vllm_server_port"),
        )
        return
    for url, times in Counter(args.rollout_base_urls).items():
        if times > 1:
            yield Fault(f"{url} is named {times} times: each server once", ("vllm_server_base_url", "vllm_server_host"))
    if args.weight_transport == "nccl" and len(args.rollout_base_urls) > 1:
        yield Fault(
            "--weight_transport nccl takes one server: use --vllm_tensor_parallel_size there, or http or shm",
            ("weight_transport",),
        )
    if args.weight_delta == "true" and args.weight_transport in ("shm", "nccl"):
        yield Fault(
            f"--weight_delta true sends changes by http, and --weight_transport is {args.weight_transport}",
            ("weight_delta", "weight_transport"),
        )


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
        micro_batches = args.steps_per_generation or (args.num_mini_batches or 1) * accumulation
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
