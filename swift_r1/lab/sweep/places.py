"""The places of runs that run beside each other: cores of its own for each, and GPUs if there are some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swift_r1.errors import UsageError
from swift_r1.lab.sweep.flags import AUTO
from swift_r1.lab.sweep.points import PlannedRun
from swift_r1.launch.colocated_servers import devices_of
from swift_r1.launch.environment import cpu_ranges, cpu_shares, has_gpu, usable_cpus
from swift_r1.runtime.hardware import hardware


@dataclass(frozen=True)
class RunSlot:
    """The CPUs of one run, whose number says how many threads it has, and variables that name its GPUs."""

    cpus: Sequence[int]
    variables: Mapping[str, str]

    def __str__(self) -> str:
        """Returns the words that are written before a command."""
        devices = (f"{name}={value}" for name, value in self.variables.items())
        return " ".join([*devices, f"taskset -c {cpu_ranges(self.cpus)}"])


def find_places(
    parallel: str, runs: Sequence[PlannedRun], environ: Mapping[str, str]
) -> list[RunSlot]:
    """Returns as many places as runs may run beside each other, at most one for each run. Raises UsageError: there is
    not that much here."""
    gpu = any(has_gpu({**environ, **run.args.process_variables}) for run in runs)
    cpus = usable_cpus()
    each = max(run.world.nproc_per_node for run in runs)
    units, unit = (max(1, len(hardware(environ)["gpus"])), "GPU") if gpu else (len(cpus), "core")
    if parallel != AUTO:
        count = int(parallel)
        if count * each > max(units, each):
            raise UsageError(
                f"--parallel {count} needs {count * each} {unit}s, {each} for each run; here are {units}"
            )
    else:
        count = max(1, units // each)
        if not gpu and count > 1:
            count = min(count, _memory_allows(runs))
    count = min(count, len(runs))
    devices = (
        devices_of(count * each, each, environ, cpus, True) if gpu and count > 1 else [{}] * count
    )
    return [
        RunSlot(own, variables)
        for own, variables in zip(cpu_shares(cpus, count), devices, strict=True)
    ]


def _memory_allows(runs: Sequence[PlannedRun]) -> int:
    """Returns how many runs the memory that is free now is enough for, each taking what the largest is estimated to,
    with a tower: rows are not read here."""
    import psutil

    from swift_r1.models.shape import shape_of
    from swift_r1.training.memory import estimated

    kinds = {run.point: run for run in runs}.values()
    most = max(
        estimated(run.args, shape_of(run.args.model, towers=True), run.world, None).peak
        * run.world.nproc_per_node
        for run in kinds
    )
    return max(1, int(psutil.virtual_memory().available // most))
