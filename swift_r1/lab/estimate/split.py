"""The best division of G GPUs among training and generation: all that fit are estimated, the fastest come first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from swift_r1.lab.estimate.layout import Estimate, Layout, estimate_layout
from swift_r1.lab.estimate.roles import Job, server_of, trainer_memory
from swift_r1.training.memory import GIB

_STAGES = (1, 2, 3)
_KEPT = 5  # layouts


@dataclass(frozen=True, slots=True)
class Split:
    """The best layouts, in ascending seconds; `why_not` if nothing fits."""

    best: tuple[Estimate, ...]
    tried: int
    why_not: str = ""


def best_split(job: Job, gpus: int) -> Split:
    """Returns the best layouts of at most `gpus` GPUs, those of judge and teacher among them.

    Trainers are on one machine or on whole ones; a replica is in one machine, or on whole ones if the model needs it.
    GPUs may be left over, so that more of them are never slower.
    """
    gpus -= sum(role.replicas * role.tensor_parallel for role in job.others)
    found = dict[tuple[int, str, int, int], Estimate]()
    tried = 0
    for layout in layouts(job, gpus):
        tried += 1
        one = estimate_layout(job, layout)
        key = (layout.ranks, layout.mode, layout.replicas, layout.tensor_parallel)
        if not one.faults and (key not in found or one.step < found[key].step):
            found[key] = one
    best = sorted(found.values(), key=lambda one: (one.step, one.layout.devices))
    return Split(tuple(best[:_KEPT]), tried, "" if best else _why_not(job))


def layouts(job: Job, gpus: int) -> Iterator[Layout]:
    """Yields all layouts that are tried."""
    sizes = _tensor_parallel(job, gpus)
    for ranks in _rank_counts(job, gpus):
        for stage in _stages(job, ranks):
            for size in sizes:
                replicas = (gpus - ranks) // size
                while replicas:  # fewer of them may be faster, since each is sent the weights
                    yield Layout(ranks, stage, "server", replicas, size)
                    replicas //= 2
                if ranks % size == 0 and size <= job.per_node and not job.args.async_generate:
                    yield Layout(ranks, stage, "colocate", ranks // size, size)


def _stages(job: Job, ranks: int) -> list[int | None]:
    """Returns the stages of ZeRO with which a rank's memory suffices."""
    if ranks == 1:
        return [None]
    stages = (3,) if job.args.fsdp else _STAGES
    return [stage for stage in stages if _fits(job, ranks, stage)]


def _rank_counts(job: Job, gpus: int) -> Iterator[int]:
    yield from range(1, min(gpus, job.per_node, job.updated) + 1)
    yield from range(2 * job.per_node, min(gpus, job.updated) + 1, job.per_node)


def _tensor_parallel(job: Job, gpus: int) -> list[int]:
    """1, 2, 4, ... within a machine; whole machines only where the model fits no smaller replica."""
    need = job.round.prompt_tokens + job.round.longest
    found = list[int]()
    size = 1
    while size <= gpus:
        fits = server_of(job, size).cache_tokens >= need
        if fits and (size <= job.per_node or not found):
            found.append(size)
        size *= 2
    return found


def _fits(job: Job, ranks: int, stage: int | None) -> bool:
    return trainer_memory(job, ranks, stage).peak <= job.chip.memory


def _why_not(job: Job) -> str:
    """Returns the reason, and the least that the model needs."""
    ranks = next((one for one in _more(job) if _fits(job, one, None if one == 1 else 3)), None)
    need = job.round.prompt_tokens + job.round.longest
    size = next(
        (one for one in (2**n for n in range(11)) if server_of(job, one).cache_tokens >= need), None
    )
    if ranks is None or size is None:
        role = "training" if ranks is None else "a rollout replica"
        part = ""
        if ranks is None:
            held = trainer_memory(job, 1024, 3)
            part = f": a rank of 1,024 with ZeRO-3 needs {held.peak / GIB:.0f} GiB, {held.largest} most"
        return f"{role} does not fit on any number of GPUs of {job.chip.memory / GIB:.0f} GiB{part}"
    return (
        f"too few of {job.chip.memory / GIB:.0f} GiB: training needs {ranks} (ZeRO-3), a replica "
        f"{size}, so at least {ranks + size}, or {max(ranks, size)} that take turns "
        "(--sleep_level, --offload_model)"
    )


def _more(job: Job) -> Iterator[int]:
    yield from range(1, job.per_node + 1)
    yield from range(2 * job.per_node, 1025, job.per_node)
