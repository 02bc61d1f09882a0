"""What the launchers of several machines tell each other: what they agree on before their ranks start, and why one of
them ends.

Through the store that torch's launcher has on node 0 anyway (MASTER_ADDR:MASTER_PORT), as JSON. That a node is gone the
ranks notice (`runtime.ranks.Presence`), though not why.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from swift_r1.errors import EXIT_INTERRUPTED, PortTaken, RunFailed, SwiftError, UsageError
from swift_r1.flags.world import World
from swift_r1.launch.environment import own_address
from swift_r1.runtime.processes import say

if TYPE_CHECKING:
    # `torch.distributed.Store`, which torch does not export to mypy
    from torch._C._distributed_c10d import Store

_LOOK_SECONDS = 0.2
MEETING_SECONDS = 900  # for the nodes to find each other
DEFAULT_MASTER_PORT = 29500
_SAY_SECONDS = 5.0
_ANSWER_SECONDS = 5
"""For the store to answer, and for a cause to arrive after its consequences."""


@dataclass(frozen=True, slots=True)
class RankEnd:
    """Why a node's ranks ended.

    Attributes:
        node: its number.
        rank: the first of its ranks to end; None where the whole node is silent.
        code: the run's exit code because of it.
        text: for people.
        consequence: it ended because it lost another rank.
    """

    node: int
    rank: int | None
    code: int
    text: str
    consequence: bool = False

    def line(self, several: bool) -> str:
        place = f" on node {self.node}" if several else ""
        return (
            self.text
            if self.rank is None
            else f"rank {self.rank}{place} was the first to end: {self.text}"
        )


class NodeEnded(SwiftError):
    """Another node has ended, for this cause."""

    def __init__(self, cause: RankEnd) -> None:
        super().__init__(cause.line(several=True))
        self.cause = cause
        self.exit_code = cause.code


class Nodes:
    """One launcher's view of the nodes, while it is open.

    Args:
        patience_s: the longest that `ask` waits.

    Raises (on entering):
        PortTaken: this is node 0 and MASTER_PORT is taken.
        RunFailed: node 0 is not there within `MEETING_SECONDS`.
    """

    def __init__(self, world: World, patience_s: float = MEETING_SECONDS) -> None:
        self.world = world
        self.patience_s = patience_s

    def __enter__(self) -> Nodes:
        # else torch warns of every address that has no name
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        self._store = self._connect()
        self.tell(f"here/{self.world.node_rank}", "1")
        return self

    def __exit__(self, *_: object) -> None:
        # On node 0 this closes the port, which the process that replaces this one listens on again.
        del self._store

    def tell(self, key: str, value: str) -> None:
        """Sets something for the others to `ask` for."""
        self._store.set(key, value)

    def ask(
        self, keys: Sequence[str], while_waiting: Callable[[], None] = lambda: None
    ) -> list[str]:
        """Returns what the others tell, once they have told all of it. Raises NodeEnded; RunFailed: node 0, which holds
        the store, has ended; or the others do not tell."""
        deadline = time.monotonic() + self.patience_s
        reported = time.monotonic()
        try:
            while not self._store.check(list(keys)):
                while_waiting()
                self.look()
                if time.monotonic() > reported + _SAY_SECONDS:
                    reported = time.monotonic()
                    self._say_who_is_missing()
                if time.monotonic() > deadline:
                    raise RunFailed(
                        f"the nodes do not agree ({keys[0]} is missing): do they have the same flags?"
                    )
                time.sleep(_LOOK_SECONDS)
            return [self._store.get(key).decode() for key in keys]
        except RuntimeError as error:
            raise RunFailed("node 0 has ended") from error

    def look(self) -> None:
        """Raises NodeEnded where another node has told that it ended."""
        cause, consequence = self._causes()
        found = cause or consequence
        if found is not None:
            raise NodeEnded(found)

    def _say_who_is_missing(self) -> None:
        missing = [
            str(node)
            for node in range(self.world.nnodes)
            if not self._store.check([f"here/{node}"])
        ]
        if missing and not self.world.node_rank:
            say(f"waiting for node {', '.join(missing)}, of {self.world.nnodes} (NODE_RANK)")

    def agree(self, mine: Mapping[str, Any]) -> None:
        """Raises UsageError where a setting of this node is not node 0's, with its name and both values. One that only
        one of them has does not count."""
        if not self.world.node_rank:
            self.tell("settings", json.dumps(mine))
            return
        first = json.loads(self.ask(["settings"])[0])
        node = self.world.node_rank
        faults = [
            f"{name} is {value} on node {node}, and {first[name]} on node 0"
            for name, value in json.loads(json.dumps(mine)).items()
            if first.get(name, value) != value
        ]
        if faults:
            raise UsageError(f"all nodes need the same: {'; '.join(faults)}")

    def peer(self) -> str:
        """Returns the address of another node as this one reaches it; MASTER_ADDR may be loopback on node 0."""
        if not self.world.node_rank:
            return self.ask(["address/1"])[0]
        master = str(self.world.master_addr)
        self.tell(f"address/{self.world.node_rank}", own_address(master) or "")
        return master

    def part(self) -> None:
        """Ends the meeting: node 0 closes the store when the others have nothing to ask any more, and these go on when
        it has."""
        others = [f"parted/{node}" for node in range(1, self.world.nnodes)]
        if not self.world.node_rank:
            self.ask(others)
            return
        self.tell(f"parted/{self.world.node_rank}", "1")
        with suppress(RunFailed):
            self.ask(["closed"])  # never told: the store goes first

    def settle(self, own: RankEnd) -> RankEnd:
        """Tells the others why this node ended, and returns the first cause of all; `own` where the store, which is
        node 0's, does not answer in time.

        A consequence waits some seconds for its cause. Node 0 waits until the others know.
        """
        found: list[RankEnd] = []

        def exchange() -> None:
            with suppress(RuntimeError):  # node 0 has ended
                number = self._store.add("causes", 1)
                self._store.set(f"cause/{number}", json.dumps(asdict(own)))
                found.append(self._await_first(own))
                self._store.set(f"read/{self.world.node_rank}", "1")
                if not self.world.node_rank:
                    self._await_readers()

        # A store whose host is gone without a word never answers.
        thread = threading.Thread(target=exchange, name="settle", daemon=True)
        thread.start()
        thread.join(3 * _ANSWER_SECONDS)
        return found[0] if found else own

    def _await_first(self, own: RankEnd) -> RankEnd:
        deadline = time.monotonic() + _ANSWER_SECONDS
        while True:
            cause, consequence = self._causes()
            if cause is not None or time.monotonic() >= deadline:
                return cause or consequence or own
            time.sleep(_LOOK_SECONDS)

    def _await_readers(self) -> None:
        others = [f"read/{node}" for node in range(1, self.world.nnodes)]
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline and not self._store.check(others):
            time.sleep(_LOOK_SECONDS)

    def _causes(self) -> tuple[RankEnd | None, RankEnd | None]:
        """Returns the first reported cause that is no consequence, and the first that is one."""
        causes = [
            RankEnd(**json.loads(self._store.get(key)))
            for key in (f"cause/{number}" for number in range(1, self._store.add("causes", 0) + 1))
            if self._store.check([key])
        ]
        return (
            next((cause for cause in causes if not cause.consequence), None),
            next((cause for cause in causes if cause.consequence), None),
        )

    def _connect(self) -> Store:
        import torch.distributed as dist

        host = str(self.world.master_addr)
        is_first = self.world.node_rank == 0
        port = self.world.master_port or DEFAULT_MASTER_PORT
        limit = timedelta(seconds=MEETING_SECONDS)
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]  # public, but not exported to mypy
                host, port, None, is_first, limit, wait_for_workers=False, multi_tenant=True
            )
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            if is_first and "EADDRINUSE" in str(error):
                raise PortTaken(
                    f"MASTER_PORT {port} is taken: give another one on every node"
                ) from error
            raise RunFailed(
                f"the {self.world.nnodes} nodes did not meet: node {self.world.node_rank} found nobody at "
                f"{host}:{port} within {MEETING_SECONDS} s"
            ) from error
        store.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
        prefixed: Store = dist.PrefixStore("swift-r1-launchers", store)  # type: ignore[attr-defined]  # as above
        return prefixed


def tell_node_0(error: SwiftError) -> None:
    """This node ends before the nodes have met: node 0 ends with it, where that is there already."""
    world, faults = World.from_environment(os.environ)
    if faults or not world.node_rank or isinstance(error, NodeEnded):
        return
    with suppress(OSError, RuntimeError, RunFailed):
        place = str(world.master_addr), world.master_port or DEFAULT_MASTER_PORT
        socket.create_connection(place, _ANSWER_SECONDS).close()  # torch would try again and again
        with Nodes(world) as nodes:
            nodes.settle(_ended(world, error))


def _ended(world: World, error: BaseException) -> RankEnd:
    if isinstance(error, NodeEnded):
        return error.cause
    code = error.exit_code if isinstance(error, SwiftError) else EXIT_INTERRUPTED
    text = str(error) if isinstance(error, SwiftError) else "interrupted"
    return RankEnd(world.node_rank, None, code, f"node {world.node_rank}: {text}")


@contextmanager
def launching(world: World, waits_s: float = 0.0) -> Iterator[Nodes | None]:
    """Yields the nodes before their ranks start; None where there is one. They meet within `MEETING_SECONDS` and leave
    together; meanwhile one may wait `waits_s` for something else. An error on one node ends all of them, with its cause
    and exit code (NodeEnded)."""
    if world.nnodes == 1:
        yield None
        return
    with Nodes(world, MEETING_SECONDS + waits_s) as nodes:
        try:
            yield nodes
            nodes.part()
        except BaseException as error:
            nodes.settle(_ended(world, error))
            raise
