"""All groups of a run's flags in one dataclass, what several flags mean together, and their defaults that depend on others;
and the run as one task or several (`--mixture`)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Self, TypeVar

from swift_r1.algorithms.methods import ESTIMATORS
from swift_r1.algorithms.rewards import from_flags
from swift_r1.data.mixture import Share
from swift_r1.data.prompt_templates import newlines, system_message
from swift_r1.data.sources import DataFlags
from swift_r1.errors import UsageError, no_such
from swift_r1.flags.adapters import AdapterArguments
from swift_r1.flags.agents import EnvironmentArguments
from swift_r1.flags.algorithm import (
    DEFAULT_SCALE_REWARDS,
    ChordArguments,
    PPOArguments,
)
from swift_r1.flags.batch import BATCH, LEAST_BATCH, began_with, whole_groups
from swift_r1.flags.data import DataArguments, pixels_of
from swift_r1.flags.distillation import POLICY, DistillationArguments
from swift_r1.flags.eval_tasks import PROMPT_FLAGS, EvalTask, limited, read_tasks
from swift_r1.flags.fields import FlagSpec, flag_specs, from_config
from swift_r1.flags.mixture import (
    OF_A_TASK,
    MixtureArguments,
    ShareArguments,
    written_tasks,
)
from swift_r1.flags.output import OutputArguments
from swift_r1.flags.parser import Command
from swift_r1.flags.reward import BuiltinRewardArguments, RewardArguments
from swift_r1.flags.rollout import GenerationArguments
from swift_r1.flags.trackers import HubArguments, TrackerArguments
from swift_r1.flags.training import TrainingArguments
from swift_r1.flags.world import ProcessArguments, World
from swift_r1.record.reporters import TrackerFlags, chosen_trackers

DEFAULT_EVAL_LIMIT = 64  # held-out prompts
_NAME = re.compile(r"[\w.+-]+")  # of a task
A = TypeVar("A", bound="RunFlags")


@dataclass(frozen=True, slots=True)
class Task:
    """What prompts are asked and judged alike.

    Attributes:
        name: in the names of metrics; empty where a run has one.
        args: the run's flags with its own.
        given: its own flags.
    """

    name: str
    args: RunFlags
    share: Share = Share()
    given: frozenset[str] = frozenset()

    @property
    def data_flags(self) -> DataFlags:
        return replace(self.args.data_flags, task=self.name)


@dataclass(frozen=True, kw_only=True)
class RunFlags(
    OutputArguments,
    TrackerArguments,
    HubArguments,
    TrainingArguments,
    DistillationArguments,
    ChordArguments,
    PPOArguments,
    EnvironmentArguments,
    GenerationArguments,
    DataArguments,
    MixtureArguments,
    BuiltinRewardArguments,
    RewardArguments,
    AdapterArguments,
    ProcessArguments,
    Command,
):
    """Every flag of `swift rlhf`, flat: the attribute has the flag's name."""

    generates: ClassVar[bool] = True
    """Whether completions are sampled and scored."""
    chosen: tuple[str, ...] = ()
    """What of the batch was chosen since the flags leave it open, as lines of the plan."""
    given: frozenset[str] = field(default=frozenset(), compare=False)
    """The flags that the user set."""

    @cached_property
    def tasks(self) -> Sequence[Task]:
        """What prompts are asked and judged alike, each with the run's flags and its own. Raises UsageError: `--mixture`
        cannot be read."""
        return tasks_of(self)

    @property
    def views(self) -> Sequence[Command]:
        return [task.args for task in self.tasks]

    @property
    def leads_turns(self) -> bool:
        """Whether a scheduler leads conversations of some task."""
        return any(task.args.multi_turn_scheduler is not None for task in self.tasks)

    @property
    def takes_turns(self) -> bool:
        """Whether completions of some task are conversations."""
        return self.leads_turns or any(task.args.plays_agent for task in self.tasks)

    @property
    def peak_learning_rate(self) -> float:
        """`--learning_rate`, or the default of what is trained."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 1e-5 if self.train_type == "full" else 1e-4

    @property
    def takes_adapters(self) -> bool:
        return self.train_type != "full"

    @property
    def wants_reference(self) -> bool:
        """Whether there is a KL, and so a reference policy."""
        return (self.kl_coef if self.rlhf_type == "ppo" else self.beta) > 0

    @property
    def teacher_path(self) -> str | None:
        """The folder or id of a teacher that is a model of its own, or of the policy as it was at the start."""
        path = self.teacher_model or (self.model if self.teacher_adapters else None)
        return None if path == POLICY else path

    @property
    def folder_of_runs(self) -> str:
        """`--output_dir`; without `..`, which would be in all paths that are shown."""
        folder = (
            self.output_dir or f"output/{PurePosixPath(self.model.rstrip('/')).name or 'model'}"
        )
        return str(Path(folder).resolve()) if ".." in Path(folder).parts else folder

    @property
    def start_adapters(self) -> list[str]:
        resumed = (
            [str(self.resume_from_checkpoint)]
            if self.resume_only_model and self.train_type != "full"
            else []
        )
        return self.adapters or resumed

    @property
    def resumed_weights(self) -> dict[str, Any]:
        """The flags that `--resume_only_model` stands for."""
        if not self.resume_only_model:
            return {}
        own: dict[str, Any] = {"resume_from_checkpoint": None, "resume_only_model": False}
        if self.train_type != "full":
            return own | {"adapters": self.start_adapters}
        reference = self.ref_model or self.model
        own |= {"teacher_model": self.teacher_path} if self.teacher_adapters else {}
        return own | {
            "model": self.resume_from_checkpoint,
            "ref_model": reference if self.wants_reference else None,
        }

    @property
    def reward_names(self) -> list[str]:
        """`--reward_funcs`, the models of `--reward_model`, and the reward of the environment or the agent, as
        ms-swift has the former; those of all tasks."""
        if self.mixture is not None:
            every = [name for task in self.tasks for name in task.args.reward_names]
            return list(dict.fromkeys(every))
        more = [model.name for model in self.reward_models]
        more += ["gym_reward"] * self.plays_gym + ["agent_reward"] * self.plays_agent
        return self.reward_funcs + [name for name in more if name not in self.reward_funcs]

    @property
    def judge_content(self) -> str | None:
        """`--judge` as JSON, what its file holds included."""
        if self.judge is None:
            return None
        from swift_r1.rewards.judge_config import judge_text

        return judge_text(self.judge)

    @property
    def compared(self) -> Sequence[str]:
        """What `--metric_for_best_model` may name."""
        return ("accuracy", "reward", *(f"rewards/{name}/mean" for name in self.reward_names))

    @property
    def normalizes_objectives(self) -> bool:
        """GDPO, in its two spellings."""
        return (
            self.multi_objective_aggregation == "normalize_then_sum" or self.scale_rewards == "gdpo"
        )

    @property
    def correction(self) -> str | None:
        """`--rollout_importance_sampling_mode`; completions by older weights are always corrected for."""
        ahead = self.async_generate and self.max_staleness > 0
        return self.rollout_importance_sampling_mode or ("token_truncate" if ahead else None)

    @property
    def micro_batches_per_round(self) -> int:
        """`--steps_per_generation`, where `--generation_batch_size` does not say it; a whole optimizer step at least,
        since its weights generate all of it."""
        step = self.gradient_accumulation_steps
        return max(self.steps_per_generation or (self.num_mini_batches or 1) * step, step)

    @property
    def batch_processes(self) -> int:
        """The processes that the batch flags, resolved, are counted for: those that the run began with."""
        each = self.per_device_train_batch_size * int(self.steps_per_generation or 1)
        return int(self.generation_batch_size or each) // each

    @property
    def completions_per_step(self) -> int:
        """The completions of an optimizer step over all processes, by resolved flags."""
        return (
            self.per_device_train_batch_size
            * self.batch_processes
            * self.gradient_accumulation_steps
        )

    def counted_for(self, given: frozenset[str], processes: int) -> int:
        """Returns the processes that the batch flags are to be counted for. A run that goes on with the batch flags
        that it began with keeps its batch, on however many processes; other flags are of those that there are."""
        if self.resume_from_checkpoint is None or self.resume_only_model:
            return processes
        beginning = began_with(
            Path(self.folder_of_runs).absolute(), self.add_version, self.resume_from_checkpoint
        )
        if beginning is None:
            return processes
        flags, began = beginning
        own, _ = self.resolved_batch(given, began)
        return began if all(flags.get(name) == value for name, value in own.items()) else processes

    def resolved_batch(
        self, given: frozenset[str], processes: int
    ) -> tuple[dict[str, int | None], list[str]]:
        """Returns the flags `BATCH` on so many processes, and what of them was chosen here, as lines of the plan."""
        micro_batch = self.per_device_train_batch_size * processes
        chosen = []
        accumulation = self.gradient_accumulation_steps
        micro_batches = self.micro_batches_per_round
        accumulated = self.chosen_accumulation(given, processes)
        if accumulated is not None:
            accumulation = micro_batches = accumulated
            chosen.append(
                f"--gradient_accumulation_steps {accumulated}: a micro-batch of {micro_batch} has no whole groups of "
                f"{self.num_generations}, and a step has at least {LEAST_BATCH} completions: it has "
                f"{micro_batch * accumulated}, {accumulated} times as many; for less, "
                + whole_groups(self.per_device_train_batch_size, processes, self.num_generations)
            )
        if self.generation_batch_size is not None:
            micro_batches = self.generation_batch_size // micro_batch
        wanted = self.steps_per_generation or micro_batches
        if wanted < accumulation:
            micro_batches = accumulation
            chosen.append(
                f"{wanted} micro-batches were to be generated at once, less than a step of {accumulation}: its weights "
                f"generate all of it at once, {micro_batch * accumulation} completions, {accumulation / wanted:g} times as "
                "many"
            )
        sizes = (
            self.per_device_train_batch_size,
            accumulation,
            micro_batches,
            micro_batch * micro_batches,
        )
        return dict(zip(BATCH, (*sizes, self.num_mini_batches), strict=True)), chosen

    def chosen_accumulation(self, given: frozenset[str], processes: int) -> int | None:
        """Returns `--gradient_accumulation_steps` where the flags leave it open and 1 would split a group: as many as
        make whole groups, and `LEAST_BATCH` completions or more. None where 1 is good, or the user says."""
        says = {
            "gradient_accumulation_steps",
            "steps_per_generation",
            "generation_batch_size",
            "num_mini_batches",
        }
        micro_batch = self.per_device_train_batch_size * processes
        if given & says or micro_batch % self.num_generations == 0:
            return None
        groups = math.lcm(micro_batch, self.num_generations)
        return groups * math.ceil(LEAST_BATCH / groups) // micro_batch

    @property
    def data_flags(self) -> DataFlags:
        return replace(
            from_flags(DataFlags, self),
            seed=self.seed if self.data_seed is None else self.data_seed,
        )

    @property
    def tracker_flags(self) -> TrackerFlags:
        return from_flags(TrackerFlags, self)

    def eval_tasks(self) -> list[EvalTask]:
        """Returns what `--eval_datasets` names, in its order, task by task; a reward of None is the task's own. Raises as
        `read_tasks`."""
        if self.mixture is not None:
            return [one for task in self.tasks for one in task.args.eval_tasks()]
        temperature = self.temperature if self.eval_temperature is None else self.eval_temperature
        defaults: dict[str, Any] = {
            "num_generations": self.num_generations_eval or self.num_generations,
            "temperature": float(temperature),
            "top_p": float(self.eval_top_p),
            "max_completion_length": self.eval_max_completion_length or self.max_completion_length,
            "instruction": None,
        }
        defaults |= {name: getattr(self, name) for name in PROMPT_FLAGS}
        return read_tasks("--eval_datasets", self.eval_datasets, defaults)

    @property
    def about_flags(self) -> Iterator[str]:
        yield from super().about_flags
        yield from self.chosen
        if self.optim == "sgd" and self.weight_decay:
            share = self.peak_learning_rate * self.weight_decay
            yield f"--optim sgd decays weights too, by {share:g} of them per step: --weight_decay 0 does not"

    def resolved(self, given: frozenset[str], world: World, environ: Mapping[str, str]) -> Self:
        """Defaults that depend on other flags, filled in; afterwards only true "none" is None."""
        if self.mixture is None:
            return self._resolved(given, world, environ)
        tasks = [
            replace(task, args=task.args._resolved(given | task.given, world, environ))
            for task in self.tasks
        ]
        longest = max(task.args.max_completion_length for task in tasks)
        whole = replace(self, max_completion_length=longest)._resolved(given, world, environ)
        return mixed(whole, tasks)

    def _resolved(self, given: frozenset[str], world: World, environ: Mapping[str, str]) -> Self:
        batch, chosen = self.resolved_batch(given, self.counted_for(given, world.size))
        critic_model = self.critic_model
        critic_rate = self.critic_learning_rate
        if self.rlhf_type == "ppo":
            critic_model = critic_model or self.model
            critic_rate = self.peak_learning_rate if critic_rate is None else critic_rate
        return replace(
            self.with_secrets(environ),
            critic_model=critic_model,
            chosen=tuple(chosen),
            given=given,
            dataset=self.dataset or ["env"] * (self.env is not None),
            agent=self.agent or self.env,
            learning_rate=self.peak_learning_rate,
            critic_learning_rate=critic_rate,
            reward_funcs=self.reward_names,
            multi_turn_scheduler=self.scheduler_name,
            use_gym_env=self.plays_gym or self.use_gym_env,
            teacher_model=self.teacher_or_policy,
            quant_bits=4 if self.train_type == "qlora" else self.quant_bits,
            train_type="qlora"
            if self.quant_bits and self.train_type == "lora"
            else self.train_type,
            max_pixels=self.max_pixels or pixels_of(environ, "MAX_PIXELS"),
            min_pixels=self.min_pixels or pixels_of(environ, "MIN_PIXELS"),
            system=system_message(self.system),
            response_prefix=newlines(self.response_prefix),
            judge=self.judge_content,
            vllm_server_file=self.vllm_server_file
            and str(Path(self.vllm_server_file).expanduser().absolute()),
            data_seed=self.seed if self.data_seed is None else self.data_seed,
            scale_rewards=self.default_scale
            if self.scale_rewards in (None, "gdpo")
            else self.scale_rewards,
            multi_objective_aggregation="normalize_then_sum"
            if self.normalizes_objectives
            else "sum_then_normalize",
            rollout_importance_sampling_mode=self.correction,
            reward_weights=self.reward_weights or [1.0] * len(self.reward_names),
            cosine_max_len=self.cosine_max_len or self.max_completion_length,
            soft_max_length=self.soft_max_length or self.max_completion_length,
            num_generations_eval=self.num_generations_eval or self.num_generations,
            eval_temperature=self.temperature
            if self.eval_temperature is None
            else self.eval_temperature,
            eval_max_completion_length=self.eval_max_completion_length
            or self.max_completion_length,
            eval_datasets=[limited(value, self.eval_limit) for value in self.eval_datasets],
            eval_limit=self.eval_limit or DEFAULT_EVAL_LIMIT,
            eval_strategy=self.evaluation,
            eval_steps=(self.eval_steps or self.save_steps) if self.evaluation == "steps" else None,
            output_dir=self.folder_of_runs,
            report_to=chosen_trackers(self.report_to),
            torch_dtype=self.dtype,
            **batch,  # type: ignore[arg-type]  # ints, by the names of their flags
            **self.given_adapters(given),
            **self.resumed_weights,
        )

    @property
    def default_scale(self) -> str:
        """`--scale_rewards` where it is not given."""
        if self.normalizes_objectives:
            return "batch"  # GDPO: the groups are normalised already
        return DEFAULT_SCALE_REWARDS[self.advantage_estimator]

    @property
    def credits_turns(self) -> bool:
        """Whether the turns of an episode have advantages of their own."""
        return (
            self.advantage_per == "turn"
            or ESTIMATORS[self.advantage_estimator].of_turns is not None
        )

    def with_secrets(self, environ: Mapping[str, str]) -> Self:
        args = super().with_secrets(environ)
        return args if self.use_vllm or self.teacher_model_server else replace(args, api_key=None)


def tasks_of(args: RunFlags) -> list[Task]:
    """Returns the tasks of `--mixture`, else the run as one. Raises UsageError with all that is wrong with the file."""
    if args.mixture is None:
        return [Task("", args)]
    alone = replace(args, mixture=None)
    known = flag_specs(type(args))
    specs = {name: known[name] for name in OF_A_TASK}
    faults: list[str] = []
    tasks = []
    for name, written in written_tasks(args.mixture).items():
        try:
            tasks.append(_task(name, written, alone, specs))
        except UsageError as error:
            faults += [f"--mixture: task {name}: {fault}" for fault in error.faults]
    if faults:
        raise UsageError(*faults)
    return tasks


def _task(name: str, written: Any, alone: RunFlags, specs: Mapping[str, FlagSpec]) -> Task:
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
