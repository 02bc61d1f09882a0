"""A run's folder: what it is, how far it is, and whether a process still works in it."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from swift_r1.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_TERMINATED,
    UsageError,
    for_each,
    one_line,
)
from swift_r1.record.lines import GrowingFile, json_rows, read_rows
from swift_r1.runtime.files import read_text
from swift_r1.runtime.processes import run_folder_is_held

Status = Literal["running", "ended", "killed", "failed", "interrupted"]

DIAGNOSIS = "diagnosis.jsonl"
COMPLETIONS = "completions.jsonl"
EVAL_COMPLETIONS = "eval_completions.jsonl"
EPISODE_TIMES = "episode_times.jsonl"
WARM_START = "sft"  # the folder of a run's warm start in that of the run (`swift launch`)
DEFAULT = "output"  # the folder of `--output_dir` by default
_VERSION = re.compile(r"v(\d+)-\d{8}-\d{6}$")
_SIGNS = ("args.json", "logging.jsonl", COMPLETIONS)
_OF_EVALUATION = "settings.json"  # beside completions.jsonl: the folder is one of `swift eval`
_DEPTH = 3  # how far below a given folder runs are looked for: OUTPUT/model/v0-...
_MOST_LOOKED_AT = 20_000  # folders
_NOT_ENTERED = (
    "checkpoint-",
    ".",
    "images",
    "tokens",
    "spans",
    "tensorboard",
    "wandb",
    "trackio",
)


@dataclass(frozen=True)
class RunFolder:
    """One run, ours or ms-swift's. What is read of it once is kept: make a new one to look again."""

    path: Path  # absolute
    name: str  # short; differs from those of the runs that were opened with it
    problems: list[str] = field(default_factory=list, compare=False)  # found so far, a line each

    @cached_property
    def _file(self) -> Mapping[str, Any]:
        return self._object("args.json", needed=True)

    @property
    def args(self) -> Mapping[str, Any]:
        """Returns every flag; empty where args.json is missing or damaged. ms-swift's file has nothing else."""
        return _mapping(self._file.get("args", self._file))

    @property
    def command(self) -> list[str]:
        """Returns the words of the command line."""
        words = self._file.get("command")
        return [str(word) for word in words] if isinstance(words, list) else []

    @property
    def supervised(self) -> bool:
        """Says whether it learns from answers that are in its data, without rewards."""
        return self.command[1:2] == ["sft"] or self.args.get("rlhf_type", "grpo") not in (
            "grpo",
            "ppo",
        )

    @property
    def replays(self) -> bool:
        """Says whether it trains on completions, and their rewards, that another run has recorded (`swift replay`)."""
        return self._file.get("replay") is not None

    @property
    def versions(self) -> Mapping[str, str]:
        return _mapping(self._file.get("versions"))

    @property
    def hardware(self) -> Mapping[str, Any]:
        return _mapping(self._file.get("hardware"))

    @property
    def plan(self) -> Mapping[str, Any]:
        """Returns the fields of `flags.plan.Plan`; of ms-swift's run `total_steps` at most."""
        steps = self.args.get("max_steps")
        known = {"total_steps": steps} if isinstance(steps, int) and steps > 0 else {}
        return _mapping(self._file.get("plan")) or known

    @property
    def started(self) -> float | None:
        """Returns Unix seconds of the start, or of the last resume."""
        started = self._file.get("started")
        return float(started) if isinstance(started, int | float) else None

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """summary.json; empty before the end."""
        return self._object("summary.json")

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """events.jsonl."""
        return self._rows("events.jsonl")

    @cached_property
    def findings(self) -> list[dict[str, Any]]:
        """diagnosis.jsonl: what the run said of itself."""
        return self._rows(DIAGNOSIS)

    def invalid_rewards(self, step: int, prompt_id: str) -> list[dict[str, Any]]:
        """Returns the rows of invalid_rewards.jsonl of a prompt in a step."""
        return [
            row
            for row in self._read_anew("invalid_rewards.jsonl")
            if (row.get("step"), row.get("prompt_id")) == (step, prompt_id)
        ]

    def episode_times(self, step: int) -> dict[tuple[Any, Any], dict[str, Any]]:
        """Returns the lines of `episode_times.jsonl` of a step, by request and number of the completion."""
        return {
            (row.get("request_id"), row.get("number")): row
            for row in self._read_anew(EPISODE_TIMES)
            if row.get("step") == step
        }

    def _read_anew(self, name: str) -> Iterator[dict[str, Any]]:
        """Yields the rows of a file that may be long, and may have grown."""
        file = GrowingFile(self.path / name)
        while lines := file.read():
            yield from json_rows(lines)[0]

    def _rows(self, name: str) -> list[dict[str, Any]]:
        rows, problems = read_rows(self.path / name)
        self.problems.extend(problems)
        return rows

    @cached_property
    def status(self) -> Status:
        """`killed`: it has not said how it ended, and no process of this machine works in it."""
        if run_folder_is_held(self.path):
            return "running"
        code = self.summary.get("exit_code", EXIT_OK if self.summary else None)
        if isinstance(code, int):
            if code in (EXIT_INTERRUPTED, EXIT_TERMINATED):
                return "interrupted"
            return "ended" if code == EXIT_OK else "failed"
        marks = ("started", "resumed", "stopping", "failed", "ended")
        if self._file and "args" not in self._file:
            return "ended"  # of ms-swift, which does not say how
        last = next(
            (event["kind"] for event in reversed(self.events) if event.get("kind") in marks), None
        )
        return "failed" if last == "failed" else "killed"

    def _object(self, name: str, needed: bool = False) -> Mapping[str, Any]:
        try:
            content = json.loads(read_text(self.path / name, "replace"))
        except FileNotFoundError:
            if needed:
                self.problems.append(f"{name} is missing: it is not known what was run")
            return {}
        except OSError as error:
            self.problems.append(f"{name} cannot be read: {error.strerror or one_line(error)}")
            return {}
        except (ValueError, RecursionError) as error:
            self.problems.append(f"{name} is damaged: {one_line(error)}")
            return {}
        if not isinstance(content, dict):
            self.problems.append(f"{name} is damaged: not a JSON object")
            return {}
        return content


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def checkpoints_of(folder: Path) -> dict[int, Path]:
    """Returns the checkpoints in a run's folder by their step; one that exists is whole."""
    found = {}
    for path in folder.glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        if step.isdecimal():
            found[int(step)] = path
    return found


def is_run(folder: Path) -> bool:
    # False too where that cannot be found out
    there = [name for name in _SIGNS if os.path.isfile(folder / name)]
    return bool(there) and not (there == [COMPLETIONS] and _is_evaluation(folder))


def _is_evaluation(folder: Path) -> bool:
    return os.path.isfile(folder / _OF_EVALUATION)


def newest_version(base: Path) -> tuple[int, Path | None]:
    """Returns the highest N of the folders `vN-...` in `base`, and that folder; -1 and None where there is none."""
    entries = base.iterdir() if base.is_dir() else ()
    found = [(int(match[1]), entry) for entry in entries if (match := _VERSION.match(entry.name))]
    return max(found, default=(-1, None))


def find_runs(paths: Sequence[str | Path] = ()) -> list[RunFolder]:
    """Returns the runs that `paths` name, each a run's folder or one with runs in it; without any those in `output`.
    The oldest first, each once. Raises UsageError with a line for each path that is neither."""
    if not paths and not Path(DEFAULT).exists():
        raise UsageError(
            f"there is no folder {DEFAULT} here: name the folder of a run (--output_dir of swift rlhf)"
        )
    found = {run: None for runs in for_each(paths or (DEFAULT,), _runs_of) for run in runs}
    opened = [RunFolder(path, name) for path, name in zip(found, _names(list(found)), strict=True)]
    return sorted(opened, key=lambda run: (run.started or 0.0, run.path))


def _runs_of(path: str | Path) -> list[Path]:
    folder = Path(path).expanduser().absolute()
    try:
        if not folder.exists():
            raise UsageError(f"{path}: there is no such folder")
        if not folder.is_dir():
            raise UsageError(
                f"{path} is a file: name the folder of a run, in which args.json and logging.jsonl are"
            )
        folder = folder.resolve()
        found = _with_warm_start(folder) if is_run(folder) else _below(folder)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or one_line(error)}") from error
    if not found and _is_evaluation(folder):
        raise UsageError(f"{path} is an evaluation, no run: `swift eval --compare` reads it")
    if not found and is_run(folder.parent):
        raise UsageError(f"{path} is a part of a run: name the run's folder, {folder.parent}")
    if not found:
        raise UsageError(
            f"{path}: there is no run in it (a folder with args.json, logging.jsonl or completions.jsonl)"
        )
    return found


def _with_warm_start(run: Path) -> list[Path]:
    return [one for one in (run / WARM_START, run) if is_run(one)]


def _below(folder: Path) -> list[Path]:
    """Returns the runs in a folder, level by level. Raises OSError where the folder itself cannot be read."""
    found: list[Path] = []
    level = [folder]
    looked_at = 0
    for _ in range(_DEPTH):
        below: list[Path] = []
        for parent in level:
            try:
                entries = sorted(
                    entry for entry in parent.iterdir() if not entry.name.startswith(_NOT_ENTERED)
                )
                folders = [
                    entry for entry in entries if os.path.isdir(entry) and not os.path.islink(entry)
                ]
                runs = [entry for entry in folders if is_run(entry)]
            except OSError:  # closed, or removed meanwhile
                if parent == folder:
                    raise
                continue
            looked_at += len(folders)
            found += [one for run in runs for one in _with_warm_start(run)]
            below += [entry for entry in folders if entry not in runs]
        level = below
        if looked_at > _MOST_LOOKED_AT:
            break
    return found


def _names(paths: Sequence[Path]) -> list[str]:
    """Returns the last part of each path, with as many before it as tell them apart."""
    names: dict[Path, str] = {}
    for parts in range(1, 1 + max(len(path.parts) for path in paths)):
        ends = Counter(path.parts[-parts:] for path in paths)
        for path in paths:
            if ends[path.parts[-parts:]] == 1:
                names.setdefault(path, "/".join(path.parts[-parts:]))
    return [names[path] for path in paths]
