"""The ways a command can end badly, each with its exit code.

Every error that a user can cause is one of these; its message is one plain sentence (or one line per
fault). Anything else that escapes is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

_NEAR = 0.75  # no_such_reward is not agent_reward
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_SERVER_UNREACHABLE = 3
EXIT_PORT_TAKEN = 4
EXIT_RUN_FAILED = 5
EXIT_FINDING = 6
EXIT_LOST_PEER = 75
"""A rank tells its launcher alone that it ended since another rank is gone. The run's own code is the other rank's."""
EXIT_RANK_KILLED = 76
"""The trainer's launcher tells `swift launch` alone that a signal killed a rank. The run's own code would be 5."""
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
EXIT_CODES = {
    EXIT_OK: "done",
    EXIT_USAGE: "bad flags, plugin, data or environment, found before any model loads",
    EXIT_SERVER_UNREACHABLE: "the rollout server was not reached in time",
    EXIT_PORT_TAKEN: "the port is taken",
    EXIT_RUN_FAILED: "the run failed",
    EXIT_FINDING: "swift why found what is wrong",
    EXIT_INTERRUPTED: "interrupted by Ctrl-C, state saved",
    EXIT_TERMINATED: "ended by SIGTERM, state saved",
}
"""The exit codes of every command, and what each says."""


class SwiftError(Exception):
    """Base of all errors that are reported as one clear line instead of a traceback."""

    exit_code: int = EXIT_RUN_FAILED


class UsageError(SwiftError):
    """Bad flags, plugin, data or environment, found before any model loads."""

    exit_code = EXIT_USAGE

    def __init__(self, *faults: str) -> None:
        super().__init__("\n".join(faults))
        self.faults: tuple[str, ...] = faults


class ServerUnreachable(SwiftError):
    """The rollout server did not answer within its deadline."""

    exit_code = EXIT_SERVER_UNREACHABLE


class PortTaken(SwiftError):
    """Another process listens on the port that `swift rollout` was told to use."""

    exit_code = EXIT_PORT_TAKEN


class RunFailed(SwiftError):
    """Training or serving cannot go on (too many invalid rewards, engine dead, weights disagree)."""

    exit_code = EXIT_RUN_FAILED


def a_kind(value: object) -> str:
    """Names the kind of a value that is of the wrong one: "an int", "a list", "None"."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def for_each(items: Iterable[_Item], do: Callable[[_Item], _Result]) -> list[_Result]:
    """Does `do` for each item.

    Raises:
        UsageError: the faults of all items together.
    """
    results: list[_Result] = []
    faults: list[str] = []
    for item in items:
        try:
            results.append(do(item))
        except UsageError as error:
            faults += error.faults
    if faults:
        raise UsageError(*faults)
    return results


def no_such(what: str, name: str, known: Iterable[str], more: str = "") -> str:
    """Says that nothing of a kind has this name, with the nearest one that is known, or all of them and where `more`
    are."""
    known = list(known)
    words = name.split()
    if len(words) > 1:
        return f"there is no {what} {name!r}: several are a list, in YAML [{', '.join(words)}]"
    near = difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)
    if near:
        return f"there is no {what} {name}: did you mean {near[0]}?"
    return f"there is no {what} {name}: known are {', '.join(known) or 'none'}{more}"


def one_line(error: BaseException, longest: int = 300) -> str:
    """Returns the message of an exception in one line, or its type's name; of pydantic's each fault with its place."""
    faults = getattr(error, "errors", None)
    if type(error).__name__ == "ValidationError" and callable(faults):
        parts = [
            ": ".join(filter(None, (".".join(map(str, one["loc"])), str(one["msg"]))))
            for one in faults()
        ]
        return "; ".join(parts)[:longest]
    return _message(error, longest) or type(error).__name__


_YAML_VALUES = 100_000


def read_yaml(text: str) -> Any:
    """Reads a YAML text. Raises yaml.YAMLError, also for a key that stands twice in one mapping, of which PyYAML keeps
    the last, and where aliases make it endless or large."""
    import yaml

    sizes: dict[
        yaml.Node, int
    ] = {}  # values of each node, its aliases written out; 0 while it is counted

    def size(node: yaml.Node) -> int:
        if node not in sizes:
            sizes[node] = 0
            inner = node.value if isinstance(node, yaml.CollectionNode) else ()
            parts = (part for one in inner for part in (one if isinstance(one, tuple) else (one,)))
            sizes[node] = 1 + sum(map(size, parts))
        if not 0 < sizes[node] <= _YAML_VALUES:
            problem = f"aliases make it endless, or more than {_YAML_VALUES:,} values"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return sizes[node]

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types here
        def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
            node: yaml.MappingNode = super().compose_mapping_node(anchor)
            seen: set[str] = set()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"{key.value} stands twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
            return node

        def compose_document(self) -> yaml.Node:
            node: yaml.Node = super().compose_document()
            size(node)
            return node

    try:
        return yaml.load(text, Loader)
    except RecursionError as error:
        raise yaml.MarkedYAMLError(problem="it is nested too deep") from error


def yaml_fault(error: Exception) -> str:
    """Says why a text is no YAML, and where; without the line itself, which may hold a key."""
    mark = getattr(error, "problem_mark", None)
    place = f" in line {mark.line + 1}" if mark else ""
    return f"{getattr(error, 'problem', None) or getattr(error, 'reason', None) or type(error).__name__}{place}"


def _message(error: BaseException, longest: int = 300) -> str:
    try:
        return " ".join(str(error).split())[:longest]
    except Exception:  # noqa: BLE001  a user's class may do anything
        return "(it has no message: its __str__ fails)"


_OUR_IMPORTS = (
    str(Path(__file__).resolve().parent / "plugins" / f"{name}.py") for name in ("compat", "loader")
)
_IMPORT_SYSTEM = ("<frozen", str(importlib.__file__), *_OUR_IMPORTS)


def describe(error: BaseException) -> str:
    """Describes an exception in one line: type, message, and the file and line that raised it.

    An import that fails in a user's code is that code's line, not that of the import system or of our finder.
    """
    message = _message(error)
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    place = None
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith(_IMPORT_SYSTEM):
            place = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{text} ({place})" if place else text
