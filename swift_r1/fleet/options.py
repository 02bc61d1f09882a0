"""The section of a backend in a run file, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swift_r1.errors import UsageError
from swift_r1.fleet.run_file import RunFile, unknown

_KINDS: dict[type, str] = {
    int: "a whole number of at least 0",
    str: "text",
    list: "a list",
    dict: "a mapping",
}


def read_options(run: RunFile, backend: str, known: Mapping[str, type]) -> dict[str, Any]:
    """Returns what the file has for a backend. Raises UsageError: keys that are not `known`, or values of another
    type."""
    options = dict(run.options.get(backend, {}))
    faults = option_faults(options, known)
    if faults:
        raise UsageError(*(f"{run.path}: {backend}: {fault}" for fault in faults))
    return options


def hosts_faults(run: RunFile, instead: str) -> list[str]:
    """A line for each role with `hosts`, for a backend that cannot be told names."""
    return [f"{run.path}: roles: {name}: hosts: {instead}" for name, role in run.roles.items() if role.hosts]


def option_faults(options: Mapping[str, Any], known: Mapping[str, type]) -> list[str]:
    """A line for each key that is not known, or has a value of another type."""
    faults = list(unknown(options, known, "key"))
    for name, value in options.items():
        kind = known.get(name)
        if kind is not None and (type(value) is not kind or (isinstance(value, int) and value < 0)):
            faults.append(f"{name} must be {_KINDS[kind]}, not {value!r}")
    return faults
