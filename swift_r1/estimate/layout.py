"""A run on given devices: what each role holds, what each phase takes, and which role the others wait for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from swift_r1.arguments.rlhf import RlhfArguments
from swift_r1.estimate.chips import Chip
from swift_r1.estimate.model import Model
from swift_r1.estimate.phases import (
    Server,
    Trainer,
    at_once,
    decode_seconds,
    generate_seconds,
    logprob_seconds,
    prefill_seconds,
    train_seconds,
)
from swift_r1.estimate.wire import completion_bytes, delta_bytes, push_seconds, whole_bytes
from swift_r1.estimate.work import Efficiency, Round
from swift_r1.training.backends.fsdp_config import read_fsdp
from swift_r1.training.memory import GIB, MemoryEstimate, estimate, zero_of

Mode = Literal["server", "colocate", "embedded"]

WIDTHS = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0}
DEFAULT_MAX_NUM_SEQS = 128  # vLLM's, as `swift rollout` starts it
JUDGE_TOKENS = 256.0  # of a judge's answer
_CONTEXT = 0.6 * GIB  # CUDA, and the libraries in a process
_ENGINE = 1.5 * GIB  # what vLLM holds beside weights and cache: activations of a prefill, CUDA graphs
_EMBEDDED_CACHE = 2 * GIB  # inference/engines/transformers.py


@dataclass(frozen=True)
class ServerRole:
    """A judge or teacher: servers of another model."""

    name: str
    model: Model
    replicas: int
    tensor_parallel: int
    width: float


@dataclass(frozen=True)
class Job:
    """What is asked, whatever the layout. Hashable by identity: nothing in it changes.

    Attributes:
        args: flags of the run, resolved.
        updated: completions of an optimizer step.
        width: bytes of a weight in training and generation.
        critic: of PPO.
        share: of a GPU's memory that a rollout server takes.
        most: completions at once in a server.
        chip, server_chip: a device of the trainer, and of a server (default: the same).
        taking_turns: servers and trainer are on the same cores.
    """

    args: RlhfArguments
    model: Model
    round: Round
    updated: int
    chip: Chip
    use: Efficiency
    width: float
    per_node: int
    critic: Model | None = None
    share: float = 0.9
    most: int = DEFAULT_MAX_NUM_SEQS
    cache_width: float | None = None
    server_chip: Chip | None = None
    others: tuple[ServerRole, ...] = ()
    taking_turns: bool = False

    @property
    def engine(self) -> Chip:
        return self.server_chip or self.chip

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


@dataclass(frozen=True, slots=True)
class Layout:
    """Who is where. `stage` as in `Trainer`; `replicas` are the trainer's own engines unless `mode` is server."""

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
        return f"{train} + rollout {self.replicas}{size}" + (", taking turns" if self.mode == "colocate" else "")


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


@dataclass(frozen=True)
class Estimate:
    """What a layout comes to.

    Attributes:
        phases: seconds of a round.
        step: seconds of a round as a whole.
        overlapped: training and generation at the same time.
        faults: what does not fit.
    """

    layout: Layout
    phases: Mapping[str, float]
    step: float
    overlapped: bool
    memory: tuple[RoleMemory, ...]
    bytes: Mapping[str, float]
    concurrency: float
    faults: tuple[str, ...] = field(default=())

    @property
    def bottleneck(self) -> str:
        """The role that takes longest."""
        train = sum(self.phases.get(name, 0.0) for name in ("log-probs", "train", "push"))
        sides = {"train": train, "rollout": self.phases["generate"]}
        sides |= {name: seconds for name, seconds in self.phases.items() if name in ("judge", "teacher", "reward")}
        return max(sides, key=sides.__getitem__)


@lru_cache(maxsize=4096)
def trainer_of(job: Job, ranks: int, stage: int | None) -> Trainer:
    """The processes that train, with micro-batches as the flags make them on so many ranks."""
    own = max(1, -(-job.updated // ranks))  # completions of a rank in a step
    micro = min(job.args.per_device_train_batch_size, own)
    passes = int(job.round.updates > 1 or job.args.kl_in_reward or job.critic is not None)
    passes += job.args.wants_reference + (job.args.teacher_path is not None)
    return Trainer(
        ranks=ranks,
        per_node=job.per_node,
        stage=stage,
        micro_batches=-(-own // micro),
        width=job.width,
        passes=passes,
        recomputes=job.args.gradient_checkpointing,
        trained=_trained(job),
    )


@lru_cache(maxsize=64)
def _trained(job: Job) -> int:
    from swift_r1.training.memory import trained_numbers

    return trained_numbers(job.args, job.model.shape)[0]


@lru_cache(maxsize=4096)
def trainer_memory(job: Job, ranks: int, stage: int | None) -> MemoryEstimate:
    """Of one rank, as `swift rlhf --estimate true` counts it."""
    own = max(1, -(-job.updated // ranks))
    micro = min(job.args.per_device_train_batch_size, own)
    args = replace(job.args, per_device_train_batch_size=micro, gradient_accumulation_steps=-(-own // micro))
    _, offload = zero_of(job.args)
    critic = None if job.critic is None else job.critic.shape
    gpu, fsdp = not job.chip.is_cpu, read_fsdp(args.fsdp) if args.fsdp else None
    return estimate(args, job.model.shape, ranks, _CONTEXT, stage, offload=offload, gpu=gpu, critic=critic, fsdp=fsdp)


def server_of(job: Job, tensor_parallel: int, mode: Mode = "server", free: float | None = None) -> Server:
    """A replica on `tensor_parallel` devices, of each of which `free` bytes (default: `share` of its memory) are its
    own. Without room for the weights the cache is empty."""
    room = job.engine.memory * job.share if free is None else free
    weights = job.model.total * job.width / tensor_parallel
    left = _EMBEDDED_CACHE if mode == "embedded" else room - weights - (0 if job.chip.is_cpu else _ENGINE)
    width = job.cache_width or job.width
    tokens = max(0.0, left) * tensor_parallel / (job.model.kv_numbers * width)
    most = 1 << 20 if mode == "embedded" else job.most
    return Server(tensor_parallel, job.width, width, tokens, most, job.per_node)


def estimate_layout(job: Job, layout: Layout) -> Estimate:
    """Memory, bytes and seconds of a layout, and what of it does not fit."""
    trainer, held = trainer_of(job, layout.ranks, layout.stage), trainer_memory(job, layout.ranks, layout.stage)
    room, faults = job.chip.memory, list[str]()
    memory = [RoleMemory("train", dict(held.counted), room, f"at most, in {held.highest_phase}")]
    free = None if layout.mode == "server" else room - held.peak
    server = server_of(job, layout.tensor_parallel, layout.mode, free)
    longest = job.round.prompt_tokens + job.round.longest
    running = min(at_once(server, job.round), job.round.completions / layout.replicas)
    if layout.mode != "embedded":
        memory.append(_replica_memory(job, layout, server))
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
        held_by = _other_memory(job, role)
        memory.append(held_by)
        if not held_by.fits:
            faults.append(f"{role.name}: {held_by.total / GIB:.1f} GiB of {held_by.room / GIB:.1f}")
    phases, step, overlapped = _seconds(job, layout, trainer, server)
    sent = {
        "push, whole": whole_bytes(job.model.total, job.width),
        "push, changes": delta_bytes(job.model.total, job.width, job.use),
        "completion": completion_bytes(job.round),
    }
    return Estimate(layout, phases, step, overlapped, tuple(memory), sent, running, tuple(faults))


def _seconds(job: Job, layout: Layout, trainer: Trainer, server: Server) -> tuple[dict[str, float], float, bool]:
    args, round_, use = job.args, job.round, job.use
    ahead = layout.mode == "server" and args.async_generate and args.max_staleness > 0 and not job.taking_turns
    chip = job.engine if layout.mode == "server" else job.chip
    phases = {
        "generate": _generate(job, chip, layout.replicas, server, ahead and args.max_staleness > 1),
        "reward": use.reward_seconds * round_.completions,
        "log-probs": logprob_seconds(job.model, job.chip, trainer, use, round_),
        "train": train_seconds(job.model, job.chip, trainer, use, round_),
    }
    if job.critic is not None:
        phases["log-probs"] += logprob_seconds(job.critic, job.chip, replace(trainer, passes=1), use, round_)
        own = replace(trainer, trained=job.critic.total)
        phases["train"] += train_seconds(job.critic, job.chip, own, use, round_)
    if layout.mode != "embedded":
        transport, delta = _transport(job, layout)
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
        )
    phases |= {role.name: _other_seconds(job, role) for role in job.others}
    return phases, *_whole(phases, ahead)


def _whole(phases: Mapping[str, float], ahead: bool) -> tuple[float, bool]:
    """Seconds of a round. With `--async_generate` the slower side counts, scoring being on the side of generation; a
    judge scores a completion while others are generated, so that the slower of both counts too."""
    trained = sum(phases.get(name, 0.0) for name in ("log-probs", "train", "push", "teacher"))
    generated = max(phases["generate"], phases.get("judge", 0.0)) + phases["reward"]
    return (max(trained, generated), True) if ahead else (trained + generated, False)


@lru_cache(maxsize=4096)
def _generate(job: Job, chip: Chip, replicas: int, server: Server, overlapped: bool) -> float:
    return generate_seconds(job.model, chip, server, job.use, job.round, replicas, overlapped=overlapped)


def _transport(job: Job, layout: Layout) -> tuple[str, bool]:
    """How a push goes: what the flag says; with `auto` shared memory on one machine, else changes by http."""
    asked = job.args.weight_transport
    one_machine = layout.devices <= job.per_node
    transport = asked if asked != "auto" else "shm" if one_machine or layout.mode == "colocate" else "http"
    return transport, job.args.weight_delta != "false" and job.args.train_type == "full"


def _replica_memory(job: Job, layout: Layout, server: Server) -> RoleMemory:
    weights = job.model.total * job.width / layout.tensor_parallel
    cache = server.cache_tokens * job.model.kv_numbers * server.cache_width / layout.tensor_parallel
    parts = {"weights": weights, "keys and values": cache} | ({} if job.chip.is_cpu else {"engine": _ENGINE})
    batch = at_once(server, job.round)
    most = f", at most {server.most} (--vllm_max_num_seqs)" if batch >= server.most else ""
    return RoleMemory("rollout", parts, job.engine.memory, f"{batch:,.0f} completions at once{most}")


def _other_server(job: Job, role: ServerRole) -> Server:
    left = job.chip.memory * job.share - role.model.total * role.width / role.tensor_parallel
    tokens = max(0.0, left - (0 if job.chip.is_cpu else _ENGINE)) * role.tensor_parallel
    return Server(
        role.tensor_parallel,
        role.width,
        role.width,
        tokens / (role.model.kv_numbers * role.width),
        job.most,
        job.per_node,
    )


def _other_memory(job: Job, role: ServerRole) -> RoleMemory:
    server = _other_server(job, role)
    cache = server.cache_tokens * role.model.kv_numbers * role.width / role.tensor_parallel
    weights = role.model.total * role.width / role.tensor_parallel
    parts = {"weights": weights, "keys and values": cache} | ({} if job.chip.is_cpu else {"engine": _ENGINE})
    return RoleMemory(role.name, parts, job.chip.memory * (1 if cache else job.share))


def _other_seconds(job: Job, role: ServerRole) -> float:
    """A judge reads each prompt and completion and answers in `JUDGE_TOKENS`; a teacher only reads."""
    server, round_ = _other_server(job, role), job.round
    read = round_.prompt_tokens + round_.completion_tokens
    own = round_.completions / role.replicas
    seconds = prefill_seconds(role.model, job.chip, server, job.use, own, read)
    if role.name == "judge":
        batch = min(own, float(server.most), max(1.0, server.cache_tokens / (read + JUDGE_TOKENS)))
        step = decode_seconds(role.model, job.chip, server, job.use, batch, read + JUDGE_TOKENS / 2)
        seconds += own / batch * JUDGE_TOKENS * step
    return seconds
