"""How many processes train, and where: from the variables that ms-swift and torchrun use, or flags of their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from swift_r1.flags.fields import resumable_flag


@dataclass(frozen=True, slots=True)
class World:
    """The processes of one run. `size` processes in all, `nproc_per_node` of them on this machine."""

    nproc_per_node: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None

    @property
    def size(self) -> int:
        return self.nproc_per_node * self.nnodes

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> tuple[World, tuple[str, ...]]:
        """Returns the world that the environment describes, and its faults (one line each)."""
        faults: list[str] = []
        if "TORCHELASTIC_RUN_ID" in environ:
            faults.append(
                "torchrun is not needed: call `swift rlhf` once per machine, and it starts the processes; torchrun's "
                "--nproc_per_node, --nnodes, --node_rank, --master_addr and --master_port are flags of it"
            )

        def number(name: str, default: int, least: int) -> int:
            text = environ.get(name, "").strip()
            if not text:
                return default
            if not text.isdecimal() or int(text) < least:
                faults.append(
                    f"environment variable {name} must be a whole number of at least {least}, not {text!r}"
                )
                return default
            return int(text)

        world = cls(
            nproc_per_node=number("NPROC_PER_NODE", 1, 1),
            nnodes=number("NNODES", 1, 1),
            node_rank=number("NODE_RANK", 0, 0),
            master_addr=environ.get("MASTER_ADDR") or None,
            master_port=number("MASTER_PORT", 0, 1) or None,
        )
        if world.nnodes > 1 and not world.master_addr:
            faults.append("NNODES > 1 needs MASTER_ADDR (and MASTER_PORT): the address of node 0")
        if world.node_rank >= world.nnodes:
            faults.append(
                f"NODE_RANK={world.node_rank} but NNODES={world.nnodes}: ranks count from 0"
            )
        return world, tuple(faults)


@dataclass(frozen=True, kw_only=True)
class ProcessArguments:
    """Processes."""

    nproc_per_node: int | None = resumable_flag(
        None, "processes on this machine (default: NPROC_PER_NODE, else 1)", at_least=1
    )
    nnodes: int | None = resumable_flag(None, "machines (default: NNODES, else 1)", at_least=1)
    node_rank: int | None = resumable_flag(
        None, "number of this machine, from 0 (default: NODE_RANK, else 0)", at_least=0
    )
    master_addr: str | None = resumable_flag(None, "address of machine 0 (default: MASTER_ADDR)")
    master_port: int | None = resumable_flag(
        None, "port of machine 0 (default: MASTER_PORT)", at_least=1, at_most=65535
    )
    use_cpu: bool = resumable_flag(
        False, "train on the CPU although there is a GPU", aliases=("no_cuda",)
    )

    @property
    def process_variables(self) -> dict[str, str]:
        """The variables that the flags stand for, for all processes of the run."""
        variables = {}
        for item in fields(ProcessArguments):
            value = getattr(self, item.name)
            if value is not None and item.name != "use_cpu":
                variables[item.name.upper()] = str(value)
        if self.use_cpu:
            variables |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        return variables
