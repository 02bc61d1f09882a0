"""The arguments of `swift rlhf`, and of `swift check`, which takes the same flags: all groups in one dataclass, what
several flags mean together, and their defaults that depend on others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Self

from swift_r1.algorithms.methods import ESTIMATORS
from swift_r1.algorithms.rewards import from_flags
from swift_r1.data.prompt_templates import newlines, system_message
from swift_r1.data.sources import DataFlags
from swift_r1.errors import UsageError
from swift_r1.flags.adapters import AdapterArguments
from swift_r1.flags.agents import EnvironmentArguments, agent_faults, turn_faults
from swift_r1.flags.algorithm import (
    DEFAULT_SCALE_REWARDS,
    ChordArguments,
    PPOArguments,
    algorithm_faults,
)
from swift_r1.flags.batch import BATCH, LEAST_BATCH, began_with, round_faults, whole_groups
from swift_r1.flags.data import DataArguments, data_faults, pixels_of
from swift_r1.flags.distillation import POLICY, DistillationArguments
from swift_r1.flags.eval_tasks import PROMPT_FLAGS, EvalTask, limited, read_tasks
from swift_r1.flags.fields import doubled_flags, flag, flag_specs, scope_faults, unread_flags
from swift_r1.flags.mixture import (
    MixtureArguments,
    Task,
    mixed,
    mixture_faults,
    tasks_of,
    told_apart,
)
from swift_r1.flags.output import OutputArguments, best_model_faults, evaluation_faults
from swift_r1.flags.parser import Command
from swift_r1.flags.reward import BuiltinRewardArguments, RewardArguments, reward_faults
from swift_r1.flags.rollout import GenerationArguments, rollout_faults, server_faults
from swift_r1.flags.trackers import HubArguments, TrackerArguments, tracker_faults
from swift_r1.flags.training import TrainingArguments, training_faults
from swift_r1.flags.world import ProcessArguments, World
from swift_r1.record.reporters import TrackerFlags, chosen_trackers

DEFAULT_EVAL_LIMIT = 64  # held-out prompts


@dataclass(frozen=True, kw_only=True)
class RlhfArguments(
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

    command: ClassVar[str] = "rlhf"
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

    def faults(self, given: frozenset[str], world: World) -> Iterator[str]:
        try:
            tasks = self.tasks
        except UsageError as error:
            yield from error.faults
            return
        yield from unread_flags(self, given, warn_only=False)
        yield from mixture_faults(self, given, world)
        estimator = ESTIMATORS[self.advantage_estimator]
        led = any(task.args.scheduler_name or task.args.plays_agent for task in tasks)
        if estimator.of_turns is not None and not led:
            yield (
                f"{estimator.chosen_by} compares turns, and there is one: it is for schedulers, tools, agents and "
                "environments"
            )
        yield from told_apart(
            {task.name: task.args.own_faults(given, task.given, world) for task in tasks}
        )
        yield from best_model_faults(self)

    def own_faults(self, of_run: frozenset[str], own: frozenset[str], world: World) -> list[str]:
        """Returns what is wrong with the flags of a task, of which those of the run and its `own` were given."""
        given = of_run | own
        return [
            *doubled_flags(self, given),
            *unread_flags(self, own, warn_only=False),
            *self._faults_together(given, world),
        ]

    def _faults_together(self, given: frozenset[str], world: World) -> Iterator[str]:
        yield from self.distillation_faults()
        yield from algorithm_faults(self, given)
        yield from reward_faults(self, given)
        yield from rollout_faults(self)
        yield from agent_faults(self, given)
        yield from turn_faults(self)
        yield from server_faults(self, world)
        yield from round_faults(self, given, world)
        yield from training_faults(self, given, world)
        yield from evaluation_faults(self)
        yield from data_faults(self, given)
        yield from tracker_faults(self)

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


@dataclass(frozen=True, kw_only=True)
class CheckArguments(RlhfArguments):
    """Check."""

    command: ClassVar[str] = "check"
    rlhf_type: str = flag("grpo", "as for swift rlhf", choices=("grpo", "ppo"))
    model: str = flag(
        "",
        "folder of a model, for its tokenizer: shows the prompt as the model sees it, and its tokens",
    )
    dataset: list[str] = flag(
        [], "registered names or files; without it, rewards are called on a made-up row"
    )
    reward_funcs: list[str] = flag(
        [], "names of reward functions (default: all that the plugins registered)"
    )
    gold: str | None = flag(
        None,
        "a right completion with columns in braces, '<answer>{solution}</answer>' (default: the plugin's "
        "gold(row), or one for built-in rewards)",
    )
    num_rows: int = flag(
        4, "rows per dataset to preprocess, and to call the rewards with", at_least=1
    )
    json: bool = flag(False, "write one JSON object to standard output and nothing else")
    registered: bool = flag(
        False,
        "list the rewards, datasets, tools and so on that flags may name, also those of plugins, and check nothing",
    )

    def faults(self, given: frozenset[str], world: World) -> Iterator[str]:
        """Yields what is wrong with the values that matter here; the others may be given, so that a command can be
        pasted."""
        try:
            tasks = self.tasks
        except UsageError as error:
            yield from error.faults
            return
        yield from told_apart(
            {task.name: task.args.own_faults(given, task.given, world) for task in tasks}
        )

    def own_faults(self, of_run: frozenset[str], own: frozenset[str], world: World) -> list[str]:
        given = of_run | own
        specs = flag_specs(type(self))
        groups = ("Plugins and rewards", "Built-in rewards")
        prompts = ("enable_thinking", "chat_template_kwargs")
        read = {name for name in given if name in prompts or specs[name].group in groups}
        return [*scope_faults(self, given & read), *reward_faults(self, given)]
