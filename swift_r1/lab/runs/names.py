"""What runs are called beside one another, and the flags that tell them apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from swift_r1.record.folder import RunFolder

_NOT_TOLD = ("output_dir", "add_version", "report_to", "run_name")


def names_of(runs: Sequence[RunFolder]) -> list[str]:
    """Returns a name for each run, no two alike: its `--run_name`, else that of its folder."""
    found = [str(run.args.get("run_name") or run.name) for run in runs]
    twice = Counter(found)
    return [
        name if twice[name] == 1 else f"{name} · {run.name}"
        for name, run in zip(found, runs, strict=True)
    ]


def different_flags(runs: Sequence[RunFolder]) -> dict[str, list[str]]:
    """Returns the values of each flag that was given to one of the runs, and that they do not have alike, as they are
    typed."""
    found = {}
    for name in sorted({name for run in runs for name in _given(run)}):
        values = [_typed(run.args.get(name)) for run in runs]
        if len(set(values)) > 1 and name not in _NOT_TOLD:
            found[name] = values
    return found


def _given(run: RunFolder) -> set[str]:
    """Returns the flags of a run's command; all where a config file has them, or the command is not known."""
    words = run.command[2:]
    if not words or not words[0].startswith("--"):
        return set(run.args)
    given = {word[2:].partition("=")[0] for word in words if word.startswith("--")}
    return given & set(run.args)


def _typed(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(map(_typed, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
