"""`swift rlhf --estimate true`: what a rank will need, next to what the machine has; nothing is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from swift_r1.arguments.rlhf import RlhfArguments
from swift_r1.arguments.world import World
from swift_r1.cli.environment import has_gpu
from swift_r1.errors import EXIT_OK
from swift_r1.training.estimate import GIB, Estimate, changes, estimate
from swift_r1.training.model_shape import ModelShape, shape_of

_LIBRARIES = {"trainer": 0.10 * GIB, "adapters": 0.05 * GIB, "deepspeed": 0.06 * GIB}
"""What a trainer has imported beside this process's torch and transformers; measured."""
_CONTEXT = 0.6 * GIB
"""What a CUDA context and its libraries take of a GPU."""


def run_estimate(args: RlhfArguments, world: World) -> int:
    """Prints the table and what would save most. Returns the exit code.

    Raises:
        UsageError: the model's config cannot be read.
    """
    from rich.console import Console
    from rich.table import Table

    shape = shape_of(args.model)
    gpu = has_gpu(os.environ)
    found = estimated(args, shape, world, gpu)
    table = Table(title="Memory of one rank, estimated", title_justify="left", pad_edge=False)
    table.add_column("part", style="bold")
    table.add_column("GiB", justify="right")
    table.add_column("when")
    for name, size in found.parts.items():
        table.add_row(name, f"{size / GIB:.2f}", "always")
    for phase, parts in found.phases.items():
        note = "" if phase == found.highest_phase else "; not at the same time, so not counted"
        for name, size in parts.items():
            table.add_row(name, f"{size / GIB:.2f}", f"in {phase}{note}")
    table.add_row("at most", f"{found.peak / GIB:.2f}", "", style="bold")
    for name, size in found.on_host.items():
        table.add_row(f"{name}, in host memory", f"{size / GIB:.2f}", "always")
    console = Console(width=max(100, Console().width))
    console.print(table)
    bound = "--max_length" if args.max_length else "taken, for want of --max_length"
    print(f"for prompts of up to {found.prompt_tokens} tokens ({bound}), {found.tokens:,} tokens a forward pass")
    print(room(found, world, gpu))
    print(advice(args, shape, world, gpu, found))
    return EXIT_OK


def estimated(args: RlhfArguments, shape: ModelShape, world: World, gpu: bool) -> Estimate:
    """Of these flags on this machine. Taken for its libraries is what this process holds: to be asked early."""
    stage, offload = zero_of(args)
    more = {"trainer": True, "adapters": args.train_type != "full", "deepspeed": stage is not None}
    libraries = _CONTEXT if gpu else _resident() + sum(_LIBRARIES[name] for name, on in more.items() if on)
    return estimate(args, shape, world.size, libraries=libraries, stage=stage, offload=offload, gpu=gpu)


def zero_of(args: RlhfArguments) -> tuple[int | None, tuple[bool, bool]]:
    """ZeRO's stage, None for plain torch, and whether it offloads the optimizer and the parameters."""
    if args.deepspeed is None:
        return None, (False, False)
    from swift_r1.training.backends.deepspeed_config import read_config

    zero = read_config(args.deepspeed).get("zero_optimization", {})
    parts = [zero.get(key, {}).get("device", "none") for key in ("offload_optimizer", "offload_param")]
    return zero.get("stage", 0), (parts[0] not in ("none", None), parts[1] not in ("none", None))


def room(found: Estimate, world: World, gpu: bool) -> str:
    """What the machine has, in a line."""
    if gpu:
        import torch

        free, total = torch.cuda.mem_get_info()
        fits = "fits" if found.peak <= free else "does NOT fit"
        return f"this GPU: {total / GIB:.1f} GiB, {free / GIB:.1f} GiB of them free: it {fits}"
    import psutil

    memory = psutil.virtual_memory()
    needed = found.peak * world.nproc_per_node
    fits = "fits" if needed <= memory.available else "does NOT fit"
    ranks = f" for {world.nproc_per_node} ranks" if world.nproc_per_node > 1 else ""
    return (
        f"this machine: {memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} GiB of them free: "
        f"{needed / GIB:.2f} GiB{ranks} {fits}"
    )


def advice(args: RlhfArguments, shape: ModelShape, world: World, gpu: bool, found: Estimate | None = None) -> str:
    """The largest part, and the two flags that would save most, of those that save a twentieth or more."""
    found = found or estimated(args, shape, world, gpu)
    savings = {flag: found.peak - estimated(other, shape, world, gpu).peak for flag, other in changes(args)}
    worth = (found.peak - found.parts["libraries"]) / 20
    best = [flag for flag in sorted(savings, key=savings.__getitem__, reverse=True) if savings[flag] > worth]
    largest = f"the largest part is {found.largest} ({found.counted[found.largest] / GIB:.2f} GiB)"
    if not best:
        return f"{largest}; no flag would save much"
    tips = " and ".join(f"{flag} (saves {savings[flag] / GIB:.2f} GiB)" for flag in best[:2])
    return f"{largest}; what would help most: {tips}"


def advice_for(args_json: Mapping[str, object], world: World) -> str:
    """`advice` for the content of an args.json."""
    args = RlhfArguments.from_dict(args_json["args"])  # type: ignore[arg-type]
    return advice(args, shape_of(args.model), world, has_gpu(os.environ))


def _resident() -> float:
    """Bytes that this process holds now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024.0
    return 0.0
