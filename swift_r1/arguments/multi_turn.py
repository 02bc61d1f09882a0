"""Flags of rollouts of several turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swift_r1.arguments.fields import flag
from swift_r1.arguments.parser import Fault

if TYPE_CHECKING:
    from swift_r1.arguments.rlhf import RlhfArguments

GYM_SCHEDULER = "gym_scheduler"


@dataclass(frozen=True, kw_only=True)
class MultiTurnArguments:
    """Several turns."""

    multi_turn_scheduler: str | None = flag(
        None, "name of a scheduler that drives each completion over several turns; registered in multi_turns"
    )
    max_turns: int | None = flag(None, "turns of the model in one completion (default: no limit)", at_least=1)
    completion_length_limit_scope: str = flag(
        "per_round",
        "whether --max_completion_length holds for each turn or for all turns together",
        choices=("per_round", "total"),
    )
    multi_turn_timeout: float = flag(
        60.0, "seconds that schedulers and environments may take between two turns of the model", more_than=0
    )
    use_gym_env: bool = flag(False, "play episodes of an environment; their total is one more reward, gym_reward")
    gym_env: str | None = flag(None, "name of the environment (default: the column env_config says)")
    context_manager: str | None = flag(None, "name of a context manager for the environment's episodes")


def multi_turn_faults(args: RlhfArguments, given: frozenset[str]) -> Iterator[Fault]:
    """Flags that no branch would read."""
    unused = [f"--{name}" for name in ("gym_env", "context_manager") if name in given and not args.use_gym_env]
    if unused:
        verb = "has" if len(unused) == 1 else "have"
        yield Fault(f"{', '.join(unused)} {verb} no effect without --use_gym_env true", ("use_gym_env",))
    if args.multi_turn_scheduler is None and not args.use_gym_env:
        names = ("max_turns", "completion_length_limit_scope", "multi_turn_timeout")
        unused = [f"--{name}" for name in names if name in given]
        if unused:
            verb = "has" if len(unused) == 1 else "have"
            yield Fault(
                f"{', '.join(unused)} {verb} no effect without --multi_turn_scheduler or --use_gym_env true",
                ("multi_turn_scheduler", "use_gym_env"),
            )
