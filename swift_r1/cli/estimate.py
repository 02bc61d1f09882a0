"""`swift rlhf --estimate true`: what a rank will need, next to what the machine has; nothing is loaded."""

from __future__ import annotations

import os

from swift_r1.arguments.rlhf import RlhfArguments
from swift_r1.arguments.world import World
from swift_r1.errors import EXIT_OK
from swift_r1.launch.environment import has_gpu
from swift_r1.models.shape import shape_of
from swift_r1.training.estimate import GIB, MemoryEstimate
from swift_r1.training.memory import advice, estimated


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


def room(found: MemoryEstimate, world: World, gpu: bool) -> str:
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
