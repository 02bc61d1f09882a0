"""The flags of `swift check`: those of `swift rlhf`, none of them required, and its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from swift_r1.arguments import checks
from swift_r1.arguments.builtin_rewards import builtin_reward_faults
from swift_r1.arguments.data_checks import wording_faults
from swift_r1.arguments.fields import flag
from swift_r1.arguments.parser import Fault
from swift_r1.arguments.rlhf import RlhfArguments
from swift_r1.arguments.world import World


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
        "a right completion with columns in braces, '<answer>{solution}</answer>' (default: the plugin's gold(row))",
    )
    num_rows: int = flag(4, "rows a dataset to preprocess, and to call the rewards with", at_least=1)
    json: bool = flag(False, "write one JSON object to standard output and nothing else")

    def faults(self, given: frozenset[str], world: World) -> Iterator[Fault]:
        """What is wrong with the values that matter here; the others may be given, so that a command can be pasted."""
        yield from checks.reward_faults(self, given)
        yield from builtin_reward_faults(self, given)
        yield from wording_faults(self)
