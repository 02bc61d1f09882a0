"""The commands of a launch, for a shell to paste."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping

from swift_r1.errors import UsageError
from swift_r1.flags.rollout import url_of
from swift_r1.fleet.backend import ClusterBackend, Node
from swift_r1.fleet.commands import (
    device_variables,
    rank_variables,
    server_file,
    server_words,
    shown_command,
    train_words,
)
from swift_r1.fleet.placement import NodeSlot, NoRoom, Room, place_roles
from swift_r1.fleet.run_file import ROLLOUT, SERVERS, TRAIN, RunFile
from swift_r1.launch.nodes import DEFAULT_MASTER_PORT

_FIRST_PORT = 8000
_ENOUGH = 4096  # GPUs or cores of a node of which nobody has said how many it has


def dry_run(run: RunFile, folder: str, backend: ClusterBackend, environ: Mapping[str, str]) -> str:
    """Returns every command of a part, in `folder`, with its node, in the order in which they start; nothing is asked
    of the nodes. Ports are those that would be taken if they were free. Raises UsageError: the roles do not fit on the
    nodes."""
    nodes = {node.name: node for node in backend.nodes()}
    rooms = [
        Room(name, tuple(map(str, range(_or(node.gpus)))), tuple(range(_or(node.cpus))), node.roles)
        for name, node in nodes.items()
    ]
    lines = [
        f"# agent on {name}: {shlex.join(backend.command(node))}" for name, node in nodes.items()
    ]
    try:
        places = place_roles(run.roles, rooms)
    except NoRoom as error:
        raise UsageError(str(error)) from error
    urls: dict[str, list[str]] = {}
    for role in (*SERVERS, ROLLOUT):
        for number, place in enumerate(places.get(role, ())):
            node = nodes[place.node]
            port = _FIRST_PORT + sum(map(len, urls.values()))
            address = node.address or node.name
            urls.setdefault(role, []).append(url_of(address, port))
            words = server_words(run, role, address, port)
            lines.append(
                _one(f"{role}-{number}", node, words, {**environ, **_devices(place, node)})
            )
    first = nodes[places[TRAIN][0].node]
    words = train_words(run, urls, folder, False, server_file(folder))
    if ROLLOUT in urls:
        lines.append(f"# the addresses of the rollout servers, on {first.name}")
        there = f"cd {shlex.quote(first.folder)} && " if first.folder else ""
        path = shlex.quote(server_file(folder))
        lines.append(
            f"{there}mkdir -p $(dirname {path}) && printf '%s\\n' {' '.join(urls[ROLLOUT])} > {path}"
        )
    for number, place in enumerate(places[TRAIN]):
        node = nodes[place.node]
        ranks = rank_variables(
            run, len(places[TRAIN]), number, first.address or first.name, DEFAULT_MASTER_PORT
        )
        lines.append(
            _one(f"{TRAIN}-{number}", node, words, {**environ, **_devices(place, node), **ranks})
        )
    return "\n".join(lines)


def _or(number: int | None) -> int:
    return _ENOUGH if number is None else number


def _devices(place: NodeSlot, node: Node) -> dict[str, str]:
    return device_variables(place, node_has_gpus=bool(node.gpus))


def _one(name: str, node: Node, words: list[str], environ: Mapping[str, str]) -> str:
    return f"# {name} on {node.name}\n{shown_command(node.python or sys.executable, node.folder, words, environ)}"
