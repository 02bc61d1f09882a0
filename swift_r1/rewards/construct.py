"""From a registered name to something to call: construction, columns needed, arguments passed."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift_r1.errors import UsageError
from swift_r1.rewards.orm import orms

_PLUGIN_MACHINERY = str(Path(__file__).resolve().parents[1] / "plugins")

# What every reward call gets beside the dataset's columns.
GIVEN = frozenset(
    (
        "completions",
        "messages",
        "prompt_id",
        "request_id",
        "finish_reason",
        "is_truncated",
        "response_token_ids",
        "trainer_state",
        "dataset",
    )
)


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function, ready to call.

    Attributes:
        name: the registered name.
        function: the object that is called.
        accepts: names of the keywords it takes; None where it takes any.
        needs: the parameters of its call without a default, `completions` and `GIVEN` left out: dataset columns.
        is_async: its call is a coroutine.
    """

    name: str
    function: Callable[..., Any]
    accepts: frozenset[str] | None
    needs: tuple[str, ...]
    is_async: bool

    def call(self, completions: Sequence[str], columns: Mapping[str, Any]) -> Any:
        """Calls it with the completions first and those columns that it takes; returns what it returns."""
        taken = {key: value for key, value in columns.items() if self.accepts is None or key in self.accepts}
        return self.function(list(completions), **taken)


def build_reward(name: str, args: Any = None) -> Reward:
    """Constructs the reward registered as `name`.

    A class is called with those of its parameters that it names: `args` (ms-swift v4, also through `**kwargs`), and
    attributes of `args` of the same name (v3). A function or any other callable object is used as it is.

    Raises:
        UsageError: unknown name, or its construction fails; one line with the cause.
    """
    if name not in orms:
        raise UsageError(unknown_reward(name))
    entry = orms[name]
    if not callable(entry):
        raise UsageError(f"reward {name} is a {type(entry).__name__}, not a class or a function")
    if not inspect.isclass(entry):
        return _reward(name, entry)
    try:
        function = entry(**_constructor_arguments(entry, args))
    except (Exception, SystemExit) as error:
        raise UsageError(f"reward {name} cannot be constructed: {describe(error)}") from error
    if not callable(function):
        raise UsageError(f"reward {name}: {entry.__name__} has no __call__")
    return _reward(name, function)


def check_rewards(names: Sequence[str], columns: frozenset[str], args: Any = None) -> list[Reward]:
    """Builds all rewards and looks whether the data has the columns they need. Quick; loads no model.

    Raises:
        UsageError: one line for each reward that is unknown, cannot be built, or needs a column that the data lacks.
    """
    rewards: list[Reward] = []
    faults: list[str] = []
    for name in names:
        try:
            reward = build_reward(name, args)
        except UsageError as error:
            faults.extend(error.faults)
            continue
        rewards.append(reward)
        missing = [need for need in reward.needs if need not in columns]
        if missing:
            there = ", ".join(sorted(columns - GIVEN)) or "no columns of its own"
            faults.append(
                f"reward {name} needs the column {', '.join(missing)}, and the data has {there}; "
                f'rename one with --columns \'{{"...": "{missing[0]}"}}\''
            )
    if faults:
        raise UsageError(*faults)
    return rewards


def unknown_reward(name: str) -> str:
    """The fault line for a name that is not registered, with near misses and all known names."""
    near = difflib.get_close_matches(name, orms, n=2)
    hint = f" did you mean {' or '.join(near)}?" if near else " is its file in --external_plugins?"
    return f"unknown reward {name};{hint} Known: {', '.join(sorted(orms))}"


def describe(error: BaseException) -> str:
    """An exception in one line: type, message, and the file and line that raised it."""
    message = " ".join(str(error).split())[:300]
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    place, trace = None, error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        # An import that fails inside a reward is the plugin's line, not that of the import system or of our finder.
        if not name.startswith(("<frozen", _PLUGIN_MACHINERY)) and name != importlib.__file__:
            place = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{text} ({place})" if place else text


def _constructor_arguments(cls: Callable[..., Any], args: Any) -> dict[str, Any]:
    parameters = inspect.signature(cls).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments = {
        name: getattr(args, name)
        for name, parameter in parameters.items()
        if name != "args" and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if hasattr(args, name)
    }
    if "args" in parameters or takes_any:
        arguments["args"] = args
    return arguments


def _reward(name: str, function: Callable[..., Any]) -> Reward:
    called = function if inspect.isroutine(function) else type(function).__call__
    parameters = list(inspect.signature(function).parameters.values())
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)][1:]  # the first: completions
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return Reward(
        name=name,
        function=function,
        accepts=None if takes_any else frozenset(p.name for p in named),
        needs=tuple(p.name for p in named if p.default is p.empty and p.name not in GIVEN),
        is_async=inspect.iscoroutinefunction(called),
    )
