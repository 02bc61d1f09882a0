"""The arguments of `swift sft`: those of `swift rlhf` that are not about sampling, rewards and their algorithms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from swift_r1.data.conversations import LOSS_SCALES
from swift_r1.data.sources import DataFlags
from swift_r1.flags.faults import (
    best_model_faults,
    data_faults,
    evaluation_faults,
    round_faults,
    tracker_faults,
    training_faults,
)
from swift_r1.flags.fields import flag, flag_specs, scope_faults
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.flags.world import World

ALWAYS: Mapping[str, Any] = {
    "rlhf_type": "grpo",
    "use_vllm": False,
    "num_generations": 1,
    "max_completion_length": 0,
    "share_prompt": "false",
    "log_tokens": "none",
    "log_completions": False,
}
"""What flags of sampling are here, where a row with its answers is a prompt with nothing to generate."""
GROUPS = (
    "Supervised training",
    "Data",
    "Model",
    "Adapters",
    "Training",
    "Output and evaluation",
    "Trackers",
    "Hub",
    "Processes",
)
_TAKEN = ("external_plugins",)  # of other groups
_NOT_TAKEN = frozenset(
    (
        *("share_prompt", "prompt_sampler", "ref_adapters", "log_tokens", "log_tokens_groups"),
        *("log_tokens_limit", "log_completions", "wandb_log_unique_prompts"),
        *("eval_unit", "eval_datasets", "num_generations_eval", "eval_temperature", "eval_top_p"),
        "eval_max_completion_length",
    )
)
_FALLING = ("loss", "perplexity")
_WEIGHTS = (
    "is not here: a token counts or does not (default, last_round, all, or `loss` of a message)"
)


@dataclass(frozen=True, kw_only=True)
class SftArguments(RlhfArguments):
    """Supervised training."""

    command: ClassVar[str] = "sft"
    generates: ClassVar[bool] = False
    groups: ClassVar[Sequence[str]] = GROUPS
    taken: ClassVar[Sequence[str]] = _TAKEN
    not_taken: ClassVar[frozenset[str]] = _NOT_TAKEN
    loss_scale: str = flag(
        "default",
        "what is learned: default all answers, last_round those behind the user's last message, all every token, also "
        "of prompts; `loss` of a message, true or false, comes before the first two",
        choices=LOSS_SCALES,
        elsewhere=dict.fromkeys(
            ("react", "hermes", "qwen", "agentflan", "alpha_umi", "ignore_empty_think"), _WEIGHTS
        ),
    )
    max_length: int | None = flag(
        None,
        "most tokens of a row, answers included (default: what the model takes); see --truncation_strategy",
        at_least=2,
    )
    truncation_strategy: str = flag(
        "delete",
        "rows over --max_length: delete leaves them out and counts them, left keeps their last tokens, right their "
        "first",
        choices=("delete", "left", "right"),
        elsewhere={"split": "is not here: delete leaves such rows out, left and right cut them"},
    )
    metric_for_best_model: str | None = flag(
        None,
        "keep the checkpoint that is best by it: loss, perplexity (these lowest) or token_accuracy",
        may_change=True,
        ms_swift="loss",
    )

    def faults(self, given: frozenset[str], world: World) -> Iterator[str]:
        others = sorted(filter(self.refused, given))
        yield from (
            f"--{name} is of sampling, rewards or their algorithms, which `{self.written}` has none of: leave it out"
            for name in others
        )
        given = given.difference(others)
        yield from scope_faults(self, given)
        yield from round_faults(self, given, world)
        yield from training_faults(self, given, world)
        yield from evaluation_faults(self)
        yield from best_model_faults(self)
        yield from data_faults(self, given)
        yield from tracker_faults(self)

    def resolved(self, given: frozenset[str], world: World, environ: Mapping[str, str]) -> Self:
        named = self.split_dataset_ratio or self.val_dataset
        args = super().resolved(given, world, environ)
        falls = self.metric_for_best_model in _FALLING and "greater_is_better" not in given
        return replace(
            args,
            # all rows that are named as held out
            eval_limit=self.eval_limit if named else args.eval_limit,
            greater_is_better=self.greater_is_better and not falls,
        )

    @property
    def written(self) -> str:
        """The command that these are flags of."""
        return "swift sft"

    @classmethod
    def refused(cls, name: str) -> bool:
        """Returns whether the command does not take a flag."""
        taken = flag_specs(cls)[name].group in cls.groups or name in cls.taken
        return name in cls.not_taken or not taken

    @property
    def compared(self) -> Sequence[str]:
        return (*_FALLING, "token_accuracy")

    @property
    def data_flags(self) -> DataFlags:
        return replace(super().data_flags, whole=True)
