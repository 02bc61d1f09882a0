"""The placement of roles on nodes, with GPUs and cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swift_r1.fleet.run_file import ROLLOUT, SERVERS, TRAIN, Role


@dataclass(frozen=True)
class Room:
    """The room of a node: GPUs as CUDA_VISIBLE_DEVICES names them, and cores; and the roles that it is for, if not
    all."""

    name: str
    gpus: tuple[str, ...]
    cpus: tuple[int, ...]
    roles: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeSlot:
    """A part of a node. `cpus` None: all of its cores, shared with others."""

    node: str
    gpus: tuple[str, ...]
    cpus: tuple[int, ...] | None


class NoRoom(Exception):
    """What is missing, and what is there."""


def place_roles(roles: Mapping[str, Role], rooms: Sequence[Room]) -> dict[str, list[NodeSlot]]:
    """Finds places for all roles: first those that may run only on some nodes, then training, then the others. Raises
    NoRoom."""
    order = [name for name in (TRAIN, *SERVERS, ROLLOUT) if name in roles]
    places: dict[str, list[NodeSlot]] = {}
    for name in sorted(order, key=lambda name: not roles[name].hosts):
        taken = [place for own in places.values() for place in own]
        places[name] = find_places(roles[name], roles[name].count, rooms, taken)
    return places


def find_places(
    role: Role,
    count: int,
    rooms: Sequence[Room],
    taken: Sequence[NodeSlot],
) -> list[NodeSlot]:
    """Finds places for `count` nodes or replicas of a role beside those that are `taken`: for training each on another
    node, the fullest that will do; for servers where the fewest others are. Raises NoRoom."""
    found: list[NodeSlot] = []
    for number in range(count):
        others = [*taken, *found]
        best: tuple[tuple[int, int], NodeSlot] | None = None
        for room in rooms:
            if not _allows(room, role) or (
                role.name == TRAIN and any(slot.node == room.name for slot in found)
            ):
                continue
            gpus, cpus = _free(room, others)
            if len(gpus) < role.gpus or len(cpus) < (role.cpus or 0):
                continue
            here = sum(slot.node == room.name for slot in others)
            fullness = (len(gpus), here) if role.name == TRAIN else (here, -len(gpus))
            if best is None or fullness < best[0]:
                slot = NodeSlot(
                    room.name, gpus[: role.gpus], cpus[: role.cpus] if role.cpus else None
                )
                best = (fullness, slot)
        if best is None:
            raise NoRoom(_missing(role, number, count, rooms, others))
        found.append(best[1])
    return found


def _allows(room: Room, role: Role) -> bool:
    """Returns whether a role may run on a node."""
    return (not role.hosts or room.name in role.hosts) and (
        not room.roles or role.name in room.roles
    )


def _free(room: Room, taken: Sequence[NodeSlot]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    gpus = list(room.gpus)
    cpus = list(room.cpus)
    for slot in taken:
        if slot.node == room.name:
            gpus = [gpu for gpu in gpus if gpu not in slot.gpus]
            cpus = [cpu for cpu in cpus if cpu not in (slot.cpus or ())]
    return tuple(gpus), tuple(cpus)


def _missing(
    role: Role,
    placed: int,
    count: int,
    rooms: Sequence[Room],
    taken: Sequence[NodeSlot],
) -> str:
    wants = []
    if role.gpus:
        wants.append(f"{role.gpus} GPU{'s' * (role.gpus > 1)}")
    if role.cpus:
        wants.append(f"{role.cpus} core{'s' * (role.cpus > 1)}")
    kind = "node" if role.name == TRAIN else "replica"
    needs = f"roles: {role.name} needs {count} {kind}{'s' * (count > 1)}"
    if wants:
        needs += f" with {' and '.join(wants)}" + " each" * (count > 1)
    if role.hosts:
        needs += f" on {', '.join(role.hosts)}"
    free = []
    for room in rooms:
        gpus, cpus = _free(room, taken)
        parts = []
        if role.gpus:
            parts.append(f"{len(gpus)} of {len(room.gpus)} GPUs")
        if role.cpus:
            parts.append(f"{len(cpus)} of {len(room.cpus)} cores")
        free.append(f"{room.name} {', '.join(parts)}".strip())
    return f"{needs}, and there is room for {placed}; nodes, with what is free: {'; '.join(free) or 'none'}"
