"""The arguments of `swift rlhf` and of `swift check`, which takes the same flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

from swift_r1.data.prompt_templates import newlines, system_message
from swift_r1.flags import checks
from swift_r1.flags.algorithm import DEFAULT_SCALE_REWARDS
from swift_r1.flags.eval_tasks import limited
from swift_r1.flags.fields import flag, flag_specs, scope_faults
from swift_r1.flags.rlhf_flags import RlhfFlags
from swift_r1.flags.world import World
from swift_r1.record.reporters import chosen_trackers

DEFAULT_EVAL_LIMIT = 64  # held-out prompts


@dataclass(frozen=True, kw_only=True)
class RlhfArguments(RlhfFlags):
    """Every flag of `swift rlhf`, flat: the attribute has the flag's name."""

    def faults(self, given: frozenset[str], world: World) -> Iterator[str]:
        yield from scope_faults(self, given)
        yield from checks.all_faults(self, given, world)

    @property
    def about_flags(self) -> Iterator[str]:
        yield from super().about_flags
        yield from self.chosen
        if self.optim == "sgd" and self.weight_decay:
            share = self.peak_learning_rate * self.weight_decay
            yield f"--optim sgd decays weights too, by {share:g} of them per step: --weight_decay 0 does not"

    def resolved(self, given: frozenset[str], world: World, environ: Mapping[str, str]) -> Self:
        """Defaults that depend on other flags, filled in; afterwards only true "none" is None."""
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
            dataset=self.dataset or ["env"] * (self.env is not None),
            agent=self.agent or self.env,
            learning_rate=self.peak_learning_rate,
            critic_learning_rate=critic_rate,
            reward_funcs=self.reward_names,
            multi_turn_scheduler=self.scheduler_name,
            use_gym_env=self.plays_gym or self.use_gym_env,
            teacher_model=self.teacher_or_policy,
            quant_bits=4 if self.train_type == "qlora" else self.quant_bits,
            train_type="qlora" if self.quant_bits and self.train_type == "lora" else self.train_type,
            system=system_message(self.system),
            response_prefix=newlines(self.response_prefix),
            judge=self.judge_content,
            vllm_server_file=self.vllm_server_file and str(Path(self.vllm_server_file).expanduser().absolute()),
            data_seed=self.seed if self.data_seed is None else self.data_seed,
            scale_rewards=self.default_scale if self.scale_rewards in (None, "gdpo") else self.scale_rewards,
            multi_objective_aggregation="normalize_then_sum" if self.normalizes_objectives else "sum_then_normalize",
            rollout_importance_sampling_mode=self.correction,
            reward_weights=self.reward_weights or [1.0] * len(self.reward_names),
            cosine_max_len=self.cosine_max_len or self.max_completion_length,
            soft_max_length=self.soft_max_length or self.max_completion_length,
            num_generations_eval=self.num_generations_eval or self.num_generations,
            eval_temperature=self.temperature if self.eval_temperature is None else self.eval_temperature,
            eval_max_completion_length=self.eval_max_completion_length or self.max_completion_length,
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

    def with_secrets(self, environ: Mapping[str, str]) -> Self:
        found = super().with_secrets(environ)
        return found if self.use_vllm or self.teacher_model_server else replace(found, api_key=None)


@dataclass(frozen=True, kw_only=True)
class CheckArguments(RlhfArguments):
    """Check."""

    command: ClassVar[str] = "check"
    rlhf_type: str = flag("grpo", "as for swift rlhf", choices=("grpo", "ppo"))
    model: str = flag("", "folder of a model, for its tokenizer: shows the prompt as the model sees it, and its tokens")
    dataset: list[str] = flag([], "registered names or files; without it, rewards are called on a made-up row")
    reward_funcs: list[str] = flag([], "names of reward functions (default: all that the plugins registered)")
    gold: str | None = flag(
        None,
        "a right completion with columns in braces, '<answer>{solution}</answer>' (default: the plugin's "
        "gold(row), or one for built-in rewards)",
    )
    num_rows: int = flag(4, "rows per dataset to preprocess, and to call the rewards with", at_least=1)
    json: bool = flag(False, "write one JSON object to standard output and nothing else")

    def faults(self, given: frozenset[str], world: World) -> Iterator[str]:
        """What is wrong with the values that matter here; the others may be given, so that a command can be pasted."""
        specs = flag_specs(type(self))
        groups = ("Plugins and rewards", "Built-in rewards")
        prompts = ("enable_thinking", "chat_template_kwargs")
        read = {name for name in given if name in prompts or specs[name].group in groups}
        yield from scope_faults(self, given & read)
        yield from checks.reward_flag_faults(self, given)
