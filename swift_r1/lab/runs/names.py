"""What runs are called beside one another: as they were named, else by what tells them apart; and the flags that do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from swift_r1.record.folder import RunFolder
from swift_r1.runtime.files import read_text

NAME = "name.txt"
_LONGEST = 80  # characters of a name
_STAMP = re.compile(r"(v\d+-)?\d{8}-\d{6}")
_MOST_FLAGS = 3  # in a name
_NOT_TOLD = ("output_dir", "add_version", "report_to", "run_name")


def names_of(runs: Sequence[RunFolder]) -> list[str]:
    """Returns a name for each run, no two alike: the one in its `name.txt`; else the `--run_name` that was typed; else
    its folder, without folders that are named by the time, if that tells it from the others; else the flags that do."""
    folders = _folders(runs)
    alike = Counter(folders)
    found = []
    for run, folder in zip(runs, folders, strict=True):
        same = [other for other, its in zip(runs, folders, strict=True) if its == folder]
        found.append(
            given_name(run)
            or _word(run, "run_name")
            or (folder if alike[folder] == 1 else _told(run, folder, same))
        )
    twice = Counter(found)
    return [
        name if twice[name] == 1 else f"{name} · {run.name}"
        for name, run in zip(found, runs, strict=True)
    ]


def given_name(run: RunFolder) -> str:
    """Returns the name that somebody gave to a run; empty where nobody did."""
    try:
        text = read_text(run.path / NAME, "replace")
    except OSError:
        return ""
    return " ".join(text.split())[:_LONGEST]


def give_name(run: RunFolder, name: str) -> None:
    """Writes a run's name into its folder; an empty one is taken away. Raises OSError."""
    if name.strip():
        (run.path / NAME).write_text(f"{name.strip()[:_LONGEST]}\n", encoding="utf-8")
    else:
        (run.path / NAME).unlink(missing_ok=True)


def different_flags(runs: Sequence[RunFolder]) -> dict[str, list[str]]:
    """Returns the values of each flag that the runs do not have alike, as they are typed: those that were given to one
    of them first."""
    given = {name for run in runs for name in _given(run)}
    found = {}
    for name in sorted({name for run in runs for name in run.args}):
        values = [_typed(run.args.get(name)) for run in runs]
        if len(set(values)) > 1 and name not in _NOT_TOLD:
            found[name] = values
    return {name: found[name] for name in sorted(found, key=lambda name: name not in given)}


def was_given(name: str, runs: Sequence[RunFolder]) -> bool:
    """Returns whether a flag stands in the command of one of the runs, or may stand in its config file."""
    return any(name in _given(run) for run in runs)


def _folders(runs: Sequence[RunFolder]) -> list[str]:
    """Returns as few of the last folders of each run's path as tell apart those that can be, without time stamps."""
    parts = [[part for part in run.path.parts if not _STAMP.fullmatch(part)] for run in runs]
    whole = Counter(map(tuple, parts))
    found = []
    for one in parts:
        count = 1
        while (
            count < len(one)
            and sum(
                number for other, number in whole.items() if other[-count:] == tuple(one[-count:])
            )
            > whole[tuple(one)]
        ):
            count += 1
        found.append("/".join(one[-count:]) or "run")
    return found


def _told(run: RunFolder, folder: str, same: Sequence[RunFolder]) -> str:
    """Returns a name for one of several runs of a folder."""
    place = same.index(run)
    flags = different_flags(same)
    told = []
    for name in [name for name in flags if was_given(name, same)][:_MOST_FLAGS]:
        value = _word(run, name) or flags[name][place] or "none"
        told.append(f"{name} {Path(value).name if '/' in value else value}")
    return " · ".join(told or [folder])


def _given(run: RunFolder) -> set[str]:
    """Returns the flags of a run's command; all where a config file has them, or the command is not known."""
    words = run.command[2:]
    if not words or not words[0].startswith("--"):
        return set(run.args)
    return {word[2:].partition("=")[0] for word in words if word.startswith("--")}


def _word(run: RunFolder, flag: str) -> str:
    """Returns what was typed behind a flag in a run's command, the last time; empty where that is not known."""
    found = ""
    for word, *values in _by_flag(run.command[2:]):
        name, equals, value = word.removeprefix("--").partition("=")
        if name == flag:
            found = " ".join([value] * bool(equals) + values)
    return found


def _by_flag(words: Sequence[str]) -> Iterator[list[str]]:
    """Yields each flag of a command with the words behind it."""
    places = [place for place, word in enumerate(words) if word.startswith("--")]
    for begin, end in pairwise([*places, len(words)]):
        yield list(words[begin:end])


def _typed(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(map(_typed, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
