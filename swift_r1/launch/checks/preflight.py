"""Everything about a run that can be found wrong without a model, a GPU or torch."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from functools import reduce
from types import MethodType
from typing import Any

from swift_r1.data.hubs import ask, default_hub, is_hub_id
from swift_r1.data.loading import LoadedData, columns_of, load_rows, row_without
from swift_r1.data.preprocessors import Row
from swift_r1.data.registry import register_dataset_info
from swift_r1.data.resolve import open_sources
from swift_r1.data.rows import RESERVED, TOOL_COLUMNS
from swift_r1.errors import UsageError
from swift_r1.flags.distillation import HINT, POLICY
from swift_r1.flags.mixture import told_apart
from swift_r1.flags.rollout import GYM_SCHEDULER
from swift_r1.flags.run import RunFlags, Task
from swift_r1.flags.world import World
from swift_r1.launch.checks.golds import right_completions
from swift_r1.launch.checks.images import row_faults
from swift_r1.launch.checks.model_folder import config_dtype, family_faults, is_local, model_faults
from swift_r1.launch.checks.names import name_faults, reward_name_faults
from swift_r1.launch.checks.reward_smoke_test import quick_faults
from swift_r1.launch.checks.sampler import sampler_faults
from swift_r1.launch.checks.tools import check_sandboxes
from swift_r1.plugins import LoadedPlugin, load_plugins
from swift_r1.plugins.environments.registering import register_environment
from swift_r1.plugins.tools.mcp_servers import register_servers
from swift_r1.record.reporters import BUILT_IN, tracker_faults
from swift_r1.rewards import orms
from swift_r1.runtime.libraries import vllm_faults

_logger = logging.getLogger("swift_r1.data")


def check_inputs(
    args: RunFlags, world: World, environ: Mapping[str, str], known_faults: Sequence[str]
) -> LoadedData:
    """Loads plugins and data, and checks names, columns, model and DeepSpeed file; returns the rows, prepared for the
    trainer. `known_faults` were found elsewhere.

    Raises UsageError with every fault that could be found. Faults of plugins come alone: names depend on them.
    """
    if is_hub_id(args.model) and not is_local(args.model):
        ask("hf")  # while the data is looked for
    plugins = load_plugins(args.external_plugins)
    register_servers(args.mcp_servers)
    register_dataset_info(args.custom_dataset_info)
    tasks = args.tasks
    for task in tasks:
        register_task(task)
        check_sandboxes(task.args)
    unknown = any(reward_name_faults(task.args) for task in tasks)
    faults = [
        *told_apart({task.name: name_faults(task.args) for task in tasks}),
        *hub_faults(args),
        *known_faults,
        *trainer_faults(args, world),
        *(vllm_faults() if args.colocates else ()),
    ]
    if args.vllm_server_file is not None and world.node_rank == 0:
        from swift_r1.wire.server_file import server_file_faults

        faults += server_file_faults(args.vllm_server_file)
    loaded: list[LoadedData] = []
    of_each: dict[str, list[str]] = {}
    for task in tasks:
        data, of_each[task.name] = _task_data(task, plugins, unknown, bool(faults))
        loaded += [] if data is None else [data]
    faults += told_apart(of_each)
    faults += model_files_faults(args, environ)
    if faults or len(loaded) < len(tasks):
        raise UsageError(*dict.fromkeys(faults))
    return reduce(LoadedData.and_those, loaded)


def register_task(task: Task) -> None:
    """Makes the environment of a task known, if it has one: its rows are the data set env until that of another is."""
    args = task.args
    if args.env is not None:
        register_environment(args.env, args.env_args, args.reward_env)


def _task_data(
    task: Task, plugins: Sequence[LoadedPlugin], unknown: bool, faulty: bool
) -> tuple[LoadedData | None, list[str]]:
    """Returns the rows of a task, and what is wrong with them and its rewards: of an `unknown` reward that is said at
    once, and preparing rows may take long; in a `faulty` run no reward is called."""
    args = task.args
    faults: list[str] = []
    data: LoadedData | None = None
    try:
        register_task(task)
        open_sources(
            [*args.dataset, *args.val_dataset, *args.chord_sft_dataset], use_hf=args.use_hf
        )
        if not unknown:
            data = load_rows(task.data_flags, keep=True)
    except UsageError as error:
        faults += error.faults
    if data is not None:
        faults += column_faults(args, data.train, data.eval)
        faults += row_faults(args, data.train, data.eval)
        faults += sampler_faults(args, data.train)
    faults += [] if unknown else eval_dataset_faults(args)
    if data is not None and not faulty and not faults and args.generates:
        rows = list(data.train[:2])
        faults += quick_faults(args, rows[0], _golds(args, plugins, rows))
    return data, faults


def _golds(
    args: RunFlags, plugins: Sequence[LoadedPlugin], rows: Sequence[Row]
) -> list[str | None]:
    """Returns right completions of rows; None without them, and where the plugin's function fails, which breaks no
    run."""
    try:
        return right_completions(None, plugins, args.called_rewards, rows)
    except UsageError as error:
        _logger.warning("%s", error)
        return [None] * len(rows)


def trainer_faults(args: RunFlags, world: World) -> list[str]:
    """Returns what is wrong with trackers and backend."""
    if not BUILT_IN.issuperset(args.report_to):
        load_plugins(args.external_plugins)  # of a replay, which needs them for nothing else
    return [*tracker_faults(args.report_to), *deepspeed_faults(args, world)]


def model_files_faults(args: RunFlags, environ: Mapping[str, str]) -> list[str]:
    """Returns what is wrong with the models that are named."""
    faults = model_faults(args.model, environ, spread=args.sequence_parallel_size)
    if args.critic_model is not None and args.critic_model != args.model:
        faults += model_faults(
            args.critic_model, environ, "--critic_model", args.sequence_parallel_size
        )
    if args.ref_model is not None and args.ref_model != args.model:
        faults += model_faults(args.ref_model, environ, "--ref_model")
    for path in args.reward_model:
        faults += model_faults(path, environ, "--reward_model")
    if args.teacher_path is not None and args.teacher_path != args.model:
        faults += model_faults(args.teacher_path, environ, "--teacher_model")
    return faults + family_faults(args.model, args.model_type)


def eval_dataset_faults(args: RunFlags) -> list[str]:
    """Returns what is wrong with the data of `--eval_datasets`, and with the rewards that judge it."""
    from swift_r1.training.evaluation.questions import load_questions, unfit_rewards

    if not args.evaluates:
        return []
    faults: list[str] = []
    for task in args.eval_tasks():
        try:
            questions = load_questions(task, args.data_flags)
        except UsageError as error:
            faults += [f"--eval_datasets {fault}" for fault in error.faults]
            continue
        rewards = args.called_rewards if task.reward is None else [task.reward]
        faults += [f"--eval_datasets {fault}" for fault in unfit_rewards(questions, rewards, args)]
    return faults


def hub_faults(args: RunFlags) -> list[str]:
    """Says why nothing could be sent to Hugging Face; ModelScope's login is for its library to find."""
    if not args.push_to_hub or args.hub_token or default_hub(args.use_hf) != "hf":
        return []
    from huggingface_hub import get_token

    return (
        []
        if get_token()
        else ["--push_to_hub true needs a token: SWIFT_HUB_TOKEN, --hub_token, or `hf auth login`"]
    )


def column_faults(args: RunFlags, *parts: Sequence[Row]) -> list[str]:
    """Finds columns that a reward asks for by name and that some rows of `parts` lack."""
    columns = columns_of(*parts)
    own = sorted(columns - RESERVED - {"messages"})
    faults = []
    unnamed = (
        args.multi_turn_scheduler == GYM_SCHEDULER
        and args.gym_env is None
        and not args.asks_servers
    )
    if unnamed and "env_config" not in columns:
        faults.append("--use_gym_env true needs --gym_env, or a column env_config with a name")
    if args.teacher_model == POLICY and HINT not in columns:
        faults.append(
            f"--teacher_model {POLICY} needs the column {HINT}: without a hint it teaches what it knows"
        )
    given = RESERVED
    if not (args.multi_turn_scheduler or args.plays_agent):
        given = RESERVED - {"rollout_infos", "episode_steps"}
    given = given | TOOL_COLUMNS if args.calls_tools or args.plays_agent else given
    for name in sorted(TOOL_COLUMNS & columns) if args.plays_agent else ():
        faults.append(
            f"the data has a column {name}, which rewards of agents get from us: rename it with --columns"
        )
    for name in args.reward_funcs:
        if name not in orms:
            continue
        missing = sorted(required_columns(orms[name]) - columns - given - {"messages"})
        if missing:
            row = row_without(missing[0], *parts)
            who, all_have = ("data", "it has") if row is None else (f"row {row}", "all rows have")
            faults.append(
                f"--reward_funcs {name} needs the column{'s' * (len(missing) > 1)} {', '.join(missing)}, which the "
                f"{who} lacks ({all_have} {', '.join(own) or 'none'}); --columns renames"
            )
    if "judge" in args.reward_funcs and args.judge is not None:
        from swift_r1.rewards.judge_config import read_judge

        for word in sorted(read_judge(args.judge).columns - columns - given):
            faults.append(
                f"--judge names {{{word}}}, a column that the data lacks (it has {', '.join(own) or 'none'})"
            )
    return faults


def required_columns(reward: Any) -> frozenset[str]:
    """Returns the columns a reward asks for by name: parameters of its call without a default, except `completions`."""
    call = MethodType(reward.__call__, reward) if inspect.isclass(reward) else reward
    parameters = list(inspect.signature(call).parameters.values())[1:]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(
        one.name for one in parameters if one.kind in named and one.default is one.empty
    )


def deepspeed_faults(args: RunFlags, world: World) -> list[str]:
    """Returns what is wrong with the `--deepspeed` file or JSON, and what it says against the flags."""
    if args.deepspeed is None:
        return []
    from swift_r1.training.backends.deepspeed_config import contradictions, moved_twice, read_config

    try:
        config = read_config(args.deepspeed, args.zero_hpz_partition_size)
    except UsageError as error:
        return list(error.faults)
    zero = config.get("zero_optimization", {})
    partitioned = isinstance(zero, dict) and zero.get("stage") == 3
    # DeepSpeed takes what peft computes from 4-bit weights for a parameter that it does not know.
    dora = [
        "--use_dora true over 4-bit weights does not go with ZeRO-3: use --deepspeed zero2 or --fsdp fsdp2"
    ]
    return [
        *(dora if partitioned and args.use_dora and args.quant_bits else ()),
        *moved_twice(config, args.offload_model, args.offload_optimizer),
        *contradictions(
            config,
            dtype=args.torch_dtype or config_dtype(args.model) or "float32",
            micro_batch=args.per_device_train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            step=args.completions_per_step,
            world_size=world.size,
            max_grad_norm=args.max_grad_norm,
        ),
    ]
