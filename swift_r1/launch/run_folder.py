"""The folder of a run: versioned or not, never one that holds another run, and its args.json."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_r1.arguments.rlhf import RlhfArguments
from swift_r1.arguments.world import World
from swift_r1.errors import UsageError
from swift_r1.runtime.libraries import package_versions

_VERSION = re.compile(r"v(\d+)-\d{8}-\d{6}$")
_SIGNS_OF_A_RUN = ("args.json", "logging.jsonl", "completions.jsonl", "checkpoint-*")


def run_folder_faults(args: RlhfArguments, world: World) -> list[str]:
    """What speaks against the output folder, before anything is made."""
    folder = Path(str(args.output_dir))
    if world.nnodes > 1 and args.add_version:
        return ["several nodes need --add_version false, so that all of them write to the same folder"]
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir():
        return [f"--output_dir {folder}: {existing} is a file"]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"--output_dir {folder}: no permission to write in {existing}"]
    fresh = not args.add_version and world.node_rank == 0 and args.resume_from_checkpoint is None
    if fresh and (found := holds_run(folder)):
        return [
            f"--output_dir {folder} holds a run already ({found}): give another folder, go on with that run "
            "(--resume_from_checkpoint last), or leave --add_version true for a new folder inside it"
        ]
    return []


def holds_run(folder: Path) -> str | None:
    """The name of something in `folder` that only a run leaves there; None where there is nothing."""
    return next((path.name for sign in _SIGNS_OF_A_RUN for path in folder.glob(sign)), None)


def newest_version(base: Path) -> Path | None:
    """The folder `vN-...` in `base` with the highest N."""
    if not base.is_dir():
        return None
    found = [(int(match[1]), entry) for entry in base.iterdir() if (match := _VERSION.match(entry.name))]
    return max(found)[1] if found else None


def make_run_folder(args: RlhfArguments, world: World) -> Path:
    """Makes and returns the run's folder (absolute): `vN-YYYYmmdd-HHMMSS` in `--output_dir`, or that itself.

    Raises:
        UsageError: the folder cannot be made.
    """
    base = Path(str(args.output_dir)).absolute()
    try:
        base.mkdir(parents=True, exist_ok=True)
        if not args.add_version:
            return base
        while True:
            taken = [int(match[1]) for entry in base.iterdir() if (match := _VERSION.match(entry.name))]
            folder = base / f"v{max(taken, default=-1) + 1}-{time.strftime('%Y%m%d-%H%M%S')}"
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                continue  # another run took the number just now
    except OSError as error:
        raise UsageError(f"--output_dir {args.output_dir}: {error.strerror or error}") from error


def write_args(
    folder: Path,
    args: RlhfArguments,
    world: World,
    words: Sequence[str],
    dataset: str,
    checkpoint: Path | None = None,
    prepared: Mapping[str, str] | None = None,
) -> Path:
    """Writes args.json: every resolved flag, the command line, package versions, the processes, a hash of the training
    data, where its rows lie prepared, and the checkpoint that the run goes on from.

    Secrets are left out. Nodes other than the first write `args-node<k>.json` beside it.
    """
    path = folder / ("args.json" if world.node_rank == 0 else f"args-node{world.node_rank}.json")
    content: Mapping[str, Any] = {
        "args": args.to_dict(),
        "run_dir": str(folder),
        "command": ["swift", "rlhf", *without_secrets(words)],
        "versions": package_versions(),
        "world_size": world.size,
        "dataset_hash": dataset,
        "prepared_data": dict(prepared or {}),
        "resumed_from": str(checkpoint) if checkpoint else None,
        "started": time.time(),
    }
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def without_secrets(words: Sequence[str]) -> list[str]:
    """A command line with the value of `--api_key` replaced by `***`."""
    shown: list[str] = []
    hide_next = False
    for word in words:
        name, equals, _ = word.partition("=")
        is_key = name.lstrip("-").replace("-", "_") == "api_key" and name.startswith("--")
        shown.append("***" if hide_next else f"{name}=***" if is_key and equals else word)
        hide_next = is_key and not equals
    return shown
