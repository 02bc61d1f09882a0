"""The section of an engine in a run file, checked."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from swift_r1.errors import UsageError
from swift_r1.launch.cluster.run_file import RunFile

_KINDS: dict[type, str] = {int: "a whole number of at least 0", str: "text", list: "a list", dict: "a mapping"}


def read_options(run: RunFile, engine: str, known: Mapping[str, type]) -> dict[str, Any]:
    """What the file has for an engine. Raises UsageError: keys that are not `known`, or values of another type."""
    options = run.options.get(engine, {})
    if faults := list(option_faults(options, known)):
        raise UsageError(*(f"{run.path}: {engine}: {fault}" for fault in faults))
    return dict(options)


def option_faults(options: Mapping[str, Any], known: Mapping[str, type]) -> Iterator[str]:
    """A line for each key that is not known, or has a value of another type."""
    for name, value in options.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            yield f"there is no key {name}: " + (
                f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            )
        elif type(value) is not known[name] or (known[name] is int and value < 0):
            yield f"{name} must be {_KINDS[known[name]]}, not {value!r}"
