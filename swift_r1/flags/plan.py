"""The resolved plan of a run: what the batch flags come to, as numbers that people can check."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swift_r1.errors import UsageError
from swift_r1.flags.engine import changed_flags
from swift_r1.flags.forecast import ForecastArguments
from swift_r1.flags.run import RunFlags, Task

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will do. A round is: roll out, score, then `optimizer_steps_per_round` optimizer steps.

    Attributes:
        world_size: processes that train.
        dataset_size: prompts in the training data; None where they are streamed.
        prompts_per_epoch: those of one pass: all, or with `--dataloader_drop_last` those that fill rounds; None where
            passes are not counted, as of several tasks.
        prompts_per_round, completions_per_round: over all processes; completions = prompts x num_generations.
        completions_per_optimizer_step: over all processes and accumulation steps.
        optimizer_steps_per_round: micro-batches / accumulation x num_iterations.
        rounds: rounds started; the last may be cut short by `--max_steps`.
        total_steps, warmup_steps: optimizer steps.
        scheduled_steps: those that the learning-rate schedule is made for; more than `total_steps` where a replay ends
            before its run was to.
        epochs: passes over the prompts this comes to; None where they are not counted.
        max_tokens_per_round: upper bound of completion tokens in a round.
        max_tokens_per_micro_batch: upper bound of prompt and completion tokens in one forward pass, None
            where `--max_length` does not bound the prompt.
        answered: every row has an answer, which `swift sft` learns.
    """

    world_size: int
    dataset_size: int | None
    prompts_per_epoch: int | None
    prompts_per_round: int
    completions_per_round: int
    num_generations: int
    completions_per_optimizer_step: int
    optimizer_steps_per_round: int
    rounds: int
    total_steps: int
    warmup_steps: int
    scheduled_steps: int
    epochs: float | None
    max_tokens_per_round: int
    max_tokens_per_micro_batch: int | None
    answered: bool = False

    @property
    def max_tokens(self) -> int:
        """Upper bound of completion tokens in the whole run."""
        return self.rounds * self.max_tokens_per_round


def make_plan(
    args: RunFlags,
    world_size: int,
    dataset_size: int | None,
    scheduled_steps: int | None = None,
) -> Plan:
    """Returns the plan of resolved arguments; `dataset_size` is None where prompts are streamed (`--max_steps` is set),
    `scheduled_steps` where they are all of the run.

    Raises ValueError where the dataset is empty, or a round does not divide into whole groups; UsageError where
    `--dataloader_drop_last` leaves nothing.
    """
    if dataset_size is not None and dataset_size < 1:
        raise ValueError("the dataset is empty")
    micro_batches = args.micro_batches_per_round
    accumulation = args.gradient_accumulation_steps
    completions = args.completions_per_step * micro_batches // accumulation
    prompts, odd = divmod(completions, args.num_generations)
    if odd or micro_batches % accumulation:
        raise ValueError(
            f"{completions} completions per round do not divide into groups and optimizer steps"
        )
    steps_per_round = micro_batches // accumulation * args.num_iterations
    epoch = dataset_size if args.mixture is None else None
    if epoch is not None and args.dataloader_drop_last:
        epoch -= epoch % prompts
        if not epoch:
            raise UsageError(
                f"--dataloader_drop_last true leaves none of {dataset_size} prompts: a round takes {prompts}"
            )

    def steps_of(epochs: float) -> int:
        assert epoch is not None  # --streaming needs --max_steps
        return max(1, math.ceil(epoch * epochs / prompts)) * steps_per_round

    total_steps = args.max_steps if args.max_steps > 0 else steps_of(args.num_train_epochs)
    if args.max_epochs is not None:
        total_steps = min(total_steps, steps_of(args.max_epochs))
    rounds = math.ceil(total_steps / steps_per_round)
    scheduled_steps = scheduled_steps or total_steps
    if args.lr_scheduler_type == "constant":
        warmup_steps = 0
    elif args.warmup_steps is None:
        warmup_steps = math.ceil(scheduled_steps * args.warmup_ratio)
    else:
        warmup_steps = min(args.warmup_steps, scheduled_steps)
    return Plan(
        world_size=world_size,
        dataset_size=dataset_size,
        prompts_per_epoch=epoch,
        prompts_per_round=prompts,
        completions_per_round=completions,
        num_generations=args.num_generations,
        completions_per_optimizer_step=args.completions_per_step,
        optimizer_steps_per_round=steps_per_round,
        rounds=rounds,
        total_steps=total_steps,
        warmup_steps=warmup_steps,
        scheduled_steps=scheduled_steps,
        epochs=None if epoch is None else rounds * prompts / epoch,
        max_tokens_per_round=completions * args.max_completion_length,
        max_tokens_per_micro_batch=micro_batch_tokens(args),
    )


def prompts_at_a_time(args: ForecastArguments, plan: Plan) -> list[int]:
    """Returns the prompts that are answered at a time, until all are: as many completions as a round has, since the
    engine's speed depends on it."""
    count = min(args.num_prompts or sys.maxsize, plan.prompts_per_epoch or args.num_prompts)
    at_once = min(count, max(1, round(plan.completions_per_round / args.num_completions)))
    return [min(at_once, count - first) for first in range(0, count, at_once)]


def micro_batch_tokens(args: RunFlags) -> int | None:
    """Returns the most tokens of a micro-batch, prompts included; None where nothing bounds them."""
    if args.max_tokens_per_micro_batch is None and args.max_length:
        return args.per_device_train_batch_size * (args.max_length + args.max_completion_length)
    return args.max_tokens_per_micro_batch


def rollouts_from(args: RunFlags) -> str:
    """Says where completions come from, in words."""
    if args.command == "replay":
        return "those that were recorded"
    if args.colocates:
        sleeps = (
            f", which sleeps between rounds (--sleep_level {args.sleep_level})"
            if args.sleep_level
            else ""
        )
        shared = (
            f", one engine for {size} ranks" if (size := args.vllm_tensor_parallel_size) > 1 else ""
        )
        return f"vLLM beside each rank (--vllm_mode colocate){shared}{sleeps}"
    if args.use_vllm:
        if args.vllm_server_file is not None:
            return f"vLLM servers that {args.vllm_server_file} names; they may come and go"
        urls = args.rollout_base_urls
        return f"vLLM server{'s' if len(urls) > 1 else ''} at {', '.join(urls)}"
    return "this process (transformers, the trainer's own weights)"


def backend_of(args: RunFlags, world_size: int) -> str:
    """Returns what trains, in words."""
    if args.fsdp:
        return "FSDP2"
    if args.deepspeed:
        return args.deepspeed
    return (
        "plain torch"
        if world_size == 1
        else "plain torch, a whole model each (DDP); --deepspeed zero3 shards it"
    )


def evaluation_of(args: RunFlags) -> str:
    """Returns what is evaluated and when, in words."""
    if not args.generates:
        limit = "held-out rows" if args.eval_limit is None else f"at most {args.eval_limit} rows"
        return f"{limit}; {_times_of(args)}"
    sets = [
        f"{task.name} ({_count(task.limit, 'question') if task.limit else 'all questions'}"
        f" x {_count(task.num_generations, 'completion')})"
        for task in args.eval_tasks()
    ]
    if not sets or args.val_dataset or args.split_dataset_ratio:
        prompts = (
            "all prompts"
            if args.eval_limit is None
            else f"at most {_count(args.eval_limit, 'prompt')}"
        )
        each = _count(args.num_generations_eval or args.num_generations, "completion")
        sets.insert(0, f"held out ({prompts} x {each})")
    batch = _count(args.per_device_eval_batch_size, "completion")
    at_once = "" if args.use_vllm else f"; {batch} per process at once"
    return f"{', '.join(sets)}; {_times_of(args)}{at_once}"


def _rewards_of(args: RunFlags) -> str:
    pairs = zip(args.reward_funcs, args.reward_weights or [], strict=True)
    return ", ".join(f"{name} x {weight:g}" for name, weight in pairs)


def _task_of(task: Task) -> str:
    """Returns a task's share, rows, rewards and turns, in words."""
    args = task.args
    share = f"weight {task.share.weight:g}"
    if task.share.prompts is not None:
        share = f"{_count(task.share.prompts, 'prompt')} of each round"
    led = args.agent or args.agent_command or args.multi_turn_scheduler
    return ", ".join(
        [
            share,
            f"of {', '.join(args.dataset)}",
            f"judged by {_rewards_of(args)}",
            f"at most {args.max_completion_length:,} new tokens",
            *([] if led is None else [f"led by {led}"]),
        ]
    )


def _times_of(args: RunFlags) -> str:
    """Returns when something is evaluated, in words."""
    unit = "optimizer step" if args.eval_unit == "step" else "round"
    times = ["at the start"] * args.eval_on_start
    often = f"{args.eval_steps:,} {unit}s" if (args.eval_steps or 0) > 1 else unit
    every = {"steps": f"every {often}", "epoch": "after each pass over the data"}
    times += [] if args.evaluation == "no" else [every[args.evaluation], "at the end"]
    return ", ".join(times)


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{plural if number != 1 else ''}"


def plan_table(plan: Plan, args: RunFlags) -> Table:
    """Returns the plan as a table for people."""
    from rich.table import Table

    is_ppo = args.rlhf_type == "ppo"
    what = "completion" if args.generates else "row"
    rows_there = _count(plan.dataset_size or 0, "prompt" if args.generates else "row")
    size = "streamed" if plan.dataset_size is None else rows_there
    if plan.epochs is not None:
        size += f", {plan.epochs:.3g} epoch{'s' * (plan.epochs != 1)}"
    per_turn = (
        " per turn"
        if args.takes_turns and args.completion_length_limit_scope == "per_round"
        else ""
    )
    processes = _count(args.batch_processes, "process", "es")
    batches = _count(args.micro_batches_per_round, "batch", "es")
    rows = {
        "model": f"{args.model} ({args.torch_dtype or 'dtype of its config'}), {args.train_type} training",
        "rollouts": rollouts_from(args),
        "rewards": _rewards_of(args) if args.mixture is None else "by task",
        "data": f"{', '.join(args.dataset)}: {size}",
        "processes": f"{plan.world_size} ({backend_of(args, plan.world_size)})"
        + (
            f", each row spread over {args.sequence_parallel_size}"
            if args.sequence_parallel_size > 1
            else ""
        ),
        "a round": f"{_count(plan.prompts_per_round, 'prompt')} x {_count(plan.num_generations, 'completion')}"
        f" = {plan.completions_per_round}, at most {plan.max_tokens_per_round:,} new tokens{per_turn}",
        "an optimizer step": f"{_count(args.per_device_train_batch_size, what)} x {processes}"
        + (" (at first)" if args.batch_processes != plan.world_size else "")
        + f" x {_count(args.gradient_accumulation_steps, 'accumulation step')}"
        f" = {_count(plan.completions_per_optimizer_step, what)}",
        "steps per round": f"{batches} / {args.gradient_accumulation_steps} accumulated"
        f" x {_count(args.num_iterations, 'epoch' if is_ppo else 'iteration')} = {plan.optimizer_steps_per_round}",
        "in all": f"{_count(plan.rounds, 'round')}, {_count(plan.total_steps, 'optimizer step')},"
        f" {plan.warmup_steps:,} of them warm-up",
    }
    if not args.generates:
        for name in ("rollouts", "rewards", "a round", "steps per round"):
            del rows[name]
        whose = "tokens" if args.command == "sft" else "pairs"
        rows["learned"] = f"--loss_scale {args.loss_scale}; the mean over a step's {whose}"
        rows["in all"] = (
            f"{_count(plan.total_steps, 'optimizer step')}, {plan.warmup_steps:,} of them warm-up"
        )
    if isinstance(args, ForecastArguments):
        parts = prompts_at_a_time(args, plan)
        count = sum(parts) * args.num_completions
        tokens = count * args.max_completion_length
        rows["sampled first"] = (
            f"{_count(sum(parts), 'prompt')} x {_count(args.num_completions, 'answer')} = {count:,}, "
            f"{parts[0] * args.num_completions:,} at a time, at most {tokens:,} new tokens{per_turn}"
        )
    if args.colocates and (changed := changed_flags(args) | args.vllm_engine_kwargs):
        rows["engine"] = ", ".join(
            f"{name.removeprefix('vllm_')} {value}" for name, value in changed.items()
        )
    if args.distillation is not None:
        who = ", ".join(
            filter(
                None, [args.teacher_model, args.teacher_adapters, *args.teacher_servers.values()]
            )
        )
        rows["teacher"] = f"{who}, {args.distillation.described.format_map(vars(args))}"
        rows["rewards"] = rows["rewards"] or "none"
    if is_ppo:
        alone = (
            f"; alone for {_count(args.critic_warmup_steps, 'step')}"
            if args.critic_warmup_steps
            else ""
        )
        rows["critic"] = (
            f"{args.critic_model}, all weights, learning rate {args.critic_learning_rate:g}{alone}"
        )
        rows["rewards"] += f"; KL x {args.kl_coef:g}" if args.kl_coef else "; no KL"
    if args.multi_turn_scheduler:
        most = f"at most {args.max_turns}" if args.max_turns else "as many as it wants"
        environment = f", environment {args.gym_env or 'by row'}" if args.plays_gym else ""
        rows["turns"] = (
            f"{most}, driven by {args.multi_turn_scheduler}, in the trainer{environment}"
        )
    if args.plays_agent:
        rows["episodes"] = (
            f"of {args.agent or args.agent_command}, {args.agent_concurrency} at once, {args.agent_timeout:g} s each"
        )
    if args.evaluates:
        rows["evaluation"] = evaluation_of(args)
    if plan.max_tokens_per_micro_batch:
        rows["a micro-batch"] = (
            f"at most {plan.max_tokens_per_micro_batch:,} tokens, prompts included"
        )
    if args.mixture is not None:
        tasks = {f"task {task.name}": _task_of(task) for task in args.tasks}
        rows |= tasks | {"data": f"{size}, of {len(tasks)} tasks"}
    table = Table(
        "name", "value", title="Plan", title_justify="left", show_header=False, pad_edge=False
    )
    table.columns[0].style = "bold"
    for name, text in rows.items():
        table.add_row(name, text)
    return table
