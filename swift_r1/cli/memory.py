"""`--estimate true`: what a rank will need, beside what the machine has; what cannot fit is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil

from swift_r1.errors import EXIT_OK, EXIT_USAGE
from swift_r1.flags.run import RunFlags
from swift_r1.flags.world import World
from swift_r1.launch.gpu_defaults import UNKNOWN, fits_on_gpu, for_gpu
from swift_r1.models.multimodal import is_multimodal
from swift_r1.models.shape import shape_of, transformers_config
from swift_r1.runtime.hardware import GpuMemory, usable_cpus
from swift_r1.training.memory import (
    GIB,
    advice,
    card_of,
    estimated,
    flags_that_fit,
    trained_numbers,
)

if TYPE_CHECKING:
    from swift_r1.training.memory import MemoryEstimate


def print_estimate(args: RunFlags, world: World, gpu: bool, memory: GpuMemory | None = None) -> int:
    """Prints what a rank will need, next to what the machine has, and what would save most; loads nothing. `memory` is
    that of its GPUs, where it tells. Returns the exit code, that of a usage error for what cannot fit. UsageError where
    the model's config cannot be read."""
    asked = args
    if gpu:
        args, lines = for_gpu(args, round_size(args), world, memory, len(usable_cpus()))
        for line in lines:
            print(line)
    card = card_of(gpu, memory)
    shape = shape_of(args.model)
    estimate = estimated(args, shape, world, card)
    engine = 0.0
    if memory is not None and args.colocates:
        engine = (args.vllm_gpu_memory_utilization or 0.0) * memory.total
    _print_table(estimate, engine)
    bound = "--max_length" if args.max_length else "assumed, without --max_length"
    print(
        f"for prompts of up to {estimate.prompt_tokens} tokens ({bound}), {estimate.tokens:,} tokens a forward pass"
    )
    print(room(estimate.peak + engine, world, gpu, memory))
    if is_multimodal(transformers_config(args.model)):
        print(_with_images(args, world, card))
    refusal = _refusal(asked, world, gpu, memory)
    print(refusal or advice(args, shape, world, card, estimate))
    return EXIT_USAGE if refusal else EXIT_OK


def _with_images(args: RunFlags, world: World, card: float | None) -> str:
    """Says what a rank holds where rows have images: the rows are not read here."""
    shape = shape_of(args.model, towers=True)
    held = estimated(args, shape, world, card).peak
    trained = trained_numbers(args, shape)[0] - trained_numbers(args, shape_of(args.model))[0]
    return (
        f"if rows have images: at most {held / GIB:.2f} GiB, with the {shape.tower / 1e6:,.1f} million numbers of what "
        f"reads them, {trained / 1e6:,.1f} million of them trained; without what these compute of an image, whose tokens "
        "are part of the prompt's"
    )


def _print_table(estimate: MemoryEstimate, engine: float) -> None:
    from rich.table import Table

    from swift_r1.runtime.terminal import Terminal

    table = Table(title="Memory of one rank, estimated", title_justify="left", pad_edge=False)
    table.add_column("part", style="bold")
    table.add_column("GiB", justify="right")
    table.add_column("when")
    for name, size in estimate.parts.items():
        table.add_row(name, f"{size / GIB:.2f}", "always")
    for phase, parts in estimate.phases.items():
        note = "" if phase == estimate.highest_phase else "; not at the same time, so not counted"
        for name, size in parts.items():
            table.add_row(name, f"{size / GIB:.2f}", f"in {phase}{note}")
    table.add_row("at most", f"{estimate.peak / GIB:.2f}", "", style="bold")
    if engine:
        table.add_row("vLLM beside it", f"{engine / GIB:.2f}", "always")
    for name, size in estimate.on_host.items():
        table.add_row(f"{name}, in host memory", f"{size / GIB:.2f}", "always")
    Terminal(width=max(100, Terminal().width)).print(table)


def room(needed: float, world: World, gpu: bool, memory: GpuMemory | None = None) -> str:
    """Says whether this machine has what a rank is estimated to need, in words."""
    if gpu:
        if memory is None:
            return f"this GPU: {UNKNOWN}"
        fits = "fits" if needed <= memory.free else "does NOT fit"
        return f"this GPU: {memory.total / GIB:.1f} GiB, {memory.free / GIB:.1f} GiB of them free: it {fits}"
    host = psutil.virtual_memory()
    needed *= world.nproc_per_node
    fits = "fits" if needed <= host.available else "does NOT fit"
    ranks = f" for {world.nproc_per_node} ranks" if world.nproc_per_node > 1 else ""
    return (
        f"this machine: {host.total / GIB:.1f} GiB, {host.available / GIB:.1f} GiB of them free: "
        f"{needed / GIB:.2f} GiB{ranks} {fits}"
    )


def _refusal(args: RunFlags, world: World, gpu: bool, memory: GpuMemory | None) -> str | None:
    """Says what would make a run fit that cannot, even where nothing else used the machine; None where it can."""
    if gpu and memory is None:
        return None
    fits: Callable[[RunFlags], bool]
    if memory is not None:
        alone = GpuMemory(memory.total, memory.total)

        def fits(other: RunFlags) -> bool:
            return fits_on_gpu(other, round_size(other), world, alone)
    else:
        shape = shape_of(args.model)
        total = float(psutil.virtual_memory().total)

        def fits(other: RunFlags) -> bool:
            return estimated(other, shape, world, None).peak * world.nproc_per_node <= total

    if fits(args):
        return None
    flags = flags_that_fit(args, fits, on_gpu=gpu)
    if not flags:
        less = "a smaller model, shorter completions or more devices"
        return f"it cannot fit, and no two flags would make it fit: it takes {less}"
    return f"it cannot fit; {' and '.join(flags)} would make it fit"


def round_size(args: RunFlags) -> int:
    """Returns the completions of a round of resolved arguments."""
    return int(args.generation_batch_size or args.completions_per_step)
