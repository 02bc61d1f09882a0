"""What the launchers of several machines tell each other: that they live, and why one of them ends.

Through the store that torch's launcher has on node 0 anyway (MASTER_ADDR:MASTER_PORT), as JSON. The ranks themselves
only notice that a peer is gone when they wait for it, and then not why.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from swift_r1.arguments.world import World
from swift_r1.errors import EXIT_RUN_FAILED, PortTaken, RunFailed

if TYPE_CHECKING:
    from torch.distributed import Store

_BEAT_SECONDS = 1.0
_ANSWER_SECONDS = 5
"""What the store may take to answer, and what a cause may take to arrive after its consequences."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a node's ranks ended.

    Attributes:
        node: its number.
        rank: the first of its ranks to end; None where the whole node is silent.
        code: the exit code that this means for the run.
        text: for people.
        consequence: it ended since it lost another rank.
    """

    node: int
    rank: int | None
    code: int
    text: str
    consequence: bool = False

    def line(self, several: bool) -> str:
        place = f" on node {self.node}" if several else ""
        return self.text if self.rank is None else f"rank {self.rank}{place} was the first to end: {self.text}"


class Nodes:
    """One launcher's part; used as a context manager around its workers' life.

    Args:
        silence_s: a node that has not been heard of for so long counts as dead.
        end_workers: ends this node's ranks at once; called from another thread.

    Raises (on entering):
        PortTaken: this is node 0 and MASTER_PORT is taken.
        RunFailed: node 0 is not there within `meeting_s`.
    """

    def __init__(
        self, world: World, port: int, silence_s: float, meeting_s: float, end_workers: Callable[[], None]
    ) -> None:
        self.world, self.port, self.silence_s, self.meeting_s = world, port, silence_s, meeting_s
        self._end_workers = end_workers
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="nodes", daemon=True)
        self.seen: Cause | None = None

    def __enter__(self) -> Nodes:
        self._own, self._watching = self._connect(self.meeting_s), self._connect(self.meeting_s)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(2 * _ANSWER_SECONDS)

    def done(self) -> None:
        """This node's ranks have ended well; nobody shall miss it."""
        self._over.set()
        self._tell(self._own, f"done/{self.world.node_rank}", "1")

    def settle(self, own: Cause) -> Cause:
        """Tells the others why this node's ranks ended, and returns the first cause of all.

        A consequence waits some seconds for its cause. Node 0, which holds the store, waits until the others know.
        """
        self._over.set()
        self._thread.join(2 * _ANSWER_SECONDS)
        if self.seen is not None:
            first = self.seen
        else:
            try:
                number = self._own.add("causes", 1)
                self._own.set(f"cause/{number}", json.dumps(asdict(own)))
                first = self._first(self._own, wait_s=_ANSWER_SECONDS if own.consequence else 0) or own
            except (RuntimeError, ValueError):
                first = own  # node 0 is gone, and with it the store
        self._say_goodbye()
        return first

    def _say_goodbye(self) -> None:
        self._tell(self._own, f"read/{self.world.node_rank}", "1")
        if self.world.node_rank:
            return
        others = [f"read/{node}" for node in range(1, self.world.nnodes)]
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline and not self._own.check(others):
            time.sleep(0.1)

    def _watch(self) -> None:
        """Beats, listens, and ends this node's ranks when another node's ended or is silent."""
        heard = {node: (b"", time.monotonic()) for node in range(self.world.nnodes) if node != self.world.node_rank}
        met: set[int] = set()
        beats = 0
        while not self._over.wait(_BEAT_SECONDS):
            beats += 1
            now = time.monotonic()
            try:
                self._watching.set(f"beat/{self.world.node_rank}", str(beats))
                self.seen = self._first(self._watching, wait_s=0)
                for node, (last, _) in heard.items():
                    key = f"beat/{node}"
                    beat = self._watching.get(key) if self._watching.check([key]) else b""
                    if beat != last:
                        met.add(node)
                        heard[node] = beat, now
                    elif self._watching.check([f"done/{node}"]):
                        heard[node] = beat, now
                if self.world.node_rank and 0 in heard:
                    # Node 0 holds the store: it lives as long as that answers.
                    heard[0] = heard[0][0], now
            except RuntimeError:
                pass  # no answer: node 0 is silent, or gone
            silent = [node for node, (_, since) in heard.items() if node in met | {0} and now - since > self.silence_s]
            if self.seen is None and silent:
                text = f"node {silent[0]} has not been heard of for {self.silence_s:g} s: it is gone, or the network is"
                self.seen = Cause(silent[0], None, EXIT_RUN_FAILED, text)
            if self.seen is not None:
                self._end_workers()
                return

    def _first(self, store: Store, wait_s: float) -> Cause | None:
        """The first reported cause that is no consequence; one of those where none comes in `wait_s` seconds."""
        deadline = time.monotonic() + wait_s
        while True:
            count = store.add("causes", 0)
            found = [
                Cause(**json.loads(store.get(key)))
                for key in (f"cause/{number}" for number in range(1, count + 1))
                if store.check([key])
            ]
            causes = [cause for cause in found if not cause.consequence]
            if causes or time.monotonic() >= deadline:
                return causes[0] if causes else found[0] if found and wait_s else None
            time.sleep(0.1)

    def _tell(self, store: Store, key: str, value: str) -> None:
        try:
            store.set(key, value)
        except RuntimeError:
            return  # node 0 has ended

    def _connect(self, meeting_s: float) -> Store:
        from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, TCPStore

        host, main = str(self.world.master_addr), self.world.node_rank == 0
        try:
            store = TCPStore(
                host, self.port, None, main, timedelta(seconds=meeting_s), wait_for_workers=False, multi_tenant=True
            )
        except (DistNetworkError, DistStoreError) as error:
            if main and "EADDRINUSE" in str(error):
                raise PortTaken(f"MASTER_PORT {self.port} is taken: give another one on every node") from error
            raise RunFailed(
                f"the {self.world.nnodes} nodes did not meet: node {self.world.node_rank} found nobody at "
                f"{host}:{self.port} within {meeting_s:g} s"
            ) from error
        store.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
        return PrefixStore("swift-r1-launchers", store)
