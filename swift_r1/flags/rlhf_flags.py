"""All flags of `swift rlhf` in one dataclass, and what several of them mean together."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from swift_r1.data.sources import DataFlags
from swift_r1.flags.adapters import AdapterArguments
from swift_r1.flags.algorithm import ChordArguments, PPOArguments
from swift_r1.flags.data import DataArguments
from swift_r1.flags.distillation import POLICY, DistillationArguments
from swift_r1.flags.environments import EnvironmentArguments
from swift_r1.flags.eval_tasks import EvalTask, read_tasks
from swift_r1.flags.output import OutputArguments
from swift_r1.flags.parser import Command
from swift_r1.flags.resuming import BATCH, began_with
from swift_r1.flags.reward import BuiltinRewardArguments, RewardArguments
from swift_r1.flags.rollout import GenerationArguments
from swift_r1.flags.sharing import HubArguments, TrackerArguments
from swift_r1.flags.training import TrainingArguments
from swift_r1.flags.world import ProcessArguments
from swift_r1.record.reporters import TrackerFlags

LEAST_BATCH = 16
"""Completions of an optimizer step where nothing says how many; ms-swift's number."""


@dataclass(frozen=True, kw_only=True)
class RlhfFlags(
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
    BuiltinRewardArguments,
    RewardArguments,
    AdapterArguments,
    ProcessArguments,
    Command,
):
    """Every flag of `swift rlhf`, flat: the attribute has the flag's name."""

    command: ClassVar[str] = "rlhf"
    chosen: tuple[str, ...] = ()
    """What of the batch was chosen since the flags leave it open, as lines of the plan."""

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
        """Of a teacher that is a model of its own, or the policy's at the start."""
        path = self.teacher_model or (self.model if self.teacher_adapters else None)
        return None if path == POLICY else path

    @property
    def folder_of_runs(self) -> str:
        """`--output_dir`; without `..`, which would be in all paths that are shown."""
        folder = self.output_dir or f"output/{PurePosixPath(self.model.rstrip('/')).name or 'model'}"
        return str(Path(folder).resolve()) if ".." in Path(folder).parts else folder

    @property
    def start_adapters(self) -> list[str]:
        resumed = [str(self.resume_from_checkpoint)] if self.resume_only_model and self.train_type != "full" else []
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
        return own | {"model": self.resume_from_checkpoint, "ref_model": reference if self.wants_reference else None}

    @property
    def reward_names(self) -> list[str]:
        """`--reward_funcs`, the models of `--reward_model`, and the reward of the environment or the agent, as
        ms-swift has the former."""
        own = ["gym_reward"] * self.plays_gym + ["agent_reward"] * self.plays_agent
        more = [*(one.name for one in self.reward_models), *own]
        return [*self.reward_funcs, *(name for name in more if name not in self.reward_funcs)]

    @property
    def judge_content(self) -> str | None:
        """`--judge` as JSON, what its file holds included."""
        if self.judge is None:
            return None
        from swift_r1.rewards.judge_config import judge_text

        return judge_text(self.judge)

    @property
    def normalizes_objectives(self) -> bool:
        """GDPO, in its two spellings."""
        return self.multi_objective_aggregation == "normalize_then_sum" or self.scale_rewards == "gdpo"

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
        """Of an optimizer step, over all processes; of resolved flags."""
        return self.per_device_train_batch_size * self.batch_processes * self.gradient_accumulation_steps

    def counted_for(self, given: frozenset[str], processes: int) -> int:
        """The processes that the batch flags are to be counted for. A run that goes on with the batch flags that it
        began with keeps its batch, on however many processes; other flags are of those that there are."""
        if self.resume_from_checkpoint is None or self.resume_only_model:
            return processes
        found = began_with(Path(self.folder_of_runs).absolute(), self.add_version, self.resume_from_checkpoint)
        if found is None:
            return processes
        flags, began = found
        own, _ = self.resolved_batch(given, began)
        return began if all(flags.get(name) == value for name, value in own.items()) else processes

    def resolved_batch(self, given: frozenset[str], processes: int) -> tuple[dict[str, int | None], list[str]]:
        """The flags `BATCH` on so many processes, and what of them was chosen here, as lines of the plan."""
        micro_batch = self.per_device_train_batch_size * processes
        chosen = []
        accumulation = self.gradient_accumulation_steps
        micro_batches = self.micro_batches_per_round
        found = self.chosen_accumulation(given, processes)
        if found is not None:
            accumulation = micro_batches = found
            chosen.append(
                f"--gradient_accumulation_steps {found}: a micro-batch of {micro_batch} has no whole groups of "
                f"{self.num_generations}, and a step has at least {LEAST_BATCH} completions"
            )
        if self.generation_batch_size is not None:
            micro_batches = self.generation_batch_size // micro_batch
        asked = self.steps_per_generation or micro_batches
        if asked < accumulation:
            micro_batches = accumulation
            chosen.append(
                f"{asked} micro-batches were to be generated at once, less than a step of {accumulation}: its weights "
                "generate all of it at once"
            )
        sizes = (self.per_device_train_batch_size, accumulation, micro_batches, micro_batch * micro_batches)
        return dict(zip(BATCH, (*sizes, self.num_mini_batches), strict=True)), chosen

    def chosen_accumulation(self, given: frozenset[str], processes: int) -> int | None:
        """`--gradient_accumulation_steps` where the flags leave it open and 1 would split a group: as many as make
        whole groups, and `LEAST_BATCH` completions or more. None where 1 is good, or the user says."""
        says = {"gradient_accumulation_steps", "steps_per_generation", "generation_batch_size", "num_mini_batches"}
        micro_batch = self.per_device_train_batch_size * processes
        if given & says or micro_batch % self.num_generations == 0:
            return None
        groups = math.lcm(micro_batch, self.num_generations)
        return groups * math.ceil(LEAST_BATCH / groups) // micro_batch

    @property
    def data_flags(self) -> DataFlags:
        own = {one.name: getattr(self, one.name) for one in fields(DataFlags)}
        return DataFlags(**own | {"seed": self.seed if self.data_seed is None else self.data_seed})

    @property
    def tracker_flags(self) -> TrackerFlags:
        return TrackerFlags(**{one.name: getattr(self, one.name) for one in fields(TrackerFlags)})

    def eval_tasks(self) -> list[EvalTask]:
        """What `--eval_datasets` names, in its order; a reward of None is the run's own. Raises as `read_tasks`."""
        temperature = self.temperature if self.eval_temperature is None else self.eval_temperature
        defaults = {
            "num_generations": self.num_generations_eval or self.num_generations,
            "temperature": float(temperature),
            "top_p": float(self.eval_top_p),
            "max_completion_length": self.eval_max_completion_length or self.max_completion_length,
            "system": self.system,
            "prompt_template": self.prompt_template,
            "response_prefix": self.response_prefix,
            "enable_thinking": self.enable_thinking,
            "chat_template_kwargs": self.chat_template_kwargs,
            "instruction": None,
        }
        return read_tasks("--eval_datasets", self.eval_datasets, defaults)
