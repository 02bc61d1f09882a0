"""What a GPU's memory decides where the user does not: the engine's share of it, and how a step is cut. All of it is in
proportion to the memory that is free at the start; none of it changes what is learned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from swift_r1.flags.batch import began_with
from swift_r1.flags.run import RunFlags
from swift_r1.flags.world import World
from swift_r1.launch.colocated_servers import DEFAULT_GPU_SHARE
from swift_r1.models.shape import shape_of
from swift_r1.runtime.hardware import GpuMemory
from swift_r1.training.memory import GIB, estimated
from swift_r1.training.room import SPARE, chosen_cut, divided, engine_need, open_flags, smallest_cut

MOST_REWARD_WORKERS = 8
_KEPT = ("use_vllm", "vllm_mode", "max_tokens_per_micro_batch", "gradient_checkpointing")
UNKNOWN = "nvidia-smi does not tell this GPU's memory"


def for_gpu(
    args: RunFlags,
    completions: int,
    world: World,
    memory: GpuMemory | None,
    cores: int,
    images: bool = False,
) -> tuple[RunFlags, list[str]]:
    """Returns the arguments with what a GPU of this `memory` (None: it does not tell) decides, for rounds of so many
    completions, and the lines about it. What reads `images` is counted where rows have some; what it computes is not.
    """
    args, about_share = engine_share(args, completions, world, memory, images)
    args, about_cut = step_cut(args, completions, world, memory, images)
    args, about_workers = reward_workers(args, cores)
    return args, [line for line in (about_share, *about_cut, about_workers) if line is not None]


def as_it_began(args: RunFlags) -> RunFlags:
    """Returns the arguments of a resumed run with what its GPU decided at its beginning, for the flags that nobody gives
    now: another choice would give other last digits."""
    if args.resume_from_checkpoint is None or args.resume_only_model:
        return args
    base = Path(args.folder_of_runs).absolute()
    beginning = began_with(base, args.add_version, args.resume_from_checkpoint)
    flags: Mapping[str, Any] = {} if beginning is None else beginning[0]
    names = [name for name in _KEPT if name in flags and name not in args.given]
    return replace(
        args,
        **{name: flags[name] for name in names},
        given=args.given.union(name for name in names if flags[name] is not None),
    )


def why_no_room(
    args: RunFlags,
    completions: int,
    world: World,
    memory: GpuMemory | None,
    images: bool = False,
) -> str | None:
    """Says why a GPU has no room for vLLM beside the trainer; None where it has."""
    if memory is None:
        return f"{UNKNOWN}, so whether vLLM has room beside the trainer is not known"
    beside = replace(args, use_vllm=True, vllm_mode="colocate")
    shape = shape_of(args.model, images)
    if divided(beside, shape, world, memory, completions) is not None:
        return None
    need = engine_need(beside, shape, world, memory, completions)
    trainer = estimated(smallest_cut(beside), shape, world, memory.total)
    return (
        f"this GPU has no room for both: {_free(memory)}, of which the trainer needs {_gib(trainer.peak)} at least and "
        f"vLLM {_gib(need.least)}"
    )


def engine_share(
    args: RunFlags,
    completions: int,
    world: World,
    memory: GpuMemory | None,
    images: bool = False,
) -> tuple[RunFlags, str | None]:
    """Returns the arguments with `vllm_gpu_memory_utilization` for an engine beside the trainer, and the line about it;
    None where the user has decided, or there is no such engine."""
    if not args.colocates or args.vllm_gpu_memory_utilization is not None:
        return args, None
    flag = "--vllm_gpu_memory_utilization"
    shape = shape_of(args.model, images)
    found = memory if memory is None else divided(args, shape, world, memory, completions)
    if memory is None or found is None:
        why = UNKNOWN if memory is None else why_no_room(args, completions, world, memory, images)
        return args, f"{flag} stays at its default: {why}"
    share = int(1000 * found.engine / memory.total) / 1000
    cache = found.engine - found.need.fixed
    line = (
        f"{flag} {share:g}: {_gib(found.engine)}, as {_free(memory)}; {_gib(cache)} of it are for keys and values of "
        f"{found.need.completions:,} completions at once, which take {_gib(found.need.wanted - found.need.fixed)} at "
        "their longest"
    )
    return replace(args, vllm_gpu_memory_utilization=share), line


def step_cut(
    args: RunFlags,
    completions: int,
    world: World,
    memory: GpuMemory | None,
    images: bool = False,
) -> tuple[RunFlags, list[str]]:
    """Returns the arguments with micro-batches and checkpointing as large and as little as the memory allows, and the
    lines about them; none where the user has decided."""
    free = open_flags(args)
    if not free:
        return args, []
    names = " and ".join(f"--{name}" for name in sorted(free))
    stay = f"{names} stay{'s' if len(free) == 1 else ''} at the default"
    if world.nnodes > 1:
        return args, [f"{stay}: on several nodes, whose GPUs may differ, only the flags decide"]
    if memory is None:
        return args, [f"{stay}: {UNKNOWN}"]
    shape = shape_of(args.model, images)
    room = trainer_room(args, completions, world, memory, images)

    def peak_of(one: RunFlags) -> float:
        return estimated(one, shape, world, memory.total).peak

    cut = chosen_cut(args, world.size, peak_of, room)
    if cut is None:
        least = peak_of(smallest_cut(args))
        return args, [
            f"{stay}: by the memory estimate nothing fits: the least is {_gib(least)}, and {_gib(room)} of this "
            "GPU are for the trainer (--estimate true says what would fit)"
        ]
    lines = []
    peak = peak_of(cut)
    if "max_tokens_per_micro_batch" in free:
        lines.append(
            f"--max_tokens_per_micro_batch {cut.max_tokens_per_micro_batch}: at most {_gib(peak)} by the memory "
            f"estimate, of {_gib(room)} that this GPU has for the trainer"
        )
    if "gradient_checkpointing" in free:
        other = peak_of(replace(cut, gradient_checkpointing=not cut.gradient_checkpointing))
        why = f"with it {_gib(other)} would be enough, and the step would compute a third more"
        if cut.gradient_checkpointing:
            why = f"without it micro-batches of this size would need {_gib(other)}"
        lines.append(
            f"--gradient_checkpointing {str(cut.gradient_checkpointing).lower()}: {_gib(peak)} of {_gib(room)}; {why}"
        )
    return cut, lines


def trainer_room(
    args: RunFlags, completions: int, world: World, memory: GpuMemory, images: bool = False
) -> float:
    """Returns the bytes of a GPU that are for the trainer while it trains."""
    usable = memory.free - SPARE * memory.total
    if not args.colocates:
        return usable
    found = divided(args, shape_of(args.model, images), world, memory, completions)
    if found is not None and args.sleep_level:
        return found.trainer
    return usable - (args.vllm_gpu_memory_utilization or DEFAULT_GPU_SHARE) * memory.total


def fits_on_gpu(
    args: RunFlags, completions: int, world: World, memory: GpuMemory, images: bool = False
) -> bool:
    """Says whether a GPU has room for the trainer, with micro-batches as small as nobody forbids, and for an engine
    beside it."""
    shape = shape_of(args.model, images)
    if args.colocates and args.vllm_gpu_memory_utilization is None:
        return divided(args, shape, world, memory, completions) is not None
    least = estimated(smallest_cut(args), shape, world, memory.total)
    return least.peak <= trainer_room(args, completions, world, memory, images)


def reward_workers(args: RunFlags, cores: int) -> tuple[RunFlags, str | None]:
    """Returns the arguments with as many reward processes as a GPU machine's cores allow, and the line about it; None
    where the user has decided, or rewards have no processes."""
    if "reward_num_workers" in args.given or args.reward_isolation == "inline":
        return args, None
    count = max(args.reward_num_workers, min(MOST_REWARD_WORKERS, cores // 2))
    line = f"--reward_num_workers {count}: half of {cores} cores, at most {MOST_REWARD_WORKERS}"
    return replace(args, reward_num_workers=count), line


def _free(memory: GpuMemory) -> str:
    return f"{memory.free / GIB:.1f} of {_gib(memory.total)} are free"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
