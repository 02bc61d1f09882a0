"""The flags of `swift replay`: those of the recorded run, changed by those that are given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from swift_r1.errors import UsageError
from swift_r1.flags.fields import flag_specs
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.flags.world import World

_SAMPLED = ("steps_per_generation", "generation_batch_size", "num_mini_batches", "dynamic_sample", "max_resample_times")
_SAMPLED_GROUPS = ("Data", "Rollouts", "Several turns")
_MEMORY = ("offload_model", "offload_optimizer")  # the flags among those that are not of what was sampled
_EVALUATION = ("metric_for_best_model", "greater_is_better", "early_stop_interval")
_RUN: tuple[str, ...] = (
    "resume_from_checkpoint",
    "resume_force",
    "add_version",
    "push_to_hub",
    "view",
    "estimate",
    "max_runtime",
)
_RUN += ("nnodes", "node_rank", "master_addr", "master_port", "max_epochs", "steps_per_generation", "num_mini_batches")
_RUN += ("bf16", "fp16")  # --torch_dtype says it


@dataclass(frozen=True, kw_only=True)
class ReplayArguments(RlhfArguments):
    """Replay."""

    command: ClassVar[str] = "replay"
    given: frozenset[str] = frozenset()
    """The flags that the user set."""

    @property
    def normalizes_rounds(self) -> bool:
        """Whether advantages are computed from all of a round: a part of it would give others."""
        over_batch = self.scale_rewards == "batch" or self.advantage_estimator.startswith("reinforce_plus_plus")
        return over_batch or self.rlhf_type == "ppo"

    def faults(self, given: frozenset[str], world: World) -> Iterator[str]:
        wrong = {name: why for name in sorted(given) if (why := _fault(name)) is not None}
        yield from (f"--{name} {why}" for name, why in wrong.items())
        yield from super().faults(given - wrong.keys(), world)

    def resolved(self, given: frozenset[str], world: World, environ: Mapping[str, str]) -> Self:
        by_ratio: dict[str, Any] = (
            {"warmup_steps": None} if "warmup_ratio" in given and "warmup_steps" not in given else {}
        )
        found = super().resolved(frozenset(flag_specs(type(self))), world, environ)
        return replace(found, given=given, **by_ratio)


def _fault(name: str) -> str | None:
    """Why a replay does not take a flag."""
    if name in _SAMPLED or (flag_specs(RlhfArguments)[name].group in _SAMPLED_GROUPS and name not in _MEMORY):
        return "is of what was sampled, and that is recorded: leave it out"
    if name.startswith("eval_") or name in ("num_generations_eval", "probe_prompts", *_EVALUATION):
        return "is of evaluations, which a replay has none of: measure its checkpoints with `swift eval`"
    if name in ("num_train_epochs", "max_epochs"):
        return "does not say how long a replay is: it ends with the record, or at --max_steps"
    if name == "resume_only_model":
        return "begins a run of its own: use `swift rlhf`"
    return None


def recorded_flags(args: Mapping[str, Any], completions_per_round: int) -> dict[str, Any]:
    """What flags of a replay have in the place of their defaults, from those of the run's args.json. Raises UsageError:
    they are of another version."""
    try:
        run = RlhfArguments.from_dict(args)
    except TypeError as error:
        raise UsageError(f"args.json is of another version: {error}") from error
    specs = flag_specs(RlhfArguments)
    values = {name: getattr(run, name) for name in specs}
    values |= {name: specs[name].default for name in specs if name in _RUN or name.startswith("eval_")}
    values |= {name: specs[name].default for name in _EVALUATION}
    follows = {  # what follows from other flags, also from other values of them
        "scale_rewards": run.scale_rewards == run.default_scale,
        "reward_weights": set(run.reward_weights or ()) == {1.0},
        "critic_model": run.critic_model == run.model,
        "critic_learning_rate": run.critic_learning_rate == run.learning_rate,
    }
    values |= dict.fromkeys((name for name, so in follows.items() if so), None)
    return values | {"generation_batch_size": completions_per_round, "log_rollout_offpolicy_metrics": True}


def taken_groups() -> list[str]:
    """The groups whose flags a replay takes."""
    groups = dict.fromkeys(spec.group for spec in flag_specs(RlhfArguments).values())
    return [group for group in groups if group not in _SAMPLED_GROUPS]
