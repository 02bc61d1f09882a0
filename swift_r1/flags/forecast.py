"""The flags of `swift forecast`: those of the run that is looked at, and how much of it is tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from swift_r1.flags.fields import flag
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.flags.world import World

FORECAST_FILE = "forecast.json"
"""Beside `completions.jsonl`, whose `step` is the part that a completion was sampled in: `parts` (of each its `prompts`
and the seconds of `generate` and `reward`), `steps` (the metrics of each optimizer step), `fault` (why there are none),
`invalid` (of each reward function how many values, and why the first of them) and `checked` (what the functions said
when they were asked again: metrics of `--recheck_rewards`, and `rewards/<name>/equal_differ`)."""


@dataclass(frozen=True, kw_only=True)
class ForecastArguments(RlhfArguments):
    """Forecast."""

    command: ClassVar[str] = "forecast"
    num_prompts: int = flag(
        32, "prompts that are sampled: the first that the run would take", at_least=2
    )
    num_completions: int = flag(16, "completions of each of them", at_least=2)
    json: str | None = flag(None, "file for all that was found, every prompt's figures too")

    def faults(self, given: frozenset[str], world: World) -> Iterator[str]:
        yield from super().faults(given, world)
        if self.resume_from_checkpoint is not None and not self.resume_only_model:
            yield "--resume_from_checkpoint: a forecast is of a run's beginning; --model CHECKPOINT looks on from there"
        if not self.reward_names and self.distillation is not None:
            yield "a forecast goes by rewards, and a teacher alone gives none: give --reward_funcs to look at"
        if self.estimate:
            yield "--estimate true belongs to swift rlhf; a forecast says what memory is needed too"
        if world.nnodes > 1:
            yield "a forecast is made on one node: leave NNODES out (its ranks train as they would, only fewer)"

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


def arguments_of(args_json: Mapping[str, Any]) -> RlhfArguments:
    """Returns the arguments that the content of an args.json holds."""
    kind = (
        ForecastArguments if args_json["command"][1] == ForecastArguments.command else RlhfArguments
    )
    return kind.from_dict(args_json["args"])
