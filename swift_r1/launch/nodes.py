"""What the launchers of several machines tell each other: that they are alive, why one of them ends, and what they
agree on before their ranks start.

Through the store that torch's launcher has on node 0 anyway (MASTER_ADDR:MASTER_PORT), as JSON. The ranks themselves
notice that a peer is gone only when they wait for it, and do not know why.
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

from swift_r1.errors import (
    EXIT_INTERRUPTED,
    EXIT_RUN_FAILED,
    PortTaken,
    RunFailed,
    SwiftError,
    UsageError,
)
from swift_r1.flags.world import World
from swift_r1.launch.environment import own_address
from swift_r1.runtime.processes import leave, say

if TYPE_CHECKING:
    # `torch.distributed.Store`, which torch does not export to mypy
    from torch._C._distributed_c10d import Store

_BEAT_SECONDS = 1.0
_LOOK_SECONDS = 0.2
_LEAST_SILENCE_SECONDS = 5.0
MEETING_SECONDS = 900  # for the nodes to find each other
DEFAULT_MASTER_PORT = 29500
_SILENT_SECONDS = 60.0  # for a node to be heard from before its ranks start
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


class Nodes:
    """One launcher's view of the nodes; a context manager around its workers' life.

    Args:
        ddp_timeout: seconds; a node that has not been heard from for half of it counts as dead.
        end_workers: ends this node's ranks at once; called from another thread.
        patience_s: the longest that `ask` waits.

    Raises (on entering):
        PortTaken: this is node 0 and MASTER_PORT is taken.
        RunFailed: node 0 is not there within `MEETING_SECONDS`.
    """

    def __init__(
        self,
        world: World,
        ddp_timeout: float,
        end_workers: Callable[[], None],
        patience_s: float = MEETING_SECONDS,
    ) -> None:
        self.world = world
        self.patience_s = patience_s
        self.silence_s = max(_LEAST_SILENCE_SECONDS, ddp_timeout / 2)
        self._end_workers = end_workers
        self._over = threading.Event()
        self._heard = {
            node: time.monotonic() for node in range(world.nnodes) if node != world.node_rank
        }
        self._threads = [
            threading.Thread(target=work, name=work.__name__, daemon=True)
            for work in (self._talk, self._judge)
        ]
        self._store_lost = False
        self.seen: RankEnd | None = None

    def meet(self) -> None:
        """Connects to node 0. Raises as entering."""
        # else torch warns of every address that has no name
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        self._own, self._watching = self._connect(), self._connect()

    def __enter__(self) -> Nodes:
        self.meet()
        # who goes before the first beat is missed too
        self._tell(self._own, f"beat/{self.world.node_rank}", "0")
        # Meeting may have taken minutes.
        self._heard = dict.fromkeys(self._heard, time.monotonic())
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(_BEAT_SECONDS)
        # On node 0 this closes the port, which the process that replaces this one listens on again.
        del self._own, self._watching

    def done(self) -> None:
        """This node's ranks have ended well; its silence from now on means nothing."""
        self._over.set()
        self._tell(self._own, f"done/{self.world.node_rank}", "1")

    def tell(self, key: str, value: str) -> None:
        """Sets something for the others to `ask` for."""
        self._own.set(key, value)

    def ask(
        self, keys: Sequence[str], while_waiting: Callable[[], None] = lambda: None
    ) -> list[str]:
        """Returns what the others tell, once they have told all of it; who is silent counts as dead. Raises RunFailed:
        node 0, which holds the store, has ended; or the others do not tell."""
        deadline = time.monotonic() + self.patience_s
        reported = time.monotonic()
        try:
            while not self._own.check(list(keys)):
                while_waiting()
                if time.monotonic() > reported + _SAY_SECONDS:
                    reported = time.monotonic()
                    self._say_who_is_missing()
                if time.monotonic() > deadline:
                    raise RunFailed(
                        f"the nodes do not agree ({keys[0]} is missing): do they have the same flags?"
                    )
                time.sleep(_LOOK_SECONDS)
            return [self._own.get(key).decode() for key in keys]
        except RuntimeError as error:
            raise RunFailed("node 0 has ended") from error

    def _say_who_is_missing(self) -> None:
        missing = [
            str(node) for node in range(self.world.nnodes) if not self._own.check([f"beat/{node}"])
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
        """Tells the others why this node's ranks ended, and returns the first cause of all.

        A consequence waits some seconds for its cause. Node 0, which holds the store, waits until the others know.
        """
        self._over.set()
        if self._store_lost:
            return self.seen or own
        if self.seen is not None:
            first = self.seen
        else:
            try:
                number = self._own.add("causes", 1)
                self._own.set(f"cause/{number}", json.dumps(asdict(own)))
                first = self._await_first(own)
            except (RuntimeError, ValueError):
                first = own  # node 0 is gone, and with it the store
        self._tell(self._own, f"read/{self.world.node_rank}", "1")
        if not self.world.node_rank:
            others = [f"read/{node}" for node in range(1, self.world.nnodes)]
            deadline = time.monotonic() + _ANSWER_SECONDS
            while time.monotonic() < deadline and not self._own.check(others):
                time.sleep(0.1)
        return first

    def _await_first(self, own: RankEnd) -> RankEnd:
        deadline = time.monotonic() + _ANSWER_SECONDS
        while True:
            cause, consequence = self._first(self._own)
            if cause is not None or time.monotonic() >= deadline:
                return cause or consequence or own
            time.sleep(0.1)

    def _talk(self) -> None:
        """Sends heartbeats and listens to the others; a lost store may block it for ever, which `_judge` sees."""
        beats = 0
        consequences_since = None
        last = dict.fromkeys(self._heard, b"")
        while self.seen is None and not self._over.wait(_BEAT_SECONDS):
            beats += 1
            try:
                self._watching.set(f"beat/{self.world.node_rank}", str(beats))
                cause, consequence = self._first(self._watching)
                for node in last:
                    beat = (
                        self._watching.get(f"beat/{node}")
                        if self._watching.check([f"beat/{node}"])
                        else b""
                    )
                    if beat != last[node] or not beat or self._watching.check([f"done/{node}"]):
                        last[node], self._heard[node] = beat, time.monotonic()
            except RuntimeError:
                continue
            if self.world.node_rank:
                self._heard[0] = time.monotonic()  # it holds the store
            if consequence is not None:
                consequences_since = consequences_since or time.monotonic()
                if cause is None and time.monotonic() - consequences_since > _ANSWER_SECONDS:
                    cause = consequence
            if cause is not None:
                self._end(cause)

    def _judge(self) -> None:
        while self.seen is None and not self._over.wait(_BEAT_SECONDS):
            for node, since in list(self._heard.items()):
                if time.monotonic() - since > self.silence_s:
                    self._store_lost = node == 0
                    text = f"node {node} has not been heard from for {self.silence_s:g} s: it or the network is gone"
                    self._end(RankEnd(node, None, EXIT_RUN_FAILED, text))
                    return

    def _end(self, cause: RankEnd) -> None:
        if not self._over.is_set():
            self.seen = cause
            self._end_workers()

    def _first(self, store: Store) -> tuple[RankEnd | None, RankEnd | None]:
        """Returns the first reported cause that is no consequence, and the first that is one."""
        causes = [
            RankEnd(**json.loads(store.get(key)))
            for key in (f"cause/{number}" for number in range(1, store.add("causes", 0) + 1))
            if store.check([key])
        ]
        return (
            next((cause for cause in causes if not cause.consequence), None),
            next((cause for cause in causes if cause.consequence), None),
        )

    def _tell(self, store: Store, key: str, value: str) -> None:
        with suppress(RuntimeError):  # node 0 has ended
            store.set(key, value)

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
    if faults or not world.node_rank:
        return
    with suppress(OSError, RuntimeError, RunFailed):
        place = str(world.master_addr), world.master_port or DEFAULT_MASTER_PORT
        socket.create_connection(place, _ANSWER_SECONDS).close()  # torch would try again and again
        nodes = Nodes(world, _SILENT_SECONDS, lambda: None)
        nodes.meet()
        nodes.settle(_ended(world, error))


def _ended(world: World, error: BaseException) -> RankEnd:
    code = error.exit_code if isinstance(error, SwiftError) else EXIT_INTERRUPTED
    text = str(error) if isinstance(error, SwiftError) else "interrupted"
    return RankEnd(world.node_rank, None, code, f"node {world.node_rank}: {text}")


@contextmanager
def launching(world: World, ddp_timeout: float, waits_s: float = 0.0) -> Iterator[Nodes | None]:
    """Yields the nodes before their ranks start; None where there is one. They meet within `MEETING_SECONDS` and leave
    together; meanwhile one may wait `waits_s` for something else. An error on one node ends this process on all of
    them, with its cause and exit code."""
    if world.nnodes == 1:
        yield None
        return

    def end() -> None:
        assert nodes.seen is not None
        cause = nodes.settle(nodes.seen)
        say(cause.line(several=True))
        leave(cause.code)

    nodes = Nodes(world, min(ddp_timeout, _SILENT_SECONDS), end, MEETING_SECONDS + waits_s)
    with nodes:
        try:
            yield nodes
            nodes.part()
        except BaseException as error:
            nodes.settle(_ended(world, error))
            raise
