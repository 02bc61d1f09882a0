"""The flags of `swift forecast` and `swift sample`: those of a run, and how much of it is tried."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from swift_r1.flags.fields import flag
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.flags.sft import SftArguments
from swift_r1.flags.world import World

if TYPE_CHECKING:
    from swift_r1.flags.plan import Plan

FORECAST_FILE = "forecast.json"
"""Beside `completions.jsonl`, whose `step` is the part that a completion was sampled in: `parts` (of each its `prompts`
and the seconds of `generate` and `reward`), `steps` (the metrics of each optimizer step), `fault` (why there are none),
`invalid` (of each reward function how many values, and why the first of them) and `checked` (what the functions said
when they were asked again: metrics of `--recheck_rewards`, and `rewards/<name>/equal_differ`)."""


@dataclass(frozen=True, kw_only=True)
class TriedArguments(RlhfArguments):
    """What tries a run's own parts on its data."""

    def faults(self, given: frozenset[str], world: World) -> Iterator[str]:
        yield from super().faults(given, world)
        who = f"swift {self.command}"
        if self.mixture is not None:
            yield f"{who} tries one task: give its own flags in the place of --mixture"
        if self.resume_from_checkpoint is not None and not self.resume_only_model:
            yield f"--resume_from_checkpoint: {who} begins with a model: --model CHECKPOINT goes on from there"
        if not self.reward_names and self.distillation is not None:
            yield f"{who} goes by rewards, and a teacher alone gives none: give --reward_funcs"
        if self.estimate:
            yield f"--estimate true belongs to swift rlhf, and {who} is none"
        if world.nnodes > 1:
            yield f"{who} is done on one node: leave NNODES out"

    def resolved(self, given: frozenset[str], world: World, environ: Mapping[str, str]) -> Self:
        """Returns the run's arguments without evaluations, checkpoints and trackers."""
        quiet: dict[str, Any] = {
            "eval_strategy": "no",
            "eval_steps": None,
            "eval_on_start": False,
            "eval_datasets": [],
        }
        quiet |= {
            "log_tokens": "none",
            "log_completions": False,
            "save_strategy": "no",
            "view": False,
        }
        quiet |= {
            "push_to_hub": False,
            "create_checkpoint_symlink": False,
            "report_to": [],
            "max_runtime": None,
        }
        return replace(super().resolved(given, world, environ), add_version=False, **quiet)

    @property
    def tried(self) -> Self:
        """The arguments of its trainer: two optimizer steps of all models, one thing after another."""
        alone: dict[str, Any] = {
            "async_generate": False,
            "dynamic_sample": False,
            "critic_warmup_steps": 0,
        }
        return replace(self, max_steps=2, max_epochs=None, **alone)


@dataclass(frozen=True, kw_only=True)
class ForecastArguments(TriedArguments):
    """Forecast."""

    command: ClassVar[str] = "forecast"
    num_prompts: int = flag(
        32, "prompts that are sampled: the first that the run would take", at_least=2
    )
    num_completions: int = flag(16, "completions of each of them", at_least=2)
    json: str | None = flag(None, "file for all that was found, every prompt's figures too")


@dataclass(frozen=True, kw_only=True)
class SampleArguments(TriedArguments):
    """Sample."""

    command: ClassVar[str] = "sample"
    num_prompts: int = flag(
        0, "prompts that are answered: the first that a run would take; 0: each once", at_least=0
    )
    num_completions: int = flag(16, "answers to each of them", at_least=2)
    n_best_to_keep: int = flag(
        1, "most answers of a prompt that are kept, by their reward", at_least=1, ms_swift="5"
    )
    reward_threshold: float | None = flag(
        None,
        "least reward (the weighted sum) of an answer that is kept (default: those that the first reward function "
        "gives 1)",
        ms_swift="0",
    )
    output_file: str = flag("", "new JSON-lines file for the rows", required=True)

    def faults(self, given: frozenset[str], world: World) -> Iterator[str]:
        yield from super().faults(given, world)
        if self.plays_agent:
            yield "swift sample writes conversations, and an episode of an agent may be several: leave --agent out"
        if not self.num_prompts and self.streaming:
            yield "--streaming true needs --num_prompts: the length of streamed data is not known"
        file = Path(self.output_file).expanduser()
        if file.exists():
            yield f"--output_file {file} is there already: name another, or remove it"
        elif not file.parent.is_dir():
            yield f"--output_file {file}: there is no folder {file.parent}"

    def resolved(self, given: frozenset[str], world: World, environ: Mapping[str, str]) -> Self:
        args = super().resolved(given, world, environ)
        return replace(args, output_file=str(Path(self.output_file).expanduser().absolute()))


def prompts_at_a_time(num_prompts: int, num_completions: int, plan: Plan) -> list[int]:
    """Returns the prompts that are answered at a time, until all are: as many completions as a round has, since the
    engine's speed depends on it. A `num_prompts` of 0 is all of a pass."""
    count = min(num_prompts or sys.maxsize, plan.prompts_per_epoch or num_prompts)
    at_once = min(count, max(1, round(plan.completions_per_round / num_completions)))
    return [min(at_once, count - first) for first in range(0, count, at_once)]


def arguments_of(args_json: Mapping[str, Any]) -> RlhfArguments:
    """Returns the arguments that the content of an args.json holds."""
    kinds: dict[str, type[RlhfArguments]] = {
        one.command: one for one in (ForecastArguments, SampleArguments, SftArguments)
    }
    return kinds.get(args_json["command"][1], RlhfArguments).from_dict(args_json["args"])
