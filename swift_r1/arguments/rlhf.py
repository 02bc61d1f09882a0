"""The flags of `swift rlhf`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, ClassVar

from swift_r1.arguments import checks, data_checks, training_checks
from swift_r1.arguments.algorithm import DEFAULT_SCALE_REWARDS, AlgorithmArguments
from swift_r1.arguments.async_checks import async_faults
from swift_r1.arguments.builtin_rewards import BuiltinRewardArguments, builtin_reward_faults
from swift_r1.arguments.data import DataArguments
from swift_r1.arguments.eval_tasks import Task, limited, read_tasks
from swift_r1.arguments.fields import flag_specs
from swift_r1.arguments.model import ModelArguments
from swift_r1.arguments.multi_turn import GYM_SCHEDULER, MultiTurnArguments, multi_turn_faults
from swift_r1.arguments.output import OutputArguments
from swift_r1.arguments.parser import Fault, to_dict
from swift_r1.arguments.ppo import PPOArguments, algorithm_faults
from swift_r1.arguments.reward import RewardArguments
from swift_r1.arguments.rollout import GenerationArguments
from swift_r1.arguments.training import TrainingArguments
from swift_r1.arguments.world import World
from swift_r1.data.prompt_templates import newlines, system_message

API_KEY_VARIABLE = "SWIFT_API_KEY"
DEFAULT_EVAL_LIMIT = 64  # held-out prompts


@dataclass(frozen=True, kw_only=True)
class RlhfArguments(
    OutputArguments,
    TrainingArguments,
    AlgorithmArguments,
    PPOArguments,
    MultiTurnArguments,
    GenerationArguments,
    DataArguments,
    BuiltinRewardArguments,
    RewardArguments,
    ModelArguments,
):
    """Every flag of `swift rlhf`, flat: the attribute has the flag's name."""

    command: ClassVar[str] = "rlhf"

    def faults(self, given: frozenset[str], world: World) -> Iterator[Fault]:
        """What is wrong with the values taken together."""
        yield from algorithm_faults(self, given)
        yield from checks.reward_faults(self, given)
        yield from builtin_reward_faults(self, given)
        yield from checks.rollout_faults(self, given)
        yield from async_faults(self, given)
        yield from multi_turn_faults(self, given)
        yield from checks.round_faults(self, given, world)
        yield from checks.loss_faults(self, given)
        yield from training_checks.reference_faults(self, given)
        yield from training_checks.tuner_faults(self, given)
        yield from training_checks.optimizer_faults(self, given)
        yield from training_checks.schedule_faults(self, given)
        yield from training_checks.process_faults(self, given, world)
        yield from data_checks.evaluation_faults(self, given)
        yield from data_checks.data_faults(self, given)
        yield from data_checks.best_checkpoint_faults(self, given)
        yield from checks.output_faults(self, given)
        yield from checks.ending_faults(self, given)

    def resolved(self, given: frozenset[str], world: World, environ: Mapping[str, str]) -> RlhfArguments:
        """Defaults that depend on other flags, filled in; afterwards only true "none" is None."""
        micro_batch = self.per_device_train_batch_size * world.size
        if self.generation_batch_size is not None:
            steps_per_generation = self.generation_batch_size // micro_batch
        else:
            mini_batches = (self.num_mini_batches or 1) * self.gradient_accumulation_steps
            steps_per_generation = self.steps_per_generation or mini_batches
        rewards = self.reward_names
        ppo, critic_rate = self.rlhf_type == "ppo", self.critic_learning_rate
        if ppo and critic_rate is None:
            critic_rate = self.peak_learning_rate
        return replace(
            self,
            critic_model=self.critic_model or (self.model if ppo else None),
            learning_rate=self.peak_learning_rate,
            critic_learning_rate=critic_rate,
            reward_funcs=rewards,
            multi_turn_scheduler=self.multi_turn_scheduler or (GYM_SCHEDULER if self.use_gym_env else None),
            steps_per_generation=steps_per_generation,
            generation_batch_size=micro_batch * steps_per_generation,
            quant_bits=4 if self.train_type == "qlora" else self.quant_bits,
            train_type="qlora" if self.quant_bits and self.train_type == "lora" else self.train_type,
            system=system_message(self.system),
            response_prefix=newlines(self.response_prefix),
            data_seed=self.seed if self.data_seed is None else self.data_seed,
            scale_rewards=self.scale_rewards or self._default_scale(),
            reward_weights=self.reward_weights or [1.0] * len(rewards),
            cosine_max_len=self.cosine_max_len or self.max_completion_length,
            soft_max_length=self.soft_max_length or self.max_completion_length,
            num_generations_eval=self.num_generations_eval or self.num_generations,
            eval_temperature=self.temperature if self.eval_temperature is None else self.eval_temperature,
            eval_max_completion_length=self.eval_max_completion_length or self.max_completion_length,
            eval_datasets=[limited(value, self.eval_limit) for value in self.eval_datasets],
            eval_limit=self.eval_limit or DEFAULT_EVAL_LIMIT,
            output_dir=self.output_dir or f"output/{PurePosixPath(self.model.rstrip('/')).name or 'model'}",
            report_to=[name for name in self.report_to if name != "none"],
            api_key=(self.api_key or environ.get(API_KEY_VARIABLE)) if self.use_vllm else None,
        )

    def eval_tasks(self) -> list[Task]:
        """What `--eval_datasets` names, in its order; a reward of None is the run's own.

        Raises:
            UsageError: every value that cannot be read, one a line.
        """
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
            "instruction": None,
        }
        return read_tasks("--eval_datasets", self.eval_datasets, defaults)

    @property
    def peak_learning_rate(self) -> float:
        """`--learning_rate`, or the default of what is trained."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 1e-5 if self.train_type == "full" else 1e-4

    @property
    def wants_reference(self) -> bool:
        """Whether there is a KL, and so a reference policy."""
        return (self.kl_coef if self.rlhf_type == "ppo" else self.beta) > 0

    @property
    def reward_names(self) -> list[str]:
        """`--reward_funcs`, and the environment's own reward."""
        episodes = ["gym_reward"] if self.use_gym_env and "gym_reward" not in self.reward_funcs else []
        return [*self.reward_funcs, *episodes]

    @property
    def ratio_to_behaviour(self) -> bool:
        """Whether the importance ratio is to the log-probs that the engine sampled with (`LossConfig`)."""
        return self.async_generate and self.max_staleness > 0 and self.rollout_importance_sampling_mode is None

    def _default_scale(self) -> str:
        if self.multi_objective_aggregation == "normalize_then_sum":
            return "batch"  # GDPO: the groups are normalised already
        return DEFAULT_SCALE_REWARDS[self.advantage_estimator]

    def to_dict(self) -> dict[str, Any]:
        """All flags as JSON-able values, without the API key."""
        return to_dict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RlhfArguments:
        """The arguments that `to_dict` wrote; the API key comes from the environment variable SWIFT_API_KEY.

        Raises:
            TypeError: a key that is no flag (the file is of another version).
        """
        unknown = sorted(set(values) - set(flag_specs(cls)))
        if unknown:
            raise TypeError(f"not flags of swift rlhf: {', '.join(unknown)}")
        arguments = cls(**values)
        if arguments.use_vllm and arguments.api_key is None:
            return replace(arguments, api_key=os.environ.get(API_KEY_VARIABLE))
        return arguments
