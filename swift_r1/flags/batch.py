"""The batch of a run that is resumed: on another number of processes the same flags stand for the same batch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift_r1.algorithms.methods import LOSSES
from swift_r1.flags.output import LAST
from swift_r1.flags.world import World
from swift_r1.record.folder import newest_version

if TYPE_CHECKING:
    from swift_r1.flags.rlhf import RlhfArguments

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


def round_faults(args: RlhfArguments, given: frozenset[str], world: World) -> Iterator[str]:
    """Yields where the completions of a round do not divide into groups and micro-batches."""
    if args.generation_batch_size is not None and args.steps_per_generation is not None:
        return  # only one of them may be given
    processes = args.counted_for(given, world.size)
    micro_batch = args.per_device_train_batch_size * processes
    across = (
        f"--per_device_train_batch_size {args.per_device_train_batch_size} x {processes} processes"
    )
    accumulation = args.gradient_accumulation_steps
    micro_batches = args.steps_per_generation or args.micro_batches_per_round
    size = args.generation_batch_size
    if size is not None:
        if size % micro_batch:
            near = _near_multiples(size, micro_batch)
            yield f"--generation_batch_size {size} is not a multiple of {micro_batch} ({across}): {near}"
            return
        micro_batches = size // micro_batch
    elif (chosen := args.chosen_accumulation(given, processes)) is not None:
        accumulation = micro_batches = chosen
        groups = args.num_generations
        if micro_batch * chosen > MOST_TIMES * max(micro_batch, LEAST_BATCH, groups):
            fits = [n for n in range(2, 2 * groups) if not micro_batch % n or not n % micro_batch]
            nearest = sorted(fits, key=lambda number: abs(number - groups))[:2]
            yield (
                f"--num_generations {groups}: a micro-batch of {micro_batch} ({across}) has no whole groups, and a step of "
                f"{chosen} of them, which has, would be of {micro_batch * chosen} completions, {chosen} times as many: "
                + whole_groups(args.per_device_train_batch_size, processes, groups)
                + f"; or --num_generations {' or '.join(map(str, nearest))}; or, if it is meant, "
                f"--gradient_accumulation_steps {chosen}"
            )
            return
    # a part of an optimizer step: all of it is generated at once
    if accumulation % micro_batches == 0:
        micro_batches = accumulation
    if micro_batches % accumulation:
        yield (
            f"{micro_batches} micro-batches are generated at once, which is not a multiple of "
            f"--gradient_accumulation_steps {accumulation}: {_near_multiples(micro_batches, accumulation)} "
            "for --steps_per_generation"
        )
        return
    completions = micro_batch * micro_batches
    if completions % args.num_generations:
        yield (
            f"a round of {completions} completions ({across} x {micro_batches} micro-batches) does not divide into "
            f"groups of --num_generations {args.num_generations}: change --per_device_train_batch_size, "
            "--steps_per_generation, --gradient_accumulation_steps or --num_generations so that it does"
        )
        return
    loss = LOSSES[args.loss_type]
    step = micro_batch * accumulation
    if loss.labels is not None and step % args.num_generations:
        yield (
            f"{loss.chosen_by} compares all completions of a prompt, and an optimizer step of {step} ({across} x "
            f"{accumulation} accumulation steps) splits groups of --num_generations {args.num_generations}"
        )
    longest = (args.max_length or 0) + args.max_completion_length
    most = args.max_tokens_per_micro_batch
    if most is not None and most < longest:
        yield (
            f"--max_tokens_per_micro_batch {most} is less than one completion may take with its prompt: {longest} "
            "tokens (--max_length and --max_completion_length)"
        )


def whole_groups(size: int, processes: int, groups: int) -> str:
    """Says which sizes near `--per_device_train_batch_size` make a micro-batch of whole groups."""
    near = _near_multiples(size, groups // math.gcd(groups, processes))
    return f"{near} for --per_device_train_batch_size"


def _near_multiples(value: int, divisor: int) -> str:
    below = value // divisor * divisor
    return f"use {below} or {below + divisor}" if below else f"use {below + divisor}"
