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
    """Places for all roles: first those that may run only on some nodes, then training, then the others. Raises
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
    """Places for `count` nodes or replicas of a role beside those that are `taken`: for training each on another node,
    the fullest that will do; for servers where the fewest others are. Raises NoRoom."""
    found: list[NodeSlot] = []
    for number in range(count):
        others = [*taken, *found]
        own_nodes = {one.node for one in found} if role.name == TRAIN else set()
        options = [
            (room, gpus, cpus)
            for room in rooms
            if room.name not in own_nodes and (not role.hosts or room.name in role.hosts)
            if not room.roles or role.name in room.roles
            for gpus, cpus in [_free(room, others)]
            if len(gpus) >= role.gpus and len(cpus) >= (role.cpus or 0)
        ]
        if not options:
            raise NoRoom(_missing(role, number, count, rooms, others))

        def fullness(option: tuple[Room, tuple[str, ...], tuple[int, ...]]) -> tuple[int, int]:
            room, gpus, _ = option
            here = sum(one.node == room.name for one in others)  # noqa: B023  # called at once
            return (len(gpus), here) if role.name == TRAIN else (here, -len(gpus))

        room, gpus, cpus = min(options, key=fullness)
        found.append(NodeSlot(room.name, gpus[: role.gpus], cpus[: role.cpus] if role.cpus else None))
    return found


def _free(room: Room, taken: Sequence[NodeSlot]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    used = [one for one in taken if one.node == room.name]
    gpus = {gpu for one in used for gpu in one.gpus}
    cpus = {cpu for one in used for cpu in one.cpus or ()}
    return tuple(one for one in room.gpus if one not in gpus), tuple(one for one in room.cpus if one not in cpus)


def _missing(
    role: Role,
    placed: int,
    count: int,
    rooms: Sequence[Room],
    taken: Sequence[NodeSlot],
) -> str:
    wants = [f"{role.gpus} GPU{'s' * (role.gpus > 1)}"] if role.gpus else []
    wants += [f"{role.cpus} core{'s' * (role.cpus > 1)}"] if role.cpus else []
    kind = "node" if role.name == TRAIN else "replica"
    needs = f"roles: {role.name} needs {count} {kind}{'s' * (count > 1)}"
    needs += f" with {' and '.join(wants)}" * bool(wants) + " each" * (bool(wants) and count > 1)
    needs += f" on {', '.join(role.hosts)}" * bool(role.hosts)
    free = []
    for room in rooms:
        gpus, cpus = _free(room, taken)
        parts = [f"{len(gpus)} of {len(room.gpus)} GPUs"] if role.gpus else []
        parts += [f"{len(cpus)} of {len(room.cpus)} cores"] if role.cpus else []
        free.append(" ".join([room.name, ", ".join(parts)]).strip())
    return f"{needs}, and there is room for {placed}; nodes, with what is free: {'; '.join(free) or 'none'}"
