"""The arguments of `swift rlhf`, and of `swift check`, which takes the same flags, with what is wrong of several
together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from swift_r1.algorithms.methods import ESTIMATORS
from swift_r1.errors import UsageError
from swift_r1.flags.faults import best_model_faults, mixture_faults, reward_faults, task_faults
from swift_r1.flags.fields import flag, flag_specs, scope_faults, unread_flags
from swift_r1.flags.mixture import told_apart
from swift_r1.flags.run import RunFlags
from swift_r1.flags.world import World


@dataclass(frozen=True, kw_only=True)
class RlhfArguments(RunFlags):
    """Every flag of `swift rlhf`, flat: the attribute has the flag's name."""

    command: ClassVar[str] = "rlhf"

    def faults(self, given: frozenset[str], world: World) -> Iterator[str]:
        try:
            tasks = self.tasks
        except UsageError as error:
            yield from error.faults
            return
        yield from unread_flags(self, given, warn_only=False)
        yield from mixture_faults(self, given, world)
        estimator = ESTIMATORS[self.advantage_estimator]
        led = any(task.args.scheduler_name or task.args.plays_agent for task in tasks)
        if estimator.of_turns is not None and not led:
            yield (
                f"{estimator.chosen_by} compares turns, and there is one: it is for schedulers, tools, agents and "
                "environments"
            )
        yield from told_apart(
            {task.name: list(task_faults(task.args, given, task.given, world)) for task in tasks}
        )
        yield from best_model_faults(self)


@dataclass(frozen=True, kw_only=True)
class CheckArguments(RlhfArguments):
    """Check."""

    command: ClassVar[str] = "check"
    rlhf_type: str = flag("grpo", "as for swift rlhf", choices=("grpo", "ppo"))
    model: str = flag(
        "",
        "folder of a model, for its tokenizer: shows the prompt as the model sees it, and its tokens",
    )
    dataset: list[str] = flag(
        [], "registered names or files; without it, rewards are called on a made-up row"
    )
    reward_funcs: list[str] = flag(
        [], "names of reward functions (default: all that the plugins registered)"
    )
    gold: str | None = flag(
        None,
        "a right completion with columns in braces, '<answer>{solution}</answer>' (default: the plugin's "
        "gold(row), or one for built-in rewards)",
    )
    num_rows: int = flag(
        4, "rows per dataset to preprocess, and to call the rewards with", at_least=1
    )
    json: bool = flag(False, "write one JSON object to standard output and nothing else")
    registered: bool = flag(
        False,
        "list the rewards, datasets, tools and so on that flags may name, also those of plugins, and check nothing",
    )

    def faults(self, given: frozenset[str], world: World) -> Iterator[str]:
        """Yields what is wrong with the values that matter here; the others may be given, so that a command can be
        pasted."""
        try:
            tasks = self.tasks
        except UsageError as error:
            yield from error.faults
            return
        yield from told_apart(
            {task.name: _read_faults(task.args, given | task.given) for task in tasks}
        )


def _read_faults(args: RunFlags, given: frozenset[str]) -> list[str]:
    """Returns what is wrong with the flags of a task that a check reads."""
    specs = flag_specs(type(args))
    groups = ("Plugins and rewards", "Built-in rewards")
    prompts = ("enable_thinking", "chat_template_kwargs")
    read = {name for name in given if name in prompts or specs[name].group in groups}
    return [*scope_faults(args, given & read), *reward_faults(args, given)]
