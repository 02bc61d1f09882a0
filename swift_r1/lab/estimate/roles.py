"""The job, and the memory of each role: trainers, replicas, judge and teacher."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.lab.estimate.chips import Chip
from swift_r1.lab.estimate.model import Model
from swift_r1.lab.estimate.phases import ServerRoofline, TrainerRoofline, at_once
from swift_r1.lab.estimate.work import Efficiency, Round
from swift_r1.training.memory import (
    CONTEXT_BYTES,
    EMBEDDED_CACHE_BYTES,
    ENGINE_BYTES,
    WIDTHS,
    MemoryEstimate,
    estimate,
    trained_numbers,
)
from swift_r1.training.room import SPARE, chosen_cut, open_flags, smallest_cut

Mode = Literal["server", "colocate", "embedded"]


@dataclass(frozen=True)
class ServerRole:
    """A judge or teacher: servers of another model."""

    name: str
    model: Model
    replicas: int
    tensor_parallel: int
    width: float
    cache_bytes: float | None = None


@dataclass(frozen=True)
class Job:
    """A run to be estimated, whatever the layout. Hashable by identity: nothing in it changes.

    Attributes:
        args: flags of the run, resolved.
        critic: of PPO.
        share: of a GPU's memory that a rollout server takes.
        most: completions at once in a server.
        cache_bytes: for keys and values, of each GPU of a rollout server; None: what is left of `share`.
        chip, server_chip: a device of the trainer, and of a server (default: the same); CPUs are shared by both.
    """

    args: RlhfArguments
    model: Model
    round: Round
    chip: Chip
    use: Efficiency
    per_node: int
    critic: Model | None = None
    share: float = 0.9
    most: int = 128
    cache_width: float | None = None
    cache_bytes: float | None = None
    server_chip: Chip | None = None
    others: tuple[ServerRole, ...] = ()

    @property
    def updated(self) -> int:
        """Returns the completions of an optimizer step."""
        return self.args.completions_per_step

    @property
    def width(self) -> float:
        """Returns the bytes of a weight in training and generation."""
        return WIDTHS[self.args.torch_dtype or self.model.shape.dtype]

    @property
    def engine(self) -> Chip:
        return self.server_chip or self.chip

    @property
    def cached(self) -> float:
        """Returns the bytes of a number in a rollout server's cache."""
        return self.cache_width or self.width

    @property
    def engine_bytes(self) -> float:
        return 0.0 if self.chip.is_cpu else ENGINE_BYTES

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """Bytes on one device of a role, by part; `room`: of the device."""

    role: str
    parts: Mapping[str, float]
    room: float
    note: str = ""

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.room


@lru_cache(maxsize=4096)
def trainer_of(job: Job, ranks: int, stage: int | None, beside: bool = False) -> TrainerRoofline:
    """Returns the processes that train, with micro-batches as the flags make them on so many ranks, or as `swift rlhf`
    would choose them, `beside` an engine or alone."""
    own = max(1, -(-job.updated // ranks))  # completions of a rank in a step
    args = _cut(job, ranks, stage, beside)
    micro_batches = -(-own // min(args.per_device_train_batch_size, own))
    if args.max_tokens_per_micro_batch is not None:
        tokens = own * job.round.trained_tokens / job.round.completions
        micro_batches = min(own, math.ceil(tokens / args.max_tokens_per_micro_batch))
    passes = int(job.round.updates > 1 or job.args.kl_in_reward or job.critic is not None)
    passes += job.args.wants_reference + (job.args.teacher_path is not None)
    return TrainerRoofline(
        ranks=ranks,
        per_node=job.per_node,
        stage=stage,
        micro_batches=micro_batches,
        width=job.width,
        passes=passes,
        recomputes=args.gradient_checkpointing,
        trained=_trained(job),
    )


@lru_cache(maxsize=64)
def _trained(job: Job) -> int:
    return trained_numbers(job.args, job.model.shape)[0]


@lru_cache(maxsize=4096)
def trainer_memory(job: Job, ranks: int, stage: int | None, beside: bool = False) -> MemoryEstimate:
    """Estimates the memory of one rank, as `swift rlhf --estimate true` does, with batch flags that are counted for so
    many ranks."""
    return _memory(job, _cut(job, ranks, stage, beside), ranks, stage)


@lru_cache(maxsize=4096)
def _cut(job: Job, ranks: int, stage: int | None, beside: bool) -> RlhfArguments:
    """Returns the flags with the batch counted for so many ranks, and with micro-batches and checkpointing as `swift
    rlhf` chooses them on a GPU where nobody gives them. `beside` an engine the trainer gets half of what neither needs."""
    own = max(1, -(-job.updated // ranks))
    micro = min(job.args.per_device_train_batch_size, own)
    generated = -(-job.round.completions // (micro * ranks))
    args = replace(
        job.args,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=-(-own // micro),
        steps_per_generation=generated,
        generation_batch_size=generated * micro * ranks,
    )
    if job.chip.is_cpu or not open_flags(args):
        return args

    def peak(cut: RlhfArguments) -> float:
        return _memory(job, cut, ranks, stage).peak

    least = smallest_cut(args)
    room = job.chip.memory * (1 - SPARE)
    if beside:
        engine = job.model.total * job.width + job.engine_bytes
        room -= engine + max(0.0, room - peak(least) - engine) / 2
    return chosen_cut(args, ranks, peak, room) or least


def _memory(job: Job, args: RlhfArguments, ranks: int, stage: int | None) -> MemoryEstimate:
    return estimate(
        args,
        job.model.shape,
        ranks,
        CONTEXT_BYTES,
        stage,
        card=None if job.chip.is_cpu else job.chip.memory,
        critic=None if job.critic is None else job.critic.shape,
    )


def server_of(
    job: Job,
    tensor_parallel: int,
    mode: Mode = "server",
    free: float | None = None,
) -> ServerRoofline:
    """Returns a replica on `tensor_parallel` devices, of each of which `free` bytes (default: `share` of its memory)
    are its own. Without room for the weights the cache is empty."""
    room = job.engine.memory * job.share if free is None else free
    if mode == "embedded":
        tokens = EMBEDDED_CACHE_BYTES / (job.model.kv_numbers * job.cached)
        return ServerRoofline(
            tensor_parallel,
            job.width,
            job.cached,
            tokens,
            1 << 20,
            job.per_node,
        )
    return _server(
        job,
        job.model,
        tensor_parallel,
        job.width,
        job.cached,
        room,
        job.cache_bytes,
    )


def other_server(job: Job, role: ServerRole) -> ServerRoofline:
    """Returns a replica of a judge or teacher."""
    room = job.chip.memory * job.share
    return _server(
        job,
        role.model,
        role.tensor_parallel,
        role.width,
        role.width,
        room,
        role.cache_bytes,
    )


def _server(
    job: Job,
    model: Model,
    devices: int,
    width: float,
    cache_width: float,
    room: float,
    cache_bytes: float | None,
) -> ServerRoofline:
    left = (
        room - model.total * width / devices - job.engine_bytes
        if cache_bytes is None
        else cache_bytes
    )
    tokens = max(0.0, left) * devices / (model.kv_numbers * cache_width)
    return ServerRoofline(devices, width, cache_width, tokens, job.most, job.per_node)


def replica_memory(job: Job, server: ServerRoofline) -> RoleMemory:
    """Returns the memory of one device of a rollout replica."""
    batch = at_once(server, job.round)
    most = f", at most {server.most} (--vllm_max_num_seqs)" if batch >= server.most else ""
    parts = _parts(job, job.model, server)
    return RoleMemory(
        "rollout", parts, job.engine.memory, f"{batch:,.0f} completions at once{most}"
    )


def other_memory(job: Job, role: ServerRole) -> RoleMemory:
    """Returns the memory of one device of a judge or teacher."""
    server = other_server(job, role)
    room = job.chip.memory * (1 if server.cache_tokens else job.share)
    return RoleMemory(role.name, _parts(job, role.model, server), room)


def _parts(job: Job, model: Model, server: ServerRoofline) -> dict[str, float]:
    weights = model.total * server.width / server.tensor_parallel
    cache = server.cache_tokens * model.kv_numbers * server.cache_width / server.tensor_parallel
    return {"weights": weights, "keys and values": cache} | (
        {"engine": job.engine_bytes} if job.engine_bytes else {}
    )
