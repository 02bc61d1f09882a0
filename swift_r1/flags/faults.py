"""What flags of several groups do not mean together: each function yields one sentence for each fault of a run's flags."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields

from swift_r1.algorithms.methods import ESTIMATORS, LOSSES
from swift_r1.data.hubs import is_hub_id
from swift_r1.errors import UsageError
from swift_r1.flags.algorithm import ChordArguments
from swift_r1.flags.batch import LEAST_BATCH, MOST_TIMES, near_multiples, whole_groups
from swift_r1.flags.engine import engine_kwargs_faults
from swift_r1.flags.fields import doubled_flags, no_effect, unread_flags
from swift_r1.flags.output import LAST
from swift_r1.flags.reward import NO_REWARD
from swift_r1.flags.run import RunFlags
from swift_r1.flags.world import World

_WITHOUT_IMAGES = (
    "leave them out, or rename the column to keep it for the rewards "
    '(--columns \'{"images": "..."}\')'
)
_SCHEDULER_KWARGS = {
    "cosine": {"num_cycles"},
    "cosine_with_min_lr": {"num_cycles", "min_lr", "min_lr_rate"},
    "cosine_with_restarts": {"num_cycles"},
    "inverse_sqrt": {"timescale"},
    "polynomial": {"lr_end", "power"},
}
_ITS_OWN = frozenset(("dataset", "val_dataset", "eval_datasets"))


def algorithm_faults(args: RunFlags, given: frozenset[str]) -> Iterator[str]:
    """Yields what the loss, the estimator, PPO and CHORD need of other flags."""
    loss = LOSSES[args.loss_type]
    estimator = ESTIMATORS[args.advantage_estimator]
    needs_groups = args.rlhf_type == "grpo" and estimator.baseline == "group"
    if needs_groups and args.num_generations < 2 and not args.teaches_tokens:
        yield (
            f"--num_generations 1 makes every advantage 0 with --advantage_estimator {estimator.name}, which "
            "compares the completions of a prompt: give 2 or more, or --advantage_estimator reinforce_plus_plus, whose "
            "baseline is the batch"
        )
    warmup = args.critic_warmup_steps
    if args.rlhf_type == "ppo" and 0 < args.max_steps <= warmup:
        yield f"--critic_warmup_steps {warmup} leaves the policy no step of --max_steps {args.max_steps}"
    chord = (
        [item.name for item in fields(ChordArguments) if item.default is None]
        if args.chord_sft_dataset
        else []
    )
    missing = [f"--{name}" for name in chord if getattr(args, name) is None]
    if missing:
        yield f"--chord_sft_dataset needs {', '.join(missing)}"
    if loss.ratio_of_tokens and args.importance_sampling_level != "token":
        yield f"{loss.chosen_by} weighs tokens by their own ratios: use --importance_sampling_level token"
    one_step = (
        args.generation_batch_size is None
        and args.micro_batches_per_round == args.gradient_accumulation_steps
        and args.num_iterations == 1
    )
    if loss.from_second and args.rlhf_type == "grpo" and one_step:
        yield (
            f"{loss.chosen_by} acts from a round's second optimizer step on, and rounds have one: give --num_iterations "
            "or --steps_per_generation"
        )
    mode = args.router_replay_mode
    if mode == "R2" and one_step and args.num_mini_batches in (None, 1):
        yield (
            "--router_replay_mode R2 acts from a round's second optimizer step on, and rounds have one: give "
            "--num_iterations or --steps_per_generation, or R3"
        )
    if mode == "R2" and args.sequence_parallel_size > 1:
        yield (
            "--router_replay_mode R2 with --sequence_parallel_size: the experts of a row's parts are not gathered; R3 is "
            "possible"
        )
    clip_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if "delta" in loss.reads and args.delta is not None and args.delta <= 1 + clip_high:
        yield (
            f"--delta {args.delta:g} is not above 1 + epsilon_high = {1 + clip_high:g}: it would not bound negative "
            "advantages but clip positive ones, which is what --epsilon_high does"
        )
    if estimator.over_batch and "scale_rewards" in given and args.scale_rewards == "group":
        yield (
            f"--scale_rewards group has no effect with --advantage_estimator {estimator.name}, which normalises over "
            "the batch: use batch or none"
        )
    if estimator.of_tokens is not None:
        method = args.distillation
        for other, clashes in (
            (loss.chosen_by, loss.labels is not None),
            (
                method.chosen_by if method is not None and method.flag else "--teacher_model",
                method is not None and method.advantages is not None,
            ),
            (
                f"--scale_rewards {args.scale_rewards}",
                "scale_rewards" in given and args.scale_rewards != "none",
            ),
        ):
            if clashes:
                yield f"{estimator.chosen_by} gives each token an advantage of its own: {other} does not go with it"
    if args.dynamic_sample and estimator.baseline == "batch":
        yield (
            f"--dynamic_sample true makes no sense with --advantage_estimator {estimator.name}, whose baseline is "
            "the batch: groups of equal rewards teach there too"
        )


def reward_faults(args: RunFlags, given: frozenset[str]) -> Iterator[str]:
    """Names and weights of the reward functions, and what some of them need."""
    if not args.reward_names and not args.asks_servers and args.command != "check":
        method = args.distillation
        if method is None or method.needs_rewards:
            yield NO_REWARD
        for name, used in (
            ("dynamic_sample", args.dynamic_sample),
            ("prompt_sampler", args.prompt_sampler != "uniform"),
            ("eval_strategy", args.evaluates),
        ):
            if method is not None and used:
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


def rollout_faults(args: RunFlags) -> Iterator[str]:
    """Yields what does not go together of where completions come from, how they are sampled, and how far ahead."""
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
    if args.batch_invariant and not args.use_vllm:
        yield from _invariance_faults(args, otherwise)
    if args.async_generate and not args.use_vllm:
        yield "--async_generate true needs a `swift rollout` server (--use_vllm true), which generates meanwhile"


def _invariance_faults(args: RunFlags, otherwise: str) -> Iterator[str]:
    """Yields what makes log-probs of the trainer others than those of its own engine, whose bits are to be the same."""
    if args.samples_otherwise:
        yield f"--batch_invariant true with {otherwise}: completions have other log-probs than the policy's"
    if args.lora_dropout:
        yield "--batch_invariant true with --lora_dropout: the policy is trained with dropout and samples without"
    if args.router_replay_mode == "R3":
        yield "--batch_invariant true with --router_replay_mode R3: the trainer chooses the same experts anyway"
    if args.quant_bits or args.train_type == "qlora":
        yield "--batch_invariant true with 4-bit weights: bitsandbytes' products depend on what is beside a row"


def server_faults(args: RunFlags, world: World) -> Iterator[str]:
    """Yields what vLLM beside the ranks, or its servers, need of other flags."""
    if args.colocates:
        yield from _colocate_faults(args, world)
    elif args.use_vllm:
        yield from _url_faults(args)


def _colocate_faults(args: RunFlags, world: World) -> Iterator[str]:
    """Yields what the engines beside the ranks do not go with."""
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


def _url_faults(args: RunFlags) -> Iterator[str]:
    """Yields what is wrong with the addresses of the servers, and with how weights go to them."""
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
        yield (
            "--use_vllm true needs --vllm_server_host, --vllm_server_base_url, --vllm_server_file, or "
            "--vllm_mode colocate"
        )
        return
    if not urls and len(hosts) != len(ports) and 1 not in (len(hosts), len(ports)):
        yield f"--vllm_server_host has {len(hosts)} values and --vllm_server_port {len(ports)}: one port, or as many"
        return
    for url, times in Counter(args.rollout_base_urls).items():
        if times > 1:
            yield f"{url} is named {times} times: each server once"
    if args.weight_transport == "nccl" and len(args.rollout_base_urls) > 1:
        yield "--weight_transport nccl takes one server: use --vllm_tensor_parallel_size there, or http or shm"


def agent_faults(args: RunFlags, given: frozenset[str]) -> Iterator[str]:
    """Yields what an agent cannot be combined with."""
    if not args.plays_agent:
        return
    own = "an agent plays the whole episode itself"
    for name, why in {
        "multi_turn_scheduler": f"{own}: leave the scheduler out",
        "tools": f"{own}, its calls of tools too: leave --tools out",
        "mcp_servers": f"{own}: open the servers in it",
        "use_gym_env": f"{own}: make the environment in it",
        "gym_env": f"{own}: make the environment in it",
        "agent_template": "tools are described in the agent's requests",
        "response_prefix": "the agent's messages would not have it",
        "structured_outputs_regex": "it is not known which of an agent's calls it is for",
        "teacher_model": "a teacher reads completions of one sequence",
        "teacher_model_server": "a teacher reads completions of one sequence",
        "teacher_adapters": "a teacher reads completions of one sequence",
    }.items():
        if getattr(args, name):
            yield f"--{name} does not go with --agent or --agent_command: {why}"
    loss = LOSSES[args.loss_type]
    estimator = ESTIMATORS[args.advantage_estimator]
    for chosen_by, compares in (
        ("--rlhf_type ppo", args.rlhf_type == "ppo"),
        (loss.chosen_by, loss.labels is not None),
        (estimator.chosen_by, estimator.of_tokens is not None),
    ):
        if compares:
            yield f"{chosen_by} does not go with --agent or --agent_command: it takes completions of one sequence"
    if "loss_scale" in given and args.loss_scale != "default":
        yield "--loss_scale last_round is for schedulers, not for --agent or --agent_command"
    if 0 < args.step_timeout <= args.agent_timeout:
        yield (
            f"--agent_timeout {args.agent_timeout:g} is not below --step_timeout {args.step_timeout}, which would "
            "end the run while an episode may still take its time"
        )


def turn_faults(args: RunFlags) -> Iterator[str]:
    """Yields what the advantages of turns cannot be combined with."""
    estimator = ESTIMATORS[args.advantage_estimator]
    by_turns = "--advantage_per turn"
    if estimator.of_turns is not None:
        by_turns = estimator.chosen_by
        if args.advantage_per == "turn":
            yield f"--advantage_per turn does not go with {by_turns}, which has advantages of turns of its own"
    if not args.credits_turns:
        return
    loss = LOSSES[args.loss_type]
    if estimator.baseline == "batch":
        yield f"{by_turns} compares the turns of a group, and {estimator.name} those of a batch: use grpo"
    for other, clashes in (
        ("--rlhf_type ppo", args.rlhf_type == "ppo"),
        (loss.chosen_by, loss.labels is not None),
        (estimator.chosen_by, estimator.of_tokens is not None),
        (
            "a teacher in the advantages",
            args.distillation is not None and args.distillation.advantages is not None,
        ),
    ):
        if clashes and not args.plays_agent:  # which has its own reasons
            yield f"{by_turns} gives each turn an advantage of its own: {other} does not go with it"


def round_faults(args: RunFlags, given: frozenset[str], world: World) -> Iterator[str]:
    """Yields where the completions of a round do not divide into groups and micro-batches."""
    if args.generation_batch_size is not None and args.steps_per_generation is not None:
        return  # only one of them may be given
    processes = args.counted_for(given, world.size)
    micro_batch = args.per_device_train_batch_size * processes
    across = (
        f"--per_device_train_batch_size {args.per_device_train_batch_size} x {processes} processes"
    )
    accumulation = args.gradient_accumulation_steps
    micro_batches = args.steps_per_generation or args.micro_batches_per_round
    size = args.generation_batch_size
    if size is not None:
        if size % micro_batch:
            near = near_multiples(size, micro_batch)
            yield f"--generation_batch_size {size} is not a multiple of {micro_batch} ({across}): {near}"
            return
        micro_batches = size // micro_batch
    elif (chosen := args.chosen_accumulation(given, processes)) is not None:
        accumulation = micro_batches = chosen
        groups = args.num_generations
        if micro_batch * chosen > MOST_TIMES * max(micro_batch, LEAST_BATCH, groups):
            fits = [n for n in range(2, 2 * groups) if not micro_batch % n or not n % micro_batch]
            nearest = sorted(fits, key=lambda number: abs(number - groups))[:2]
            yield (
                f"--num_generations {groups}: a micro-batch of {micro_batch} ({across}) has no whole groups, and a step of "
                f"{chosen} of them, which has, would be of {micro_batch * chosen} completions, {chosen} times as many: "
                + whole_groups(args.per_device_train_batch_size, processes, groups)
                + f"; or --num_generations {' or '.join(map(str, nearest))}; or, if it is meant, "
                f"--gradient_accumulation_steps {chosen}"
            )
            return
    # a part of an optimizer step: all of it is generated at once
    if accumulation % micro_batches == 0:
        micro_batches = accumulation
    if micro_batches % accumulation:
        yield (
            f"{micro_batches} micro-batches are generated at once, which is not a multiple of "
            f"--gradient_accumulation_steps {accumulation}: {near_multiples(micro_batches, accumulation)} "
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
        return
    loss = LOSSES[args.loss_type] if args.generates else None
    step = micro_batch * accumulation
    if loss is not None and loss.labels is not None and step % args.num_generations:
        yield (
            f"{loss.chosen_by} compares all completions of a prompt, and an optimizer step of {step} ({across} x "
            f"{accumulation} accumulation steps) splits groups of --num_generations {args.num_generations}"
        )
    longest = (args.max_length or 0) + args.max_completion_length
    most = args.max_tokens_per_micro_batch
    if most is not None and most < longest:
        yield (
            f"--max_tokens_per_micro_batch {most} is less than one completion may take with its prompt: {longest} "
            "tokens (--max_length and --max_completion_length)"
        )


def training_faults(args: RunFlags, given: frozenset[str], world: World) -> Iterator[str]:
    """Yields what is wrong with what is trained, the learning-rate schedule, and the processes."""
    yield from args.dtype_faults()
    if args.train_type != "full":
        yield from args.adapter_faults(given)
    if args.optim == "muon":
        whole = "--optim muon makes whole matrices orthogonal"
        if args.train_type != "full":
            yield f"{whole}, and --train_type {args.train_type} trains factors of theirs: --train_type full"
        if args.distributed:
            yield f"{whole}, which --deepspeed and --fsdp divide or flatten: leave them out, several processes are DDP"
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
        rates = {
            "learning_rate": args.peak_learning_rate,
            "critic_learning_rate": args.critic_learning_rate,
        }
        for name, rate in rates.items():
            if rate is not None and isinstance(end, int | float) and rate <= end:
                yield (
                    f"--{name} {rate:g} is not above the end of --lr_scheduler_type polynomial, {end:g}: "
                    f"give a smaller one, --lr_scheduler_kwargs '{{\"lr_end\": 0}}'"
                )
    if kind == "cosine_with_min_lr" and not {"min_lr", "min_lr_rate"} & set(kwargs):
        yield f"--lr_scheduler_type {kind} needs the minimum: --lr_scheduler_kwargs '{{\"min_lr_rate\": 0.1}}'"
    if world.size == 1:
        alone = (
            ["shutdown_timeout"]
            if args.distributed
            else ["shutdown_timeout", "ddp_timeout", "ddp_backend"]
        )
        unused = [name for name in alone if name in given]
        if unused:
            yield no_effect(unused, "on one process: leave it out")
    if world.size % (spread := args.sequence_parallel_size):
        yield (
            f"--sequence_parallel_size {spread} does not divide the number of processes, {world.size}: set "
            f"NPROC_PER_NODE to a multiple of {spread}"
        )
    if args.deterministic and args.use_vllm:
        yield (
            "--deterministic true cannot be promised with --use_vllm true: vLLM's numbers depend on what it computes "
            "at the same time; leave one of them out"
        )


def evaluation_faults(args: RunFlags) -> Iterator[str]:
    """Yields what is wrong with what is evaluated."""
    try:
        args.eval_tasks()
    except UsageError as error:
        yield from error.faults


def best_model_faults(args: RunFlags) -> Iterator[str]:
    """Yields what is wrong with the metric that checkpoints are compared by, which must be there at every save."""
    name = args.metric_for_best_model
    if name is None:
        return
    if name not in args.compared:
        yield f"--metric_for_best_model {name}: it must be one of {', '.join(args.compared)}"
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


def image_faults(args: RunFlags, *more: str) -> list[str]:
    """Returns what does not go with rows that have images, `more` (what the flags do not tell) included."""
    found = list(more)
    if args.plays_agent:
        found.append("an agent or environment shows the model texts alone")
    elif args.multi_turn_scheduler:
        found.append("several turns, and tools, show the model texts alone")
    if args.distillation is not None:
        found.append("a teacher reads texts alone")
    if args.rlhf_type == "ppo":
        found.append("a critic (--rlhf_type ppo) reads texts alone")
    if args.reward_model:
        found.append("--reward_model reads texts alone")
    if args.chord_sft_dataset:
        found.append("--chord_sft_dataset has texts alone")
    if args.sequence_parallel_size > 1:
        found.append("--sequence_parallel_size cuts texts alone")
    return [f"rows have images, and {one}: {_WITHOUT_IMAGES}" for one in found]


def data_faults(args: RunFlags, given: frozenset[str]) -> Iterator[str]:
    """Yields what does not go with streamed or mixed data, and with held-out rows."""
    if (
        "split_dataset_ratio" in given
        and args.evaluates
        and not args.split_dataset_ratio + bool(args.val_dataset)
    ):
        yield "--split_dataset_ratio 0 leaves no row to evaluate: leave it out, or give --val_dataset"
    if args.streaming and args.max_steps <= 0:
        yield "--streaming true needs --max_steps: the length of streamed data is not known"
    for name, strategy in (("save", args.save_strategy), ("eval", args.evaluation)):
        if args.streaming and strategy == "epoch":
            yield f"--{name}_strategy epoch with --streaming true, where passes are not counted: use steps"
    if (
        args.min_pixels is not None
        and args.max_pixels is not None
        and args.min_pixels > args.max_pixels
    ):
        yield f"--min_pixels {args.min_pixels} is more than --max_pixels {args.max_pixels}"
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


def tracker_faults(args: RunFlags) -> Iterator[str]:
    """Yields what is wrong with the trackers and the hub."""
    if "none" in args.report_to and len(args.report_to) > 1:
        yield "--report_to none cannot be combined with other trackers"
    if args.push_to_hub and not is_hub_id(args.hub_model_id or ""):
        yield "--push_to_hub true needs --hub_model_id owner/name"


def mixture_faults(args: RunFlags, given: frozenset[str], world: World) -> Iterator[str]:
    """Yields what does not go together of a run and its tasks."""
    if args.mixture is None:
        return
    tasks = args.tasks
    for name in sorted(given & _ITS_OWN):
        yield f"give either --mixture or --{name}, not both: each task has its own"
    for task in tasks:
        for name in sorted((given & task.given) - _ITS_OWN):
            yield f"--{name} is given for the run and by task {task.name}: keep one"
    counted = [task.share.prompts for task in tasks if task.share.prompts is not None]
    if counted and len(counted) < len(tasks):
        lacking = next(task.name for task in tasks if task.share.prompts is None)
        yield f"--mixture: task {lacking} has no prompts, and others have: give it to all, or weights to all"
    elif counted:
        yield from _task_round_faults(args, given, world, sum(counted))
    sets = [task.name for task in tasks]
    if args.evaluates:
        sets += [one.name for one in args.eval_tasks()]
    for name in sorted({name for name in sets if sets.count(name) > 1}):
        yield f"--mixture: two tasks or evaluated data sets have the name {name}: name one otherwise"
    why = "its tasks end their passes at different times"
    if args.max_steps <= 0:
        yield f"--mixture needs --max_steps: {why}"
    if args.max_epochs is not None:
        yield f"--max_epochs does not go with --mixture, {why}: give --max_steps alone"
    if args.dataloader_drop_last:
        yield f"--dataloader_drop_last does not go with --mixture: {why}"
    for name, strategy in (("save", args.save_strategy), ("eval", args.evaluation)):
        if strategy == "epoch":
            yield f"--{name}_strategy epoch does not go with --mixture, {why}: use steps"


def _task_round_faults(
    args: RunFlags, given: frozenset[str], world: World, total: int
) -> Iterator[str]:
    """Yields where the prompts of the tasks are not those of a round."""
    batch, _ = args.resolved_batch(given, args.counted_for(given, world.size))
    completions = int(batch["generation_batch_size"] or 0)
    prompts, odd = divmod(completions, args.num_generations)
    if not odd and prompts != total:  # another fault says so
        yield (
            f"--mixture: prompts of its tasks add up to {total}, and a round has {prompts}: {completions} completions "
            f"(--generation_batch_size), --num_generations {args.num_generations} each"
        )


def task_faults(
    args: RunFlags, of_run: frozenset[str], own: frozenset[str], world: World
) -> Iterator[str]:
    """Yields what is wrong with the flags of a task, of which those of the run and its `own` were given."""
    given = of_run | own
    yield from doubled_flags(args, given)
    yield from unread_flags(args, own, warn_only=False)
    yield from args.distillation_faults()
    yield from algorithm_faults(args, given)
    yield from reward_faults(args, given)
    yield from rollout_faults(args)
    yield from agent_faults(args, given)
    yield from turn_faults(args)
    yield from server_faults(args, world)
    yield from round_faults(args, given, world)
    yield from training_faults(args, given, world)
    yield from evaluation_faults(args)
    yield from data_faults(args, given)
    yield from tracker_faults(args)
