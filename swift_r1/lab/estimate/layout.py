"""A run on given devices: what each role holds, what each phase takes, and which role the others wait for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from swift_r1.lab.estimate.chips import Chip
from swift_r1.lab.estimate.phases import (
    ServerRoofline,
    TrainerRoofline,
    at_once,
    decode_seconds,
    generate_seconds,
    least_train_seconds,
    logprob_seconds,
    prefill_seconds,
    train_seconds,
)
from swift_r1.lab.estimate.roles import (
    Job,
    Mode,
    RoleMemory,
    ServerRole,
    other_memory,
    other_server,
    replica_memory,
    server_of,
    trainer_memory,
    trainer_of,
)
from swift_r1.lab.estimate.wire import completion_bytes, delta_bytes, push_seconds, whole_bytes
from swift_r1.sync.writer import fanout_of
from swift_r1.training.memory import GIB

JUDGE_TOKENS = 256.0  # of a judge's answer


@dataclass(frozen=True, slots=True)
class Layout:
    """Says who is where. `stage` is ZeRO's; `replicas` are the trainer's own engines unless `mode` is server."""

    ranks: int
    stage: int | None
    mode: Mode = "server"
    replicas: int = 1
    tensor_parallel: int = 1

    @property
    def devices(self) -> int:
        return self.ranks + (self.replicas * self.tensor_parallel if self.mode == "server" else 0)

    def __str__(self) -> str:
        train = f"train {self.ranks}" + ("" if self.stage is None else f" (ZeRO-{self.stage})")
        if self.mode == "embedded":
            return train
        size = "" if self.tensor_parallel == 1 else f" x {self.tensor_parallel}"
        return f"{train} + rollout {self.replicas}{size}" + (
            ", taking turns" if self.mode == "colocate" else ""
        )


@dataclass(frozen=True)
class Estimate:
    """The figures of a layout.

    Attributes:
        phases: seconds of a round.
        step: seconds of a round as a whole.
        overlapped: training and generation at the same time.
        faults: what does not fit.
        least: seconds that training cannot be faster than, by what limits it.
    """

    layout: Layout
    phases: Mapping[str, float]
    step: float
    overlapped: bool
    memory: tuple[RoleMemory, ...]
    bytes: Mapping[str, float]
    concurrency: float
    faults: tuple[str, ...] = field(default=())
    least: Mapping[str, float] = field(default_factory=dict)

    @property
    def bottleneck(self) -> str:
        """Returns the role that takes longest."""
        train = sum(self.phases.get(name, 0.0) for name in ("log-probs", "train", "push"))
        sides = {"train": train, "rollout": self.phases["generate"]}
        sides |= {
            name: seconds
            for name, seconds in self.phases.items()
            if name in ("judge", "teacher", "reward")
        }
        return max(sides, key=sides.__getitem__)


def estimate_layout(job: Job, layout: Layout) -> Estimate:
    """Returns the memory, bytes and seconds of a layout, and what of it does not fit."""
    beside = layout.mode == "colocate"
    trainer = trainer_of(job, layout.ranks, layout.stage, beside)
    held = trainer_memory(job, layout.ranks, layout.stage, beside)
    room = job.chip.memory
    faults = list[str]()
    computed = f"{held.tokens:,} tokens at a time" + (
        ", computed again in the backward pass" if trainer.recomputes else ""
    )
    note = f"at most, in {held.highest_phase}; {computed}"
    memory = [RoleMemory("train", dict(held.counted), room, note)]
    free = None if layout.mode == "server" else room - held.peak
    server = server_of(job, layout.tensor_parallel, layout.mode, free)
    longest = job.round.prompt_tokens + job.round.longest
    running = min(at_once(server, job.round), job.round.completions / layout.replicas)
    if layout.mode != "embedded":
        memory.append(replica_memory(job, server))
    if held.peak > room:
        faults.append(
            f"a rank needs {held.peak / GIB:.1f} GiB of {room / GIB:.1f} ({held.largest} is the largest part)"
        )
    elif layout.mode != "embedded" and server.cache_tokens < longest:
        faults.append(
            f"a replica's cache has room for {server.cache_tokens:,.0f} tokens, and the longest prompt and completion "
            f"are {longest:,.0f}"
        )
    if layout.ranks > job.updated:
        faults.append(f"{layout.ranks} ranks for {job.updated} completions of an optimizer step")
    for role in job.others:
        memory.append(other_memory(job, role))
    for server_memory in memory[1:]:
        if not server_memory.fits:
            total = server_memory.total / GIB
            faults.append(
                f"{server_memory.role}: {total:.1f} GiB of {server_memory.room / GIB:.1f}"
            )
    phases, step, overlapped = _seconds(job, layout, trainer, server)
    sent = {
        "push, whole": whole_bytes(job.model.total, job.width),
        "push, changes": delta_bytes(job.model.total, job.width, job.use),
        "completion": completion_bytes(job.round),
    }
    return Estimate(
        layout,
        phases,
        step,
        overlapped,
        tuple(memory),
        sent,
        running,
        tuple(faults),
        least_train_seconds(job.model, job.chip, trainer, job.use, job.round),
    )


def _seconds(
    job: Job,
    layout: Layout,
    trainer: TrainerRoofline,
    server: ServerRoofline,
) -> tuple[dict[str, float], float, bool]:
    args = job.args
    round_ = job.round
    use = job.use
    ahead = (
        layout.mode == "server"
        and args.async_generate
        and args.max_staleness > 0
        and not job.chip.is_cpu
    )
    chip = job.engine if layout.mode == "server" else job.chip
    phases = {
        "generate": _generate(job, chip, layout.replicas, server, ahead and args.max_staleness > 1),
        "reward": use.reward_seconds * round_.completions,
        "log-probs": logprob_seconds(job.model, job.chip, trainer, use, round_),
        "train": train_seconds(job.model, job.chip, trainer, use, round_),
    }
    if job.critic is not None:
        phases["log-probs"] += logprob_seconds(
            job.critic, job.chip, replace(trainer, passes=1), use, round_
        )
        own = replace(trainer, trained=job.critic.total)
        phases["train"] += train_seconds(job.critic, job.chip, own, use, round_)
    if layout.mode != "embedded":
        transport, delta, fanout = _transport(job, layout)
        phases["push"] = push_seconds(
            job.model.total,
            job.width,
            job.chip,
            trainer,
            use,
            layout.replicas,
            layout.tensor_parallel,
            transport,
            delta,
            fanout,
        )
    phases |= {role.name: _other_seconds(job, role) for role in job.others}
    return phases, *_whole(phases, ahead)


def _whole(phases: Mapping[str, float], ahead: bool) -> tuple[float, bool]:
    """Returns the seconds of a round. With `--async_generate` the slower side counts, scoring being on the side of
    generation; a judge scores a completion while others are generated, so that the slower of both counts too."""
    trained = sum(phases.get(name, 0.0) for name in ("log-probs", "train", "push", "teacher"))
    generated = max(phases["generate"], phases.get("judge", 0.0)) + phases["reward"]
    return (max(trained, generated), True) if ahead else (trained + generated, False)


@lru_cache(maxsize=4096)
def _generate(
    job: Job,
    chip: Chip,
    replicas: int,
    server: ServerRoofline,
    overlapped: bool,
) -> float:
    return generate_seconds(
        job.model,
        chip,
        server,
        job.use,
        job.round,
        replicas,
        overlapped=overlapped,
    )


def _transport(job: Job, layout: Layout) -> tuple[str, bool, int]:
    """Returns how a push goes: what the flags say; with `auto` shared memory on one machine, or that of the GPU to an
    engine on it, else changes by http, down a tree of servers."""
    one_machine = layout.devices <= job.per_node
    transport = job.args.weight_transport
    if transport == "auto":
        transport = "shm" if one_machine or layout.mode == "colocate" else "http"
        if layout.mode == "colocate" and not job.chip.is_cpu:
            transport = "ipc"
    fanout = job.args.weight_fanout
    if one_machine and fanout is None:
        fanout = 0
    delta = job.args.weight_delta != "false" and job.args.train_type == "full"
    return transport, delta, fanout_of(fanout, layout.replicas)


def _other_seconds(job: Job, role: ServerRole) -> float:
    """Returns the seconds of a judge, which reads each prompt and completion and answers in `JUDGE_TOKENS`, or of a
    teacher, which only reads."""
    server = other_server(job, role)
    round_ = job.round
    read = round_.prompt_tokens + round_.completion_tokens
    own = round_.completions / role.replicas
    seconds = prefill_seconds(role.model, job.chip, server, job.use, own, read)
    if role.name == "judge":
        batch = min(own, float(server.most), max(1.0, server.cache_tokens / (read + JUDGE_TOKENS)))
        step = decode_seconds(
            role.model,
            job.chip,
            server,
            job.use,
            batch,
            read + JUDGE_TOKENS / 2,
        )
        seconds += own / batch * JUDGE_TOKENS * step
    return seconds
