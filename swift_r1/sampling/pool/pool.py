"""Several rollout servers as one: each has its own lease, hashes and reconnects, all have the same weight version.

Only the main rank has one. Who of it takes work is in `roster.py`, how requests are spread over it in `dispatch.py`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from swift_r1.errors import UsageError
from swift_r1.sampling.pool.health import LOOK_S, TELL_EVERY_S, Member, Roster, why_not_alike
from swift_r1.sampling.pool.router import Dispatch
from swift_r1.sampling.pool.session import GIVEN_UP, ServerLink, ServerLost
from swift_r1.weights.snapshot import KeptWeights, Superseded
from swift_r1.weights.transport import HTTP
from swift_r1.wire.protocol import AdapterConfig, RolloutOutput, RolloutRequest

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("swift_r1.sampling.pool.pool")

_HEALTH_S = 2.0


class Fleet:
    """The `ServerLink` of several servers; one is enough.

    Args:
        members: connected, and alike (see `why_not_alike`).
        timeout_s: longest wait with no server at all.
        compare: whether versions are compared with what was sent before, to send what has changed: None decides by
            how weights went the last time.

    Attributes:
        first: what the servers have said of themselves at first; `weight_version` is the highest one.

    Raises:
        UsageError: the servers are not alike.
    """

    def __init__(self, members: Sequence[Member], timeout_s: float, compare: bool | None = None) -> None:
        if (why := why_not_alike([(one.url, one.link.first) for one in members])) is not None:
            raise UsageError(why)
        self.kept = KeptWeights()
        self.roster = Roster(members, self.kept, timeout_s)
        self._compare = compare
        infos = [one.link.first for one in members]
        self.first = infos[0].model_copy(
            update={
                "weight_version": max(info.weight_version for info in infos),
                "own_base": all(info.own_base for info in infos),
            }
        )

    @property
    def members(self) -> Sequence[Member]:
        return self.roster.members

    def close(self) -> None:
        """Ends the looking for lost servers, and gives the leases back."""
        self.roster.close()
        for member in self.members:
            member.link.close()

    @property
    def refused(self) -> int:
        """Answers of other weights than those asked for, which were not taken."""
        return sum(one.link.refused for one in self.members)

    @refused.setter
    def refused(self, count: int) -> None:
        more = count - self.refused
        self.members[0].link.refused += more

    def take_bytes(self) -> int:
        """Bytes of weights sent to all servers since the last call."""
        return sum(one.link.take_bytes() for one in self.members)

    def take_servers(self) -> int:
        """How many servers take work."""
        return len(self.roster.ready)

    def take_returned(self) -> bool:
        """Whether a server came back since the last call: a new engine, whose next update is checked."""
        return self.roster.take_returned()

    def wait_for_any(self, while_waiting: Callable[[], None]) -> None:
        """Waits until a server is ready.

        Raises:
            ServerUnreachable: there was none for too long, or all are given up.
        """
        self.roster.wait_for_any(while_waiting)

    def pushed(self) -> None:
        """A new version is served: whatever was lost before was worth waiting for."""
        for one in self.roster.ready:
            one.link.pushed()

    def ask(
        self,
        requests: Sequence[RolloutRequest],
        versions: Container[int],
        on_answer: Callable[[RolloutOutput], None],
        while_waiting: Callable[[], None],
    ) -> None:
        """Completions of all requests by weights of these `versions`; each output goes to `on_answer` as it comes.

        Threads may ask at the same time, also while another one pushes.

        Raises:
            ServerUnreachable: no server was there for too long, or all are given up.
            RunFailed: a server refused a request, answered with other weights, or all are given up that were there.
        """
        asyncio.run(Dispatch(self.roster, requests, versions, on_answer, while_waiting).run())

    def push(
        self,
        version: int,
        buckets: Iterable[Sequence[tuple[str, torch.Tensor]]],
        adapter: AdapterConfig | None = None,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """Brings all servers to `version`, those that are ready at once, the others as they come back.

        Args:
            while_waiting: called every few seconds once all `buckets` are taken.

        Raises:
            ServerUnreachable: no server was there for too long, or all are given up.
            RunFailed: another trainer writes to one, or all refused the weights again and again.
        """
        ready = self.roster.ready
        epochs = {one: one.epoch for one in ready}
        self.kept.begin(version, adapter, self._compares(ready))
        faults: list[Exception] = []
        threads = {
            one: threading.Thread(target=self._push_to, args=(one, epochs[one], version, faults), daemon=True)
            for one in ready
        }
        for member, thread in threads.items():
            member.pushing = thread
            thread.start()
        try:
            for bucket in buckets:
                self.kept.add(bucket)
            self.kept.finish()
        except BaseException:
            self.kept.fail()
            raise
        self._wait_for(threads, epochs, while_waiting)
        if faults:
            raise faults[0]
        self.roster.wait_for_any(while_waiting)

    def sleep(self, level: int) -> None:
        """The engines of all servers that are ready give their memory back; one that is lost stays awake when it is
        back. Raises as `push`."""
        self._each(lambda link: link.sleep(level))

    def wake(self, while_waiting: Callable[[], None] = lambda: None) -> None:
        """The engines have their memory again; raises as `push`."""
        self._each(lambda link: link.wake())
        self.roster.wait_for_any(while_waiting)

    def _each(self, work: Callable[[ServerLink], None]) -> None:
        """Runs `work` on each server that is ready, all at the same time."""

        def one(member: Member, epoch: int) -> None:
            try:
                work(member.link)
            except ServerLost:
                self.roster.lose(member, epoch)
            except GIVEN_UP as error:
                self.roster.give_up(member, epoch, error)

        ready = self.roster.ready
        with ThreadPoolExecutor(max(1, len(ready))) as pool:
            for done in [pool.submit(one, member, member.epoch) for member in ready]:
                done.result()

    def farthest(
        self, sequences: Sequence[Sequence[int]], version: int, differs: Callable[[Sequence[Sequence[float]]], float]
    ) -> float:
        """The largest that `differs` says of an engine's log-probs of given tokens; a line has each server's.

        Raises:
            ServerLost: none has answered.
            RunFailed: one refused the sequences.
        """
        found: dict[str, float] = {}
        for member in self.roster.ready:
            epoch = member.epoch
            try:
                found[member.url] = member.link.farthest(sequences, version, differs)
            except ServerLost:
                self.roster.lose(member, epoch)
            except GIVEN_UP as error:
                self.roster.give_up(member, epoch, error)
        if not found:
            raise ServerLost
        logger.info("weight check: %s", ", ".join(f"{url} {value:.3g}" for url, value in found.items()))
        return max(found.values(), key=lambda value: (value != value, value))  # what is not a number is the farthest

    def _compares(self, ready: Sequence[Member]) -> bool:
        if self._compare is not None:
            return self._compare
        return any(one.link.transport == HTTP for one in ready)

    def _push_to(self, member: Member, epoch: int, version: int, faults: list[Exception]) -> None:
        """One server's share of `push`, in a thread."""
        try:
            buckets = self.kept.reading(version, copy=False, wanted=lambda: member.epoch == epoch)
            member.link.push(version, buckets, self.kept.adapter)
        except Superseded:
            pass  # the weights could not be gathered, or this server was given up for silence
        except ServerLost:
            self.roster.lose(member, epoch)
        except GIVEN_UP as error:
            self.roster.give_up(member, epoch, error)
        except Exception as error:  # noqa: BLE001 - of a thread: raised where it is waited for
            if member.epoch == epoch:
                faults.append(error)

    def _wait_for(
        self, threads: dict[Member, threading.Thread], epochs: dict[Member, int], while_waiting: Callable[[], None]
    ) -> None:
        """Until every push has ended, or its server is silent: one that is stopped keeps its connection open."""
        heard = dict.fromkeys(threads, time.monotonic())
        told = time.monotonic()
        while running := [one for one, thread in threads.items() if thread.is_alive() and one.epoch == epochs[one]]:
            threads[running[0]].join(LOOK_S)
            if time.monotonic() - told <= TELL_EVERY_S:
                continue
            while_waiting()
            for member in running:
                asked = time.monotonic()
                if member.client.is_alive(min(_HEALTH_S, member.client.silence_s)):
                    heard[member] = time.monotonic()
                elif asked - heard[member] > member.client.silence_s:  # as in `RolloutClient.watch`
                    self.roster.lose(member, epochs[member])
            told = time.monotonic()
