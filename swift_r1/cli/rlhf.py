"""`swift rlhf`: checks everything that can be checked without a model, then becomes the trainer."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from swift_r1.cli.memory import print_estimate
from swift_r1.cli.view import check_packages
from swift_r1.errors import SwiftError
from swift_r1.flags.parser import given_value, parse_arguments
from swift_r1.flags.plan import Plan, make_plan, micro_batch_tokens, plan_table
from swift_r1.flags.preferences import (
    ALWAYS,
    GROUPS,
    PREFERENCE_TYPES,
    PreferenceArguments,
)
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.flags.run import RunFlags
from swift_r1.flags.world import World
from swift_r1.launch.checks.model_folder import is_local
from swift_r1.launch.colocate import chosen, compiled, on_this_machine
from swift_r1.launch.colocated_servers import own_engines
from swift_r1.launch.environment import (
    has_gpu,
    launch_training,
    new_environment,
    start_page,
    trainer_environment,
)
from swift_r1.launch.gpu_defaults import as_it_began, for_gpu
from swift_r1.launch.nodes import launching, tell_node_0
from swift_r1.launch.run_folder import (
    check_same_run,
    dataset_hash,
    find_checkpoint,
    run_folder,
    run_folder_faults,
    settings_of_all_nodes,
    write_args,
)
from swift_r1.launch.servers import wait_for_servers, with_servers_turns
from swift_r1.runtime.hardware import gpu_memory, usable_cpus
from swift_r1.runtime.processes import say

_USAGE = """swift rlhf [config.yaml] --rlhf_type grpo|ppo --model M --dataset D --reward_funcs R [--flag value ...]

Trains a model with GRPO, or with PPO and a critic; on pairs of answers with --rlhf_type dpo, cpo, simpo or orpo (`swift
rlhf --rlhf_type dpo --help`). A config file (YAML) comes first; flags win over it. Booleans are written `--flag true`.
NPROC_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT in the environment, or flags of these names, say how
many processes train."""
_EXAMPLES = """
swift rlhf --rlhf_type grpo --model models/smollm2-135m --external_plugins plugins/countdown.py \\
  --dataset 'countdown#1000' --reward_funcs external_countdown format --per_device_train_batch_size 8
NPROC_PER_NODE=2 swift rlhf grpo.yaml --deepspeed zero3 --use_vllm true --vllm_server_host 127.0.0.1
"""
HELP = (_USAGE, RlhfArguments, _EXAMPLES)
_PREFERENCES = """swift rlhf [config.yaml] --rlhf_type dpo|cpo|simpo|orpo --model M --dataset D [--flag value ...]

Trains a model on pairs of answers, of which one is preferred. A row has `messages` that end with the chosen answer, and
`rejected_response` or `rejected_messages`; or `prompt`, `chosen` and `rejected`. Nothing is sampled, and there are no
rewards. Batches, adapters, ZeRO, FSDP2, checkpoints and resuming are those of `swift sft`. See docs/preferences.md."""
_PREFERENCE_EXAMPLES = """
swift rlhf --rlhf_type dpo --model models/smollm2-135m --dataset pairs.jsonl --per_device_train_batch_size 8
swift rlhf --rlhf_type dpo --model M --dataset pairs.jsonl --train_type lora --loss_type sigmoid sft --loss_weights 1 0.1
NPROC_PER_NODE=2 swift rlhf --rlhf_type simpo --model M --dataset pairs.jsonl --deepspeed zero3
"""
PREFERENCES = (
    _PREFERENCES,
    PreferenceArguments,
    _PREFERENCE_EXAMPLES,
    GROUPS,
    PreferenceArguments.refused,
)
"""The help of `--rlhf_type dpo` and its like."""


def run(words: Sequence[str]) -> int:
    """Runs the command. Raises as `train`."""
    if given_value(words, "rlhf_type") in PREFERENCE_TYPES:
        return train(words, partial(parse_arguments, PreferenceArguments, words, recorded=ALWAYS))
    return train(words, partial(parse_arguments, RlhfArguments, words))


def train(words: Sequence[str], parse: Callable[[], RlhfArguments]) -> int:
    """Trains by the flags `words`, which `parse` reads; does not come back where training starts.

    Raises:
        UsageError: bad flags, plugin, data, model folder or environment.
        ServerUnreachable: no rollout server within `--vllm_server_timeout`.
    """
    try:
        parsed = parse()
        if parsed.view:
            check_packages()
        os.environ.update(parsed.process_variables)
        world, _ = World.from_environment(os.environ)
        if parsed.estimate:
            gpu = has_gpu(os.environ)
            args, _ = on_this_machine(parsed, gpu)
            memory = gpu_memory(os.environ, world.nproc_per_node) if gpu else None
            return print_estimate(args, world, gpu, memory)
        ready = prepared(parsed, words, world)
    except SwiftError as error:
        tell_node_0(error)
        raise
    start(*ready, world)


def start(args_json: Path, environ: dict[str, str], world: World) -> NoReturn:
    """Becomes the trainer."""
    if world.node_rank == 0:
        # Not through rich, which would break a long path.
        print(f"run folder: {args_json.parent}")
    launch_training(args_json, world, environ)


def prepared(parsed: RunFlags, words: Sequence[str], world: World) -> tuple[Path, dict[str, str]]:
    """Prepares everything of a run but its trainer: checks all that can be checked, waits for servers, makes the
    folder. Prints the plan.

    Returns:
        What the trainer starts from: its args.json, and its environment.

    Raises as `run`.
    """
    gpu = has_gpu(os.environ)
    is_first_node = world.node_rank == 0
    args, about_machine = on_this_machine(parsed, gpu)
    from swift_r1.data.loading import most_images
    from swift_r1.launch.checks.preflight import check_inputs

    logging.getLogger("swift_r1.data").setLevel(logging.INFO)
    data = check_inputs(args, world, os.environ, run_folder_faults(args, world))
    if args.asks_servers and is_first_node:
        with_turns = with_servers_turns(words, parsed, world)
        if with_turns != parsed:
            args, about_machine = on_this_machine(with_turns, gpu)
            data = check_inputs(args, world, os.environ, run_folder_faults(args, world))
    data_hash = dataset_hash(data.train)
    plan = make_plan(args, world.size, None if args.streaming else len(data.train))
    plan = replace(plan, answered=data.answered)
    memory = gpu_memory(os.environ, world.nproc_per_node) if gpu else None
    args = as_it_began(args) if gpu else args
    images = most_images(data.train, data.eval)
    args, about_vllm = chosen(args, plan, world, gpu, memory, images > 0)
    args, about_compiling = compiled(args, plan, gpu)
    about_gpu = list[str]()
    if gpu:
        cores = len(usable_cpus())
        args, about_gpu = for_gpu(
            args, plan.completions_per_round, world, memory, cores, images > 0
        )
        plan = replace(plan, max_tokens_per_micro_batch=micro_batch_tokens(args))
    for line in (*args.about_flags, *about_machine, about_vllm, about_compiling, *about_gpu):
        if line is not None and is_first_node:
            say(line, args.command)
    folder, checkpoint = find_checkpoint(args)
    if checkpoint is not None:
        check_same_run(args, world, data_hash, checkpoint)
    if args.colocates and images and not args.vllm_limit_mm_per_prompt:
        args = replace(args, vllm_limit_mm_per_prompt={"image": images})
    token = None
    # for servers, and for leases
    with launching(world, 2 * args.vllm_server_timeout) as nodes:
        if nodes is not None:
            nodes.agree(settings_of_all_nodes(parsed, world))
        if args.use_vllm and not args.colocates and is_first_node:
            look = (lambda: None) if nodes is None else nodes.look
            token = wait_for_servers(args, folder, look, images)
        folder = run_folder(args, world, nodes, folder)
        peer = None if nodes is None else nodes.peer()
        if args.colocates:
            args, token = own_engines(args, world, nodes, folder, by_default=about_vllm is not None)
    if token is not None:
        from swift_r1.sync.writer import save_token

        save_token(folder, token)
    args_json = write_args(
        folder,
        args,
        world,
        words,
        data_hash,
        checkpoint,
        data.prepared,
        plan,
        own_dtype=parsed.torch_dtype is None,
    )
    return args_json, environment_of(args, world, plan, folder, gpu, peer)


def environment_of(
    args: RunFlags, world: World, plan: Plan, folder: Path, gpu: bool, peer: str | None = None
) -> dict[str, str]:
    """Returns the trainer's environment; `peer` is the address of another node. Prints the plan, and starts the page
    beside the run."""
    is_first_node = world.node_rank == 0
    if args.view and is_first_node:
        start_page(folder, args.view_port, args.secrets)
    added = trainer_environment(
        os.environ,
        world,
        offline=needs_no_hub(args),
        cpus=usable_cpus(),
        gpu=gpu,
        deterministic=args.deterministic,
        peer=peer,
    )
    environ = new_environment(os.environ, added, args.secrets)
    if is_first_node:
        from swift_r1.runtime.terminal import Terminal

        Terminal(soft_wrap=False).print(plan_table(plan, args))
    return environ


def needs_no_hub(args: RunFlags) -> bool:
    """Says whether everything that the trainer loads is on this machine, and stays there."""
    named = (
        args.model,
        args.critic_model,
        args.ref_model,
        args.teacher_path,
        *args.reward_model,
        *args.reward_adapters,
    )
    return not args.push_to_hub and all(is_local(one) for one in named if one is not None)
