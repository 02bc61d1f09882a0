"""Faults of `swift rlhf` arguments taken together that a flag's own limits and scopes do not find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from swift_r1.data.hubs import is_hub_id
from swift_r1.errors import UsageError
from swift_r1.flags.agents import agent_faults
from swift_r1.flags.engine import engine_kwargs_faults
from swift_r1.flags.fields import no_effect
from swift_r1.flags.output import LAST
from swift_r1.flags.rlhf_flags import RlhfFlags
from swift_r1.flags.world import World

NO_REWARD = "--reward_funcs is missing: names of reward functions; their weighted sum is the reward"
NO_SERVER = (
    "--use_vllm true needs --vllm_server_host, --vllm_server_base_url, --vllm_server_file, or --vllm_mode colocate"
)
_CHORD = ("sft_per_device_train_batch_size", "mu_warmup_steps", "mu_decay_steps", "mu_peak", "mu_valley")
_SCHEDULER_KWARGS = {
    "cosine": {"num_cycles"},
    "cosine_with_min_lr": {"num_cycles", "min_lr", "min_lr_rate"},
    "cosine_with_restarts": {"num_cycles"},
    "inverse_sqrt": {"timescale"},
    "polynomial": {"lr_end", "power"},
}


def all_faults(args: RlhfFlags, given: frozenset[str], world: World) -> Iterator[str]:
    """Everything that is wrong with the arguments of `swift rlhf` taken together, scopes aside."""
    yield from algorithm_faults(args, given)
    yield from reward_flag_faults(args, given)
    yield from rollout_faults(args, given)
    yield from agent_faults(args, given)
    if args.colocates:
        yield from _colocate_faults(args, world)
    elif args.use_vllm:
        yield from _server_faults(args)
    yield from round_faults(args, given, world)
    yield from training_faults(args, given, world)
    yield from evaluation_faults(args)
    if "split_dataset_ratio" in given and args.evaluates and not args.split_dataset_ratio + bool(args.val_dataset):
        yield "--split_dataset_ratio 0 leaves no row to evaluate: leave it out, or give --val_dataset"
    yield from data_faults(args)
    if args.push_to_hub and not is_hub_id(args.hub_model_id or ""):
        yield "--push_to_hub true needs --hub_model_id owner/name"


def algorithm_faults(args: RlhfFlags, given: frozenset[str]) -> Iterator[str]:
    """What the loss, the estimator and PPO need of other flags."""
    yield from args.distillation_faults()
    taught = args.teaches_by in ("advantage", "loss", "sdar")
    alone = args.rlhf_type == "grpo" and args.num_generations < 2 and not taught
    if alone and args.advantage_estimator != "reinforce_plus_plus":
        yield (
            f"--num_generations 1 makes every advantage 0 with --advantage_estimator {args.advantage_estimator}, which "
            "compares the completions of a prompt: give 2 or more, or --advantage_estimator reinforce_plus_plus, whose "
            "baseline is the batch"
        )
    if args.rlhf_type == "ppo" and 0 < args.max_steps <= (warmup := args.critic_warmup_steps):
        yield f"--critic_warmup_steps {warmup} leaves the policy no step of --max_steps {args.max_steps}"
    chord = {f"chord_{name}": getattr(args, f"chord_{name}") for name in _CHORD} if args.chord_sft_dataset else {}
    missing = [f"--{name}" for name, value in chord.items() if value is None]
    if missing:
        yield f"--chord_sft_dataset needs {', '.join(missing)}"
    if args.loss_type == "fipo" and args.importance_sampling_level != "token":
        yield "--loss_type fipo weighs tokens by their own ratios: use --importance_sampling_level token"
    clip_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if args.loss_type not in ("cispo", "sapo", "real") and args.delta is not None and args.delta <= 1 + clip_high:
        yield (
            f"--delta {args.delta:g} is not above 1 + epsilon_high = {1 + clip_high:g}: it would not bound negative "
            "advantages but clip positive ones, which is what --epsilon_high does"
        )
    estimator = args.advantage_estimator
    if estimator.startswith("reinforce_plus_plus") and "scale_rewards" in given and args.scale_rewards == "group":
        yield (
            f"--scale_rewards group has no effect with --advantage_estimator {estimator}, which normalises over the "
            "batch: use batch or none"
        )
    if args.dynamic_sample and estimator == "reinforce_plus_plus":
        yield (
            "--dynamic_sample true makes no sense with --advantage_estimator reinforce_plus_plus, whose baseline is "
            "the batch: groups of equal rewards teach there too"
        )
    longest = (args.max_length or 0) + args.max_completion_length
    most = args.max_tokens_per_micro_batch
    if most is not None and most < longest:
        yield (
            f"--max_tokens_per_micro_batch {most} is less than one completion may take with its prompt: {longest} "
            "tokens (--max_length and --max_completion_length)"
        )


def reward_flag_faults(args: RlhfFlags, given: frozenset[str]) -> Iterator[str]:
    """Names and weights of the reward functions, and what some of them need."""
    if not args.reward_names and not args.asks_servers and args.command != "check":
        if args.teaches_by in (None, "rlsd"):
            yield NO_REWARD
        for name, used in (
            ("dynamic_sample", args.dynamic_sample),
            ("prompt_sampler", args.prompt_sampler != "uniform"),
            ("eval_strategy", args.evaluates),
        ):
            if args.teaches_by is not None and used:
                yield f"--{name} goes by the rewards, and a teacher alone gives none: leave it out, or --reward_funcs"
    if args.reward_weights is not None and len(args.reward_weights) != len(args.reward_names):
        yield (
            f"--reward_weights has {len(args.reward_weights)} values for {len(args.reward_names)} reward functions: "
            "give one weight per function, in the order of --reward_funcs"
            + (" and then of --reward_model" if args.reward_model else "")
        )
    for name in ("reward_model_plugin", "reward_adapters", "reward_template"):
        values = getattr(args, name)
        if args.reward_model and values and len(values) != len(args.reward_model):
            yield f"--{name} has {len(values)} values for {len(args.reward_model)} reward models: give one for each"
    if "api" in args.reward_funcs and args.reward_api is None:
        yield "--reward_funcs api needs --reward_api URL"
    if "judge" in args.reward_funcs and args.judge is None:
        yield "--reward_funcs judge needs --judge FILE (docs/rewards.md)"
    if args.normalizes_objectives:
        for name in ("truncated_reward", "missing_eos_penalty"):
            if getattr(args, name) is not None:
                yield (
                    f"--{name} is on the scale of the rewards, which --multi_objective_aggregation "
                    "normalize_then_sum takes away: leave one of them out"
                )
        if "scale_rewards" in given and args.scale_rewards == "group":
            yield (
                "--scale_rewards group would scale each group twice with --multi_objective_aggregation "
                "normalize_then_sum: use batch (GDPO) or none"
            )
    twice = [name for name, times in sorted(Counter(args.reward_funcs).items()) if times > 1]
    if twice:
        yield f"--reward_funcs names {', '.join(twice)} twice: use --reward_weights to count one more"
    if "soft_overlong" in args.reward_funcs:
        longest = args.soft_max_length or args.max_completion_length
        if args.soft_cache_length is None:
            yield "--reward_funcs soft_overlong needs --soft_cache_length"
        elif args.soft_cache_length >= longest:
            yield f"--soft_cache_length {args.soft_cache_length} must be below --soft_max_length {longest}"


def rollout_faults(args: RlhfFlags, given: frozenset[str]) -> Iterator[str]:
    """Where completions come from, how they are sampled, and how far ahead."""
    if args.offload_optimizer and args.optim.startswith("paged"):
        yield (
            f"--offload_optimizer true with --optim {args.optim}, whose moments move between GPU and host by "
            "themselves: leave one out"
        )
    if args.sleep_level and args.async_generate and args.max_staleness:
        yield "--sleep_level with --async_generate true: the engine generates while the trainer trains; leave one out"
    if args.top_k == 0:
        yield "--top_k 0 leaves no token to sample: -1 is off"
    mode = args.rollout_importance_sampling_mode
    otherwise = "--top_p, --top_k, --min_p, --repetition_penalty or --structured_outputs_regex"
    if args.samples_otherwise and mode is not None and mode.startswith("sequence"):
        yield (
            f"--rollout_importance_sampling_mode {mode} with {otherwise} would weigh a completion by how much the "
            "distribution was changed at each of its tokens: use token_truncate"
        )
    if args.samples_otherwise and args.off_policy_sequence_mask_delta is not None:
        yield f"--off_policy_sequence_mask_delta with {otherwise} would take the change of the distribution for drift"
    if args.structured_outputs_regex is not None and not args.use_vllm:
        yield "--structured_outputs_regex needs vLLM (--use_vllm true): the trainer's own engine follows no pattern"
    if args.async_generate and not args.use_vllm:
        yield "--async_generate true needs a `swift rollout` server (--use_vllm true), which generates meanwhile"


def _colocate_faults(args: RlhfFlags, world: World) -> Iterator[str]:
    """The engines beside the ranks."""
    if args.async_generate and args.max_staleness:
        yield (
            "--async_generate true gains nothing with --vllm_mode colocate, where engine and trainer share a device: "
            "use --vllm_mode server, or leave it out"
        )
    if args.weight_transport == "nccl":
        yield "--weight_transport nccl needs a GPU each for trainer and engine: with --vllm_mode colocate use auto"
    if args.weight_transport == "shm" and world.nnodes > 1:
        yield "--weight_transport shm does not reach the engines of other nodes: use auto"
    if world.nproc_per_node % (size := args.vllm_tensor_parallel_size):
        yield (
            f"--vllm_tensor_parallel_size {size} does not divide the {world.nproc_per_node} processes of a machine "
            "(NPROC_PER_NODE): with --vllm_mode colocate each engine has the devices of so many of them"
        )
    if args.vllm_enable_lora and args.sleep_level > 1:
        yield "--sleep_level 2 discards what --vllm_enable_lora true puts adapters over: use --sleep_level 1"
    yield from engine_kwargs_faults(type(args), args.vllm_engine_kwargs)


def _server_faults(args: RlhfFlags) -> Iterator[str]:
    """Which servers, and how weights go to them."""
    hosts = args.vllm_server_host
    ports = args.vllm_server_port
    urls = args.vllm_server_base_url
    if args.weight_delta == "true" and args.weight_transport in ("shm", "nccl"):
        yield f"--weight_delta true sends changes by http, and --weight_transport is {args.weight_transport}"
    if args.weight_fanout and args.weight_transport in ("shm", "nccl"):
        yield f"--weight_fanout is for weights by http, and --weight_transport is {args.weight_transport}"
    if args.vllm_server_file is not None:
        if args.weight_transport == "nccl":
            yield "--weight_transport nccl is between two that stay, and servers of --vllm_server_file come and go"
        if args.sleep_level:
            yield "--sleep_level is for a server that shares the trainer's GPUs: with it give --vllm_server_base_url"
        return
    if not urls and not hosts:
        yield NO_SERVER
        return
    if not urls and len(hosts) != len(ports) and 1 not in (len(hosts), len(ports)):
        yield f"--vllm_server_host has {len(hosts)} values and --vllm_server_port {len(ports)}: one port, or as many"
        return
    for url, times in Counter(args.rollout_base_urls).items():
        if times > 1:
            yield f"{url} is named {times} times: each server once"
    if args.weight_transport == "nccl" and len(args.rollout_base_urls) > 1:
        yield "--weight_transport nccl takes one server: use --vllm_tensor_parallel_size there, or http or shm"


def round_faults(args: RlhfFlags, given: frozenset[str], world: World) -> Iterator[str]:
    """The arithmetic of a round: completions, groups, micro-batches."""
    if args.generation_batch_size is not None and args.steps_per_generation is not None:
        return  # only one of them may be given
    processes = args.counted_for(given, world.size)
    micro_batch = args.per_device_train_batch_size * processes
    across = f"--per_device_train_batch_size {args.per_device_train_batch_size} x {processes} processes"
    accumulation = args.gradient_accumulation_steps
    micro_batches = args.steps_per_generation or args.micro_batches_per_round
    size = args.generation_batch_size
    if size is not None:
        if size % micro_batch:
            near = _near_multiples(size, micro_batch)
            yield f"--generation_batch_size {size} is not a multiple of {micro_batch} ({across}): {near}"
            return
        micro_batches = size // micro_batch
    elif (chosen := args.chosen_accumulation(given, processes)) is not None:
        accumulation = micro_batches = chosen
    if accumulation % micro_batches == 0:  # a part of an optimizer step: all of it is generated at once
        micro_batches = accumulation
    if micro_batches % accumulation:
        yield (
            f"{micro_batches} micro-batches are generated at once, which is not a multiple of "
            f"--gradient_accumulation_steps {accumulation}: {_near_multiples(micro_batches, accumulation)} "
            "for --steps_per_generation"
        )
        return
    completions = micro_batch * micro_batches
    if completions % args.num_generations:
        yield (
            f"a round of {completions} completions ({across} x {micro_batches} micro-batches) does not divide into "
            f"groups of --num_generations {args.num_generations}: change --per_device_train_batch_size, "
            "--steps_per_generation, --gradient_accumulation_steps or --num_generations so that it does"
        )
    elif args.loss_type == "real" and (step := micro_batch * accumulation) % args.num_generations:
        yield (
            f"--loss_type real compares all completions of a prompt, and an optimizer step of {step} ({across} x "
            f"{accumulation} accumulation steps) splits groups of --num_generations {args.num_generations}"
        )


def _near_multiples(value: int, divisor: int) -> str:
    below = value // divisor * divisor
    return f"use {below} or {below + divisor}" if below else f"use {below + divisor}"


def training_faults(args: RlhfFlags, given: frozenset[str], world: World) -> Iterator[str]:
    """What is trained, the learning-rate schedule, and the processes."""
    yield from args.dtype_faults()
    if args.train_type != "full":
        yield from args.adapter_faults(given)
    if args.resume_only_model and args.resume_from_checkpoint == LAST:
        yield "--resume_only_model true begins a new run with a checkpoint's weights: name its folder, not last"
    if args.ref_model is not None and args.ref_adapters:
        yield "give either --ref_model or --ref_adapters, not both"
    if args.max_steps == 0:
        yield "--max_steps 0 trains nothing: -1 means as many as --num_train_epochs says"
    if {"warmup_ratio", "warmup_steps"} <= given and args.warmup_steps:
        yield "give either --warmup_steps or --warmup_ratio, not both"
    kind = args.lr_scheduler_type
    kwargs = args.lr_scheduler_kwargs
    allowed = _SCHEDULER_KWARGS.get(kind, set())
    for name in sorted(set(kwargs) - allowed):
        instead = f" (it takes {', '.join(sorted(allowed))})" if allowed else ""
        yield f"--lr_scheduler_kwargs: {kind} does not take {name!r}{instead}"
    if kind == "polynomial":
        end = kwargs.get("lr_end", 1e-7)
        rates = {"learning_rate": args.peak_learning_rate, "critic_learning_rate": args.critic_learning_rate}
        for name, rate in rates.items():
            if rate is not None and isinstance(end, int | float) and rate <= end:
                yield (
                    f"--{name} {rate:g} is not above the end of --lr_scheduler_type polynomial, {end:g}: "
                    f"give a smaller one, --lr_scheduler_kwargs '{{\"lr_end\": 0}}'"
                )
    if kind == "cosine_with_min_lr" and not {"min_lr", "min_lr_rate"} & set(kwargs):
        yield f"--lr_scheduler_type {kind} needs the minimum: --lr_scheduler_kwargs '{{\"min_lr_rate\": 0.1}}'"
    if world.size == 1:
        alone = ["shutdown_timeout"] if args.distributed else ["shutdown_timeout", "ddp_timeout", "ddp_backend"]
        unused = [name for name in alone if name in given]
        if unused:
            yield no_effect(unused, "on one process: leave it out")
    if world.size % (spread := args.sequence_parallel_size):
        yield (
            f"--sequence_parallel_size {spread} does not divide the number of processes, {world.size}: set "
            f"NPROC_PER_NODE to a multiple of {spread}"
        )


def evaluation_faults(args: RlhfFlags) -> Iterator[str]:
    """What is evaluated, and the metric that checkpoints are compared by, which must be there at every save."""
    try:
        args.eval_tasks()
    except UsageError as error:
        yield from error.faults
    name = args.metric_for_best_model
    if name is None:
        return
    known = ["accuracy", "reward", *(f"rewards/{reward}/mean" for reward in args.reward_names)]
    if name not in known:
        yield f"--metric_for_best_model {name}: it must be one of {', '.join(known)}"
    if args.eval_unit == "rollout":
        yield "--metric_for_best_model needs --eval_unit step"
    elif args.save_strategy == "no":
        yield "--metric_for_best_model compares checkpoints, and with --save_strategy no there is one"
    elif args.save_strategy == "epoch":
        if args.evaluation != "epoch":
            yield "--metric_for_best_model needs --eval_strategy epoch with --save_strategy epoch"
    elif args.evaluation != "steps" or args.save_steps % (args.eval_steps or args.save_steps):
        yield (
            f"--metric_for_best_model needs an evaluation at every save: --save_steps {args.save_steps} must be a "
            f"multiple of --eval_steps{'' if args.eval_steps is None else f' {args.eval_steps}'}"
        )


def data_faults(args: RlhfFlags) -> Iterator[str]:
    """Data, trackers, and what a run promises."""
    if args.streaming and args.max_steps <= 0:
        yield "--streaming true needs --max_steps: the length of streamed data is not known"
    for name, strategy in (("save", args.save_strategy), ("eval", args.evaluation)):
        if args.streaming and strategy == "epoch":
            yield f"--{name}_strategy epoch with --streaming true, where passes are not counted: use steps"
    shares = args.interleave_prob
    if shares is not None:
        if len(shares) != len(args.dataset):
            yield f"--interleave_prob has {len(shares)} values for {len(args.dataset)} data sets: give one each"
        elif abs(sum(shares) - 1) > 1e-6:
            yield f"--interleave_prob {' '.join(map(str, shares))} must add up to 1"
        if not args.dataset_shuffle and not args.streaming:
            yield "--interleave_prob mixes loaded rows by shuffling them: leave --dataset_shuffle true"
    if args.streaming and args.max_epochs:
        yield "--max_epochs with --streaming true, where passes are not counted: give --max_steps alone"
    if args.streaming and args.split_dataset_ratio:
        yield "--streaming true cannot split rows off: give --val_dataset"
    if "none" in args.report_to and len(args.report_to) > 1:
        yield "--report_to none cannot be combined with other trackers"
    if args.deterministic and args.use_vllm:
        yield (
            "--deterministic true cannot be promised with --use_vllm true: vLLM's numbers depend on what it computes "
            "at the same time; leave one of them out"
        )
