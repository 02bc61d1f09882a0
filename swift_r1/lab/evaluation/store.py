"""The folder of an evaluation: its settings, and every completion as it comes. A killed evaluation continues here.

A question's completions are written together, when all of them are there and graded; what a kill cut off in the middle
is removed, and that question is asked again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_r1.errors import UsageError
from swift_r1.record.metrics import JsonLines

SETTINGS = "settings.json"
COMPLETIONS = "completions.jsonl"
REPORT = "report.json"

CompletionRow = dict[str, Any]
Key = tuple[str, str]


class CompletionStore(JsonLines):
    """The completions in a folder; `counts` has their number for each question, `done` the rows of each that is
    answered, by benchmark and `prompt_id`. Raises UsageError: the file holds what no such evaluation wrote."""

    def __init__(self, folder: Path, counts: Mapping[Key, int]) -> None:
        path = folder / COMPLETIONS
        self.done, end = _read(path, counts)
        super().__init__(path)
        os.truncate(path, end)

    def add(self, key: Key, rows: Sequence[CompletionRow]) -> None:
        for row in rows:
            self.write(row)
        self.done[key] = list(rows)


def open_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Writes the settings of a new evaluation; raises UsageError where the folder has others, or something else."""
    path = folder / SETTINGS
    if path.is_file():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UsageError(f"{path} cannot be read: {error}") from error
        found = list(differences(before, json.loads(json.dumps(settings))))
        if found:
            raise UsageError(
                f"{folder} holds an evaluation with other settings: give another --output_dir, or the same settings",
                *found,
            )
        return
    if (folder / COMPLETIONS).exists():
        raise UsageError(
            f"{folder} has {COMPLETIONS} but no {SETTINGS}: it is not an evaluation's folder; give another --output_dir"
        )
    write_whole(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Renamed into place, so that a file that exists is whole. Where that fails nothing is left behind."""
    beside = path.with_name(f"{path.name}.tmp")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read_rows(folder: Path) -> list[CompletionRow]:
    """Returns all completions of a finished evaluation. Raises UsageError: there are none, or a line cannot be read."""
    path = folder / COMPLETIONS
    if not path.is_file():
        raise UsageError(f"{folder} is not the folder of an evaluation: it has no {COMPLETIONS}")
    rows: list[CompletionRow] = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        row = _row(line)
        if row is None:
            raise UsageError(f"{path}:{number}: no completion")
        rows.append(row)
    return rows


def _read(path: Path, counts: Mapping[Key, int]) -> tuple[dict[Key, list[CompletionRow]], int]:
    """Returns the answered questions, and where the last of them ends."""
    done: dict[Key, list[CompletionRow]] = {}
    if not path.is_file():
        return done, 0
    key: Key | None = None
    group: list[CompletionRow] = []
    position = end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            position += len(line)
            row = _row(line) if line.endswith(b"\n") else None
            if row is None:
                if file.read(1):
                    raise UsageError(
                        f"{path}:{number}: a line that no evaluation wrote; remove it, or start again"
                    )
                break  # cut off by a kill
            if key != (row["benchmark"], row["prompt_id"]):
                key = (row["benchmark"], row["prompt_id"])
                group = []
            group.append(row)
            if key not in counts or key in done:
                raise UsageError(
                    f"{path}:{number}: {key[1]} is not a question of this evaluation, or is there twice"
                )
            if len(group) == counts[key]:
                done[key], end = group, position
    return done, end


def _row(line: bytes) -> CompletionRow | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return (
        row
        if isinstance(row, dict) and {"benchmark", "prompt_id", "index", "reward"} <= row.keys()
        else None
    )


def differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """Yields what has become otherwise in JSON, a line each."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*before, *now]):
            yield from differences(
                before.get(key), now.get(key), f"{where}{'.' if where else ''}{key}"
            )
    elif before != now:
        texts = (json.dumps(value, ensure_ascii=False) for value in (before, now))
        yield f"{where}: " + " became ".join(
            text if len(text) <= 100 else f"{text[:97]}..." for text in texts
        )
