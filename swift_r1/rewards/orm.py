"""Base classes of rewards and their registry, with ms-swift's names; from a registered name to something to call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swift_r1.errors import UsageError, a_kind, describe, for_each, no_such

_GIVEN = {
    *("completions", "messages", "prompt_id", "request_id", "finish_reason", "is_truncated"),
    *("response_token_ids", "trainer_state", "dataset"),
}
"""What every reward call gets besides the dataset's columns."""


class ORM:
    """A reward: called with completions, it returns one value for each.

    The call gets `completions` first, then as keywords every dataset column and `messages`, `prompt_id`,
    `request_id`, `finish_reason`, `is_truncated`, `response_token_ids`, `dataset` (each a list as long as
    `completions`), and `trainer_state` (an object with `global_step` and `max_steps`). A parameter without a
    default is a column that the reward needs. The completions are whole groups: all completions of a prompt, in order.

    None means "no opinion" and never counts as 0.
    """

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        self.args = args

    def __call__(self, completions: list[str], *args: Any, **kwargs: Any) -> list[float | None]:
        """Returns one value per completion, in order. What it raises, NaN, infinity, another number of values, or more
        than `--reward_timeout` seconds per completion make the rewards of these completions invalid."""
        raise NotImplementedError


class AsyncORM:
    """A reward whose call is a coroutine, for work that waits on a network; else like `ORM`."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        self.args = args

    async def __call__(
        self, completions: list[str], *args: Any, **kwargs: Any
    ) -> list[float | None]:
        raise NotImplementedError


Rewards = list[float | None]
"""What a reward returns: a value per completion, None for no opinion."""

orms: dict[str, Callable[..., Any]] = {}
"""Name for `--reward_funcs` -> class, or plain function, or ready object. Plugins write into it."""


def is_built_in(name: str) -> bool:
    """Returns whether the reward registered as `name` is this package's own."""
    return name in orms and str(getattr(orms[name], "__module__", "")).startswith(
        "swift_r1.rewards."
    )


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function, ready to call."""

    name: str
    function: Callable[..., Any]
    accepts: frozenset[str] | None  # names of the keywords it takes; None where it takes any
    # dataset columns: the parameters of its call without a default, except those that every call gets
    needs: tuple[str, ...]
    is_async: bool  # its call is a coroutine

    def call(self, completions: Sequence[str], columns: Mapping[str, Any]) -> Any:
        """Calls it with the completions and those columns that it takes."""
        taken = {
            key: value
            for key, value in columns.items()
            if self.accepts is None or key in self.accepts
        }
        return self.function(list(completions), **taken)


def build_reward(name: str, args: Any = None) -> Reward:
    """Constructs the reward registered as `name`.

    A class is called with those of its parameters that it names: `args` (ms-swift v4, also through `**kwargs`), and
    attributes of `args` of the same name (v3). A function or any other callable object is used as it is. Raises
    UsageError: unknown name, or its construction fails; one line with the cause.
    """
    if name not in orms:
        raise UsageError(
            no_such("reward function", name, sorted(orms), "; others come from --external_plugins")
        )
    entry = orms[name]
    if not callable(entry):
        raise UsageError(f"reward {name} is {a_kind(entry)}, not a class or a function")
    if not inspect.isclass(entry):
        return _reward(name, entry)
    try:
        function = entry(**_constructor_arguments(entry, args))
    except (Exception, SystemExit) as error:
        raise UsageError(f"reward {name} cannot be constructed: {describe(error)}") from error

    if not callable(function):
        raise UsageError(f"reward {name}: {entry.__name__} has no __call__")
    return _reward(name, function)


def build_rewards(names: Sequence[str], columns: frozenset[str], args: Any = None) -> list[Reward]:
    """Raises UsageError, a line for each reward that is unknown, cannot be built, or lacks a column that it needs."""

    def checked(name: str) -> Reward:
        reward = build_reward(name, args)

        missing = [need for need in reward.needs if need not in columns]
        if missing:
            there = ", ".join(sorted(columns - _GIVEN)) or "no columns of its own"
            raise UsageError(
                f"reward {name} needs the column {', '.join(missing)}, and the data has {there}; "
                f'rename one with --columns \'{{"...": "{missing[0]}"}}\''
            )
        return reward

    return for_each(names, checked)


def _constructor_arguments(cls: Callable[..., Any], args: Any) -> dict[str, Any]:
    """Returns what a class is constructed with: the run's arguments, and those of them that it names."""
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        if name == "args" or parameter.kind is parameter.VAR_KEYWORD:
            arguments["args"] = args
        elif parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        ) and hasattr(args, name):
            arguments[name] = getattr(args, name)
    return arguments


def _reward(name: str, function: Callable[..., Any]) -> Reward:
    """Returns a callable as a reward, with what its signature says of its columns."""
    called = function if inspect.isroutine(function) else type(function).__call__
    parameters = list(inspect.signature(function).parameters.values())
    # the first: completions
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)][1:]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return Reward(
        name=name,
        function=function,
        accepts=None if takes_any else frozenset(p.name for p in named),
        needs=tuple(p.name for p in named if p.default is p.empty and p.name not in _GIVEN),
        is_async=inspect.iscoroutinefunction(called),
    )
