"""Several tasks in one run (`--mixture`): what each has of its own, and the run's flags with that. A run without a
mixture has one task, of the name ""."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from swift_r1.data.mixture import Share
from swift_r1.data.sources import DataFlags
from swift_r1.errors import UsageError, no_such, read_yaml, yaml_fault
from swift_r1.flags.fields import FlagSpec, flag, flag_specs, from_config
from swift_r1.flags.world import World

if TYPE_CHECKING:
    from swift_r1.flags.rlhf import RlhfArguments

A = TypeVar("A", bound="RlhfArguments")

OF_A_TASK = (
    # rows and prompts
    *("dataset", "val_dataset", "split_dataset_ratio", "interleave_prob", "stopping_strategy"),
    *("columns", "prompt_sampler", "agent_template", "system", "response_prefix"),
    *("enable_thinking", "chat_template_kwargs"),
    # rewards
    *("reward_funcs", "reward_weights", "renormalize_reward_weights"),
    *("truncated_reward", "missing_eos_penalty"),
    # completions and turns
    *("max_completion_length", "stop_words", "max_turns", "completion_length_limit_scope"),
    "max_episode_seconds",
    *("loss_scale", "multi_turn_scheduler", "multi_turn_timeout", "use_gym_env", "gym_env"),
    *("context_manager", "tools", "tool_timeout", "max_tool_response_length"),
    *("sandbox_provider", "sandbox_image", "sandbox_limits", "sandbox_network"),
    *("agent", "agent_command", "agent_timeout", "agent_concurrency", "env", "env_args"),
    # evaluation
    *("eval_datasets", "eval_limit", "num_generations_eval", "eval_temperature", "eval_top_p"),
    "eval_max_completion_length",
)
"""The flags that a task may have of its own; the others are the run's."""
_ITS_OWN = frozenset(("dataset", "val_dataset", "eval_datasets"))
_NAME = re.compile(r"[\w.+-]+")


@dataclass(frozen=True, kw_only=True)
class ShareArguments:
    """A task's share of the prompts."""

    prompts: int | None = flag(None, "prompts of each round", at_least=1)
    weight: float = flag(
        1.0, "share in the long run, beside the weights of the others", more_than=0
    )


@dataclass(frozen=True, kw_only=True)
class MixtureArguments:
    """Several tasks."""

    mixture: str | None = flag(
        None,
        "YAML file of several tasks to train on at once, in the place of --dataset: by name the flags that each has of "
        "its own, and prompts (of each round) or weight (docs/mixture.md)",
        objects=True,
    )


@dataclass(frozen=True, slots=True)
class Task:
    """What prompts are asked and judged alike.

    Attributes:
        name: in the names of metrics; empty where a run has one.
        args: the run's flags with its own.
        given: its own flags.
    """

    name: str
    args: RlhfArguments
    share: Share = Share()
    given: frozenset[str] = frozenset()

    @property
    def data_flags(self) -> DataFlags:
        return replace(self.args.data_flags, task=self.name)


def tasks_of(args: RlhfArguments) -> list[Task]:
    """Returns the tasks of `--mixture`, else the run as one. Raises UsageError with all that is wrong with the file."""
    if args.mixture is None:
        return [Task("", args)]
    alone = replace(args, mixture=None)
    known = flag_specs(type(args))
    specs = {name: known[name] for name in OF_A_TASK}
    faults: list[str] = []
    tasks = []
    for name, written in _written(args.mixture).items():
        try:
            tasks.append(_task(name, written, alone, specs))
        except UsageError as error:
            faults += [f"--mixture: task {name}: {fault}" for fault in error.faults]
    if faults:
        raise UsageError(*faults)
    return tasks


def _written(value: str) -> Mapping[str, Any]:
    """Returns the content of a file, or of JSON in its place."""
    import yaml

    is_json = value.lstrip().startswith("{")
    place = "--mixture" if is_json else f"--mixture {value}"
    try:
        text = value if is_json else Path(value).expanduser().read_text(encoding="utf-8")
        content = read_yaml(text)
    except OSError as error:
        raise UsageError(f"{place}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{place}: not valid YAML ({yaml_fault(error)})") from error
    if not isinstance(content, dict) or not content:
        raise UsageError(f"{place}: must hold a mapping of tasks, each `name: {{dataset: ...}}`")
    return {str(name): written for name, written in content.items()}


def _task(name: str, written: Any, alone: RlhfArguments, specs: Mapping[str, FlagSpec]) -> Task:
    if not _NAME.fullmatch(name):
        raise UsageError("its name must be of letters, digits and . + - _")
    if not isinstance(written, dict):
        raise UsageError("must be a mapping of its own flags, such as `dataset: rows.jsonl`")
    shares = flag_specs(ShareArguments)
    faults = []
    own: dict[str, Any] = {}
    for key, value in written.items():
        spec = specs.get(key) or shares.get(key)
        if spec is None and key in flag_specs(type(alone)):
            faults.append(f"--{key} is of the whole run: give it on the command line")
        elif spec is None:
            faults.append(no_such("key", str(key), sorted((*specs, *shares))))
        else:
            try:
                own[key] = from_config(spec, value)
            except ValueError as error:
                faults.append(f"{key} {error}")
            except UsageError as error:
                faults += error.faults
    if "prompts" in own and "weight" in own:
        faults.append("give either prompts or weight, not both")
    if not own.get("dataset") and own.get("env", alone.env) is None:
        faults.append("it has neither dataset nor env: there are no rows to train on")
    if faults:
        raise UsageError(*faults)
    share = Share(**{key: own.pop(key) for key in list(shares) if key in own})
    return Task(name, replace(alone, **own), share, frozenset(own))


def mixture_faults(args: RlhfArguments, given: frozenset[str], world: World) -> Iterator[str]:
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
        yield from _round_faults(args, given, world, sum(counted))
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


def told_apart(of_each: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yields the faults of tasks, by name: once where all have one, else with whose it is."""
    shared = set.intersection(*map(set, of_each.values()))
    said = set()
    for name, faults in of_each.items():
        for fault in faults:
            if fault not in shared:
                yield f"task {name}: {fault}"
            elif fault not in said:
                said.add(fault)
                yield fault


def _round_faults(
    args: RlhfArguments, given: frozenset[str], world: World, total: int
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


def mixed(args: A, tasks: Sequence[Task]) -> A:
    """Returns the resolved flags of a run, with all that its resolved tasks have of their own in `--mixture`: it is read
    from there in other processes, and no file is read again."""
    weights: dict[str, float] = {}
    for task in tasks:
        names = task.args.reward_funcs
        for name, weight in zip(names, task.args.reward_weights or (), strict=True):
            weights.setdefault(name, weight)
    whole = replace(
        args,
        dataset=[name for task in tasks for name in task.args.dataset],
        reward_funcs=list(weights),
        reward_weights=list(weights.values()),
        eval_max_completion_length=max(task.args.eval_max_completion_length or 0 for task in tasks),
    )
    content = {}
    for task in tasks:
        own = {name: getattr(task.args, name) for name in OF_A_TASK}
        content[task.name] = _share_keys(task.share) | {
            name: value
            for name, value in own.items()
            if name == "dataset" or value != getattr(whole, name)
        }
    return replace(whole, mixture=json.dumps(content, ensure_ascii=False))


def _share_keys(share: Share) -> dict[str, Any]:
    return {"weight": share.weight} if share.prompts is None else {"prompts": share.prompts}
