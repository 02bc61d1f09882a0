"""The batch of a run that is resumed: on another number of processes the same flags stand for the same batch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swift_r1.flags.output import LAST
from swift_r1.record.folder import newest_version

BATCH = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
    "num_mini_batches",
)
"""The flags that size a round and an optimizer step, counted for a number of processes."""
LEAST_BATCH = 16
"""Completions of an optimizer step where nothing says how many; ms-swift's number."""
MOST_TIMES = 2
"""The factor above which a step that is made larger, so that it holds whole groups, is refused."""
SIZES = (*BATCH, "chord_sft_per_device_train_batch_size")
"""All that `batch_sizes` depend on."""


def began_with(
    base: Path, add_version: bool, resume_from: str
) -> tuple[Mapping[str, Any], int] | None:
    """Returns the resolved flags of the run that `--resume_from_checkpoint` goes on with, and its number of processes.

    They are those of its newest checkpoint, or of its args.json before the first one; the batch is to be as there. None
    where there is no run yet, or these files are not ours, which is reported where they are checked.
    """
    if resume_from == LAST:
        run = newest_version(base)[1] if add_version else base
        if run is None:
            return None
        checkpoints = sorted(run.glob("checkpoint-*[0-9]"), key=_step_of, reverse=True)
        files = [checkpoint / "state" / "run.json" for checkpoint in checkpoints] + [
            run / "args.json"
        ]
    else:
        files = [Path(resume_from) / "state" / "run.json"]
    for path in files:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            flags = content["fingerprint"]["args"] if path.name == "run.json" else content["args"]
            return flags, processes_of(flags)
        except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
            continue
    return None


def batch_sizes(flags: Mapping[str, Any]) -> tuple[int, int, int]:
    """Returns the completions of a round and of an optimizer step, and a step's demonstrations, over all processes.

    Args:
        flags: resolved.
    """
    counted = flags["gradient_accumulation_steps"] * processes_of(flags)
    answers = flags["chord_sft_per_device_train_batch_size"] or 0
    return (
        flags["generation_batch_size"],
        counted * flags["per_device_train_batch_size"],
        counted * answers,
    )


def processes_of(flags: Mapping[str, Any]) -> int:
    """Returns the number of processes that the resolved flags are counted for."""
    each = flags["per_device_train_batch_size"] * flags["steps_per_generation"]
    return int(flags["generation_batch_size"] // each)


def _step_of(checkpoint: Path) -> int:
    number = checkpoint.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def whole_groups(size: int, processes: int, groups: int) -> str:
    """Says which sizes near `--per_device_train_batch_size` make a micro-batch of whole groups."""
    near = near_multiples(size, groups // math.gcd(groups, processes))
    return f"{near} for --per_device_train_batch_size"


def near_multiples(value: int, divisor: int) -> str:
    below = value // divisor * divisor
    return f"use {below} or {below + divisor}" if below else f"use {below + divisor}"
