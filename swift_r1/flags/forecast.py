"""The flags of `swift forecast`: those of a run, how many answers are sampled, and which of them are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from swift_r1.flags.fields import Scope, flag
from swift_r1.flags.preferences import PREFERENCE_TYPES, PreferenceArguments
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.flags.run import RunFlags
from swift_r1.flags.sft import SftArguments
from swift_r1.flags.world import World

SAMPLED = "sampled.jsonl"
"""What a forecast is made of, in the run's folder: of each answer its `prompt`, its `reward`, the `rewards` of all
functions by name, and whether it was `cut` at its length."""
_KEEPS = Scope(lambda args: args.output_file is not None, "without --output_file")
_QUIET: Mapping[str, Any] = {
    "add_version": False,
    "eval_strategy": "no",
    "eval_steps": None,
    "eval_on_start": False,
    "eval_datasets": [],
    "log_tokens": "none",
    "log_completions": False,
    "logging_steps": 1,
    "view": False,
    "push_to_hub": False,
    "create_checkpoint_symlink": False,
    "report_to": [],
    "max_runtime": None,
}
"""A forecast evaluates, keeps and tells nothing of its two optimizer steps."""


@dataclass(frozen=True, kw_only=True)
class ForecastArguments(RlhfArguments):
    """Forecast."""

    command: ClassVar[str] = "forecast"
    num_prompts: int = flag(
        32, "prompts that are answered: the first that a run would take; 0: each once", at_least=0
    )
    num_completions: int = flag(16, "answers to each of them", at_least=2)
    output_file: str | None = flag(
        None, "new JSON-lines file for the answers that are good enough, as rows of swift sft"
    )
    n_best_to_keep: int = flag(
        1, "most answers of a prompt in it, by their reward", _KEEPS, at_least=1, ms_swift="5"
    )
    reward_threshold: float | None = flag(
        None,
        "least reward (the weighted sum) of an answer in it (default: those that the first reward function gives 1)",
        _KEEPS,
        ms_swift="0",
    )

    def faults(self, given: frozenset[str], world: World) -> Iterator[str]:
        yield from super().faults(given, world)
        if self.mixture is not None:
            yield "swift forecast tries one task: give its own flags in the place of --mixture"
        if self.resume_from_checkpoint is not None and not self.resume_only_model:
            yield "--resume_from_checkpoint: swift forecast begins with a model: --model CHECKPOINT goes on from there"
        if not self.reward_names and self.distillation is not None:
            yield "swift forecast goes by rewards, and a teacher alone gives none: give --reward_funcs"
        if self.estimate:
            yield "--estimate true belongs to swift rlhf, and swift forecast is none"
        if world.nnodes > 1:
            yield "swift forecast is done on one node: leave NNODES out"
        if not self.num_prompts and self.streaming:
            yield "--streaming true needs --num_prompts: the length of streamed data is not known"
        if self.output_file is None:
            return
        if self.plays_agent:
            yield "--output_file has conversations, and an episode of an agent may be several: leave --agent out"
        file = Path(self.output_file).expanduser()
        if file.exists():
            yield f"--output_file {file} is there already: name another, or remove it"
        elif not file.parent.is_dir():
            yield f"--output_file {file}: there is no folder {file.parent}"

    def resolved(self, given: frozenset[str], world: World, environ: Mapping[str, str]) -> Self:
        args = replace(super().resolved(given, world, environ), **_QUIET)
        if args.output_file is None:
            return args
        return replace(args, output_file=str(Path(args.output_file).expanduser().absolute()))

    @property
    def tried(self) -> Self:
        """The arguments of its trainer: two optimizer steps of all models, one thing after another."""
        return replace(
            self, max_steps=2, max_epochs=None, async_generate=False, critic_warmup_steps=0
        )


def arguments_of(args_json: Mapping[str, Any]) -> RunFlags:
    """Returns the arguments that the content of an args.json holds."""
    kinds: dict[str, type[RunFlags]] = {
        one.command: one for one in (ForecastArguments, SftArguments)
    } | dict.fromkeys(PREFERENCE_TYPES, PreferenceArguments)
    args = args_json["args"]
    kind = kinds.get(args_json["command"][1]) or kinds.get(args["rlhf_type"], RlhfArguments)
    return kind.from_dict(args)
