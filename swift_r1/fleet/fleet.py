"""The nodes of a launch with their agents: which are there, what they have, and which are gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from swift_r1.errors import SwiftError, one_line
from swift_r1.fleet.backend import ClusterBackend, Node
from swift_r1.fleet.client import AgentClient, Event
from swift_r1.fleet.placement import Room
from swift_r1.runtime.libraries import own_version

HELLO_S = 120.0  # for an agent to say that it is there
_LOOK_S = 5.0  # between two looks at which nodes there are
_AGAIN_S = 15.0  # until a node that could not be reached is tried again
_CLOSE_S = 60.0


class Fleet:
    """Agents by the name of their node.

    Args:
        events: where what the agents say arrives, as pairs of a client and an event; and every few seconds `"nodes"`
            with the nodes that there are.
        silence_s: after which an agent counts as gone.

    Attributes:
        faults: why nodes could not be reached, by name.
    """

    def __init__(self, backend: ClusterBackend, events: SimpleQueue[Any], silence_s: float) -> None:
        self.backend = backend
        self.silence_s = silence_s
        self.clients: dict[str, AgentClient] = {}
        self.faults: dict[str, str] = {}
        self._tried: dict[str, float] = {}
        # gone, but perhaps still ending what they have started
        self._leaving: list[AgentClient] = []
        self._events = events
        self._over = threading.Event()

    def open(self) -> None:
        """Begins to connect to all nodes. Raises UsageError: they cannot be found out."""
        self.update(self.backend.nodes())
        threading.Thread(target=self._watch, name="nodes", daemon=True).start()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            try:
                self._events.put(("nodes", self.backend.nodes()))
            except (SwiftError, OSError) as error:
                self._events.put(("nodes", one_line(error)))

    def update(self, nodes: Sequence[Node]) -> None:
        """Connects to nodes that are new, or back; closes the way to those that are not there any more."""
        now = time.monotonic()
        names = {node.name for node in nodes}
        for name in self.clients.keys() - names:
            self.drop(self.clients[name], "it is not among the nodes any more")
        self._leaving = [client for client in self._leaving if not client.over]
        busy = self.clients.keys() | {client.node.name for client in self._leaving}
        for node in nodes:
            if node.name not in busy and now > self._tried.get(node.name, now - 1):
                self._tried[node.name] = now + _AGAIN_S
                self.clients[node.name] = AgentClient(self.backend, node, self._events)

    def drop(self, client: AgentClient, why: str) -> None:
        """Gives an agent up, and says that it is gone, whenever the way to it ends."""
        self.faults[client.node.name] = why
        self._events.put((client, {"event": "gone", "text": why}))
        threading.Thread(target=client.close, args=(_CLOSE_S,), daemon=True).start()

    def met(self, client: AgentClient, about: Event) -> bool:
        """Takes an agent's hello; returns false where it cannot be used."""
        if about["version"] != own_version():
            self.drop(client, f"it has swift-r1 {about['version']}, and here is {own_version()}")
            return False
        client.about = about
        self.faults.pop(client.node.name, None)
        return True

    def knows(self, client: AgentClient) -> bool:
        """Says whether this is a node's agent now; one that was given up may still say something."""
        return self.clients.get(client.node.name) is client

    def gone(self, client: AgentClient, text: str) -> None:
        """Forgets an agent that is gone."""
        del self.clients[client.node.name]
        self._leaving.append(client)
        self.faults.setdefault(client.node.name, text)
        if client.about is not None:
            self._tried.pop(client.node.name)  # it may come back at once

    @property
    def complete(self) -> bool:
        """Says whether every node has answered, or could not be reached."""
        return all(client.about is not None for client in self.clients.values())

    def look(self) -> None:
        """Gives up the agents that are silent."""
        for client in list(self.clients.values()):
            limit = HELLO_S if client.about is None else self.silence_s
            if time.monotonic() - client.heard > limit and not client.closed:
                self.drop(client, f"it has not been heard from for {limit:g} s")

    def rooms(self) -> list[Room]:
        """Returns the rooms of the nodes that can be used."""
        return [
            Room(name, *_parts(client.node, client.about), client.node.roles)
            for name, client in self.clients.items()
            if client.about is not None and name not in self.faults
        ]

    def address(self, name: str) -> str:
        client = self.clients[name]
        assert client.about is not None
        return client.node.address or str(client.about["address"])

    def close(self) -> None:
        """Ends all agents, and waits for them."""
        self._over.set()
        clients = [*self.clients.values(), *self._leaving]
        threads = [
            threading.Thread(target=one.close, args=(_CLOSE_S,), daemon=True) for one in clients
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_CLOSE_S)


def _parts(node: Node, about: Event) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns a node's GPUs and cores; a number that was given for it counts more than what its agent found."""
    gpus = tuple(about["gpus"])
    cpus = tuple(about["cpus"])
    if node.gpus is not None:
        gpus = gpus[: node.gpus] if len(gpus) >= node.gpus else tuple(map(str, range(node.gpus)))
    return gpus, cpus if node.cpus is None else cpus[: node.cpus]
