"""Everything about a run that can be found wrong without a model, a GPU or torch."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from swift_r1.arguments.rlhf import RlhfArguments
from swift_r1.arguments.world import World
from swift_r1.checking.model_folder import config_dtype, model_faults
from swift_r1.errors import UsageError
from swift_r1.plugins import load_plugins

if TYPE_CHECKING:
    from swift_r1.data.loading import LoadedData


def check_inputs(
    args: RlhfArguments, world: World, environ: Mapping[str, str], known_faults: Sequence[str]
) -> LoadedData:
    """Loads plugins and data, and checks names, columns, model and DeepSpeed file.

    Args:
        known_faults: found elsewhere, to be reported with the others.

    Returns:
        the rows, prepared for the trainer.

    Raises:
        UsageError: every fault that could be found, one a line. Faults of plugins come alone: names depend on them.
    """
    from swift_r1.checking.quick import quick_faults
    from swift_r1.data.loading import columns_of, load_rows
    from swift_r1.data.registry import register_dataset_info
    from swift_r1.data.resolve import open_sources

    load_plugins(args.external_plugins)
    register_dataset_info(args.custom_dataset_info)
    faults = [
        *reward_name_faults(args),
        *scheduler_name_faults(args),
        *known_faults,
        *deepspeed_faults(args, world),
    ]
    data: LoadedData | None = None
    try:
        open_sources([*args.dataset, *args.val_dataset], use_hf=args.use_hf)
        data = load_rows(args, keep=True)
    except UsageError as error:
        faults += error.faults
    if data is not None:
        faults += column_faults(args, columns_of(data))
    faults += eval_dataset_faults(args)
    if data is not None and not faults:
        faults += quick_faults(args, data.train[0])
    faults += model_faults(args.model, environ)
    if args.critic_model is not None and args.critic_model != args.model:
        faults += model_faults(args.critic_model, environ, "--critic_model")
    if faults or data is None:
        raise UsageError(*faults)
    return data


def reward_name_faults(args: RlhfArguments) -> list[str]:
    """Reward functions that nothing registered, with the ones there are."""
    from swift_r1.rewards import orms

    known = ", ".join(sorted(orms))
    faults = []
    for name in args.reward_funcs:
        if name in orms:
            continue
        near = difflib.get_close_matches(name, orms, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        plugin = "" if args.external_plugins else "; others come from --external_plugins"
        faults.append(f"--reward_funcs {name}: {hint}there is no such reward function; known are {known}{plugin}")
    return faults


def eval_dataset_faults(args: RlhfArguments) -> list[str]:
    """What is wrong with the data of `--eval_datasets`, and with the rewards that judge it."""
    from swift_r1.evaluation.questions import load_questions, unfit_rewards

    if args.eval_steps is None and not args.eval_on_start:
        return []
    faults: list[str] = []
    for task in args.eval_tasks():
        try:
            questions = load_questions(task, use_hf=args.use_hf)
        except UsageError as error:
            faults += [f"--eval_datasets {fault}" for fault in error.faults]
            continue
        rewards = args.reward_funcs if task.reward is None else [task.reward]
        faults += [f"--eval_datasets {fault}" for fault in unfit_rewards(questions, rewards, args)]
    return faults


def scheduler_name_faults(args: RlhfArguments) -> list[str]:
    """A scheduler, environment or context manager that nothing registered, with the ones there are."""
    from swift_r1.plugins.rollouts import context_managers, envs, multi_turns

    named = (
        ("multi_turn_scheduler", args.multi_turn_scheduler, multi_turns),
        ("gym_env", args.gym_env, envs),
        ("context_manager", args.context_manager, context_managers),
    )
    return [
        f"--{flag} {name}: nothing of that name is registered; known are {', '.join(sorted(registry)) or 'none'}"
        for flag, name, registry in named
        if name is not None and name not in registry
    ]


def column_faults(args: RlhfArguments, columns: frozenset[str]) -> list[str]:
    """Columns that a reward asks for by name and that some rows lack."""
    from swift_r1.data.rows import RESERVED
    from swift_r1.rewards import orms

    own = sorted(columns - RESERVED - {"messages"})
    faults = []
    if args.use_gym_env and args.gym_env is None and "env_config" not in columns:
        faults.append("--use_gym_env true needs --gym_env, or a column env_config with a name")
    given = RESERVED if args.multi_turn_scheduler else RESERVED - {"rollout_infos"}
    for name in args.reward_funcs:
        if name not in orms:
            continue
        missing = sorted(required_columns(orms[name]) - columns - given - {"messages"})
        if missing:
            faults.append(
                f"--reward_funcs {name} needs the column{'s' * (len(missing) > 1)} {', '.join(missing)}, which the "
                f"data lacks (it has {', '.join(own) or 'none'}); --columns renames"
            )
    return faults


def required_columns(reward: Any) -> frozenset[str]:
    """The columns a reward asks for by name: parameters of its call without a default, except `completions`."""
    call = reward.__call__ if inspect.isclass(reward) else reward
    parameters = list(inspect.signature(call).parameters.values())
    if inspect.isclass(reward):
        parameters = parameters[1:]  # self
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(
        parameter.name
        for parameter in parameters[1:]
        if parameter.kind in named and parameter.default is inspect.Parameter.empty
    )


def deepspeed_faults(args: RlhfArguments, world: World) -> list[str]:
    """What is wrong with the `--deepspeed` file or JSON, and what it says against the flags."""
    if args.deepspeed is None:
        return []
    from swift_r1.training.backends.deepspeed_config import contradictions, moved_twice, read_config

    try:
        config = read_config(args.deepspeed)
    except UsageError as error:
        return list(error.faults)
    return [
        *moved_twice(config, args.offload_model, args.offload_optimizer),
        *contradictions(
            config,
            dtype=args.torch_dtype or config_dtype(args.model),
            micro_batch=args.per_device_train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            world_size=world.size,
            max_grad_norm=args.max_grad_norm,
        ),
    ]
