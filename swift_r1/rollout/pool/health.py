"""Which servers of a pool take work: new and lost ones are waited for, and get the newest weights before."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from swift_r1.errors import RunFailed, ServerUnreachable, SwiftError
from swift_r1.record.events import Events
from swift_r1.rollout.pool.session import GIVEN_UP, ServerLost, ServerSession
from swift_r1.rollout.staleness import ServedVersions
from swift_r1.sync.snapshot import SnapshotReader, Superseded, WeightSnapshot
from swift_r1.wire.protocol import ServerInfo

logger = logging.getLogger(__name__)

LOOK_S = 0.2
_REPORT_EVERY_S = 5.0
_QUIET_S = 60.0
_CLOSE_S = 10.0
_MAX_SUPERSEDED = 2  # pushes to a server that comes, by newer weights


class GatherAgain(Exception):
    """The servers are back, and no snapshot has their weights (they went by NCCL): all ranks push them again."""


class Health:
    """Who is ready, lost, or given up. Each lost or new server has a thread that waits for it, pushes what the snapshot
    holds, and lets it work, also in the middle of a round, since no other rank takes part.

    Args:
        served: learns under which number a server that comes got the weights.
        timeout_s: longest wait with no server at all; a line says when one has been away for as long.
        tell: hears of each server that is lost, given up, or back, that joins or leaves.
        source: what names the servers, where they come and go: a run without any waits then for another one.
        stopping: whether the run was told to stop; it waits for no server then.
    """

    def __init__(
        self,
        sessions: Sequence[ServerSession],
        snapshot: WeightSnapshot,
        served: ServedVersions,
        timeout_s: float,
        tell: Events | None = None,
        source: str | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.sessions = tuple(sessions)
        self._snapshot = snapshot
        self._served = served
        self._timeout_s = timeout_s
        self._tell = tell or Events()
        self._source = source
        self._stopping = stopping
        # What a newcomer must be like; without an instance, so that the server itself may come again.
        self._like = [(one.url, one.info.model_copy(update={"instance": ""})) for one in self.sessions[:1] if source]
        self._none_since = self._next_report = time.monotonic()  # where none is ready
        self._leaving: dict[str, threading.Thread] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._returned = False
        self._overdue: dict[ServerSession, ServerUnreachable] = {}
        self._awaiting_weights: dict[ServerSession, int] = {}  # and the number that each needs at least

    def close(self) -> None:
        """Ends the waiting for servers, and closes the sessions."""
        with self._changed:
            self._closed = True
            for session in self.sessions:
                self._see_off(session)
            self._changed.notify_all()
        end = time.monotonic() + _CLOSE_S
        for thread in list(self._leaving.values()):
            thread.join(max(0.0, end - time.monotonic()))

    def join(self, session: ServerSession) -> None:
        """A newcomer's session, from now on in this one's hands: it takes part once it has the newest weights."""
        with self._changed:
            self.sessions += (session,)
            if self._closed:
                self._see_off(session)
                return
            if not self.ready:
                self._none_since = time.monotonic()
            self._wait_for(session)

    def leave(self, session: ServerSession) -> None:
        """Takes a server out for good: others do what it has not answered, and its lease is given back."""
        with self._changed:
            self._take_out(session)
            self.sessions = tuple(one for one in self.sessions if one is not session)
            self._overdue.pop(session, None)
            self._awaiting_weights.pop(session, None)
            session.left = True
            self._see_off(session)
            left = len(self.ready)
        text = f"the rollout server at {session.url} leaves: {left} of {len(self.sessions)} servers"
        if session.joined:
            self._tell("server_left", text, server=session.url)
        logger.info(text)

    @property
    def ready(self) -> list[ServerSession]:
        with self._changed:
            return [one for one in self.sessions if one.ready]

    @property
    def wants_gather(self) -> bool:
        """Whether all servers that there are wait for weights that no snapshot has."""
        with self._changed:
            return bool(self._awaiting_weights) and not any(one.ready for one in self.sessions)

    def take_returned(self) -> bool:
        """Whether a server came back since the last call."""
        with self._changed:
            returned = self._returned
            self._returned = False
        return returned

    def lose(self, session: ServerSession, epoch: int) -> None:
        """Takes a server out, unless it was taken out since `epoch`, and waits for it in a thread."""
        with self._changed:
            if session.epoch != epoch or self._closed:
                return
            self._take_out(session)
        self._tell("server_lost", f"the rollout server at {session.url} is lost", server=session.url)
        left = len(self.ready)
        if left:
            others = f"the other {left}" if left > 1 else "the other one"
            logger.warning("the rollout server at %s is lost: its work goes to %s", session.url, others)
        self._wait_for(session)

    def give_up(self, session: ServerSession, epoch: int, error: SwiftError) -> None:
        """Takes a server out for good, unless it was taken out since `epoch`."""
        with self._changed:
            if session.epoch != epoch:
                return
            session.failed = error
            self._take_out(session)
        if session.joined:
            text = f"the rollout server at {session.url} is given up: {error}"
            self._tell("server_lost", text, server=session.url)
        else:
            text = f"the rollout server at {session.url} does not join: {error}"
        logger.error(text)

    def attempt(self, session: ServerSession, epoch: int, work: Callable[[], None]) -> bool:
        """Whether `work` with a server succeeded; where it did not, the server is lost, given up, or has left."""
        try:
            with self._using(session):
                work()
            return True
        except _Unwanted:
            return False
        except ServerLost:
            self.lose(session, epoch)
        except GIVEN_UP as error:
            self.give_up(session, epoch, error)
        except SwiftError as error:
            if not session.left:
                raise
            logger.info("of the rollout server at %s, which has left: %s", session.url, error)
        return False

    def check_any(self) -> None:
        """Raises ServerUnreachable where all servers have been away for `timeout_s`, or are while the run ends; what
        they were given up for where all were and no others can come; or GatherAgain."""
        if self.wants_gather:
            raise GatherAgain
        with self._changed:
            if any(one.ready for one in self.sessions):
                return
            if self._stopping():
                raise ServerUnreachable("no rollout server is there, and the run was told to stop")
            if any(one.users for one in self.sessions):  # with a large model longer than `timeout_s`
                self._none_since = time.monotonic()
            failed: list[SwiftError] = [one.failed for one in self.sessions if one.failed is not None]
            away = [self._overdue[one] for one in self.sessions if one in self._overdue and one.failed is None]
            left_s = self._none_since + self._timeout_s - time.monotonic()
        if self._source is not None:
            if left_s > 0:
                if time.monotonic() >= self._next_report:
                    logger.info("waiting for a rollout server of %s: none is ready; %.0f s left", self._source, left_s)
                    self._next_report = time.monotonic() + _REPORT_EVERY_S
                return
            waited_for = [f"{one.url} was not ready" for one in self.sessions if one.failed is None]
            why = "; ".join(map(str, [*failed, *(away or waited_for)])) or "it names none"
            raise ServerUnreachable(f"no rollout server of {self._source} came within {self._timeout_s:g} s ({why})")
        if len(failed) == len(self.sessions):
            raise failed[-1]
        if len(failed) + len(away) == len(self.sessions):
            if len(self.sessions) == 1:
                raise away[0]
            urls = ", ".join(one.url for one in self.sessions)
            raise ServerUnreachable(
                f"no rollout server came back within {self._timeout_s:g} s ({urls}); start one with `swift rollout`"
            )

    def wait_for_any(self) -> None:
        """Waits until a server is ready; raises as `check_any`."""
        while not self.ready:
            self.check_any()
            with self._changed:
                self._changed.wait(LOOK_S)

    def begin_version(self, begin: Callable[[int], None]) -> tuple[int, dict[ServerSession, int]]:
        """The number of a new version, above those of all before, for which `begin` is called; and the servers that get
        it, with their epochs."""
        with self._changed:
            version = max(max(self._served.current) + 1, *self._awaiting_weights.values(), 0)
            begin(version)
            self._served.pushing(version)
            targets = [one for one in self.sessions if one.ready or one in self._awaiting_weights]
            self._awaiting_weights.clear()
            return version, {one: one.epoch for one in targets}

    def has_newest(self, session: ServerSession, epoch: int) -> None:
        """The training thread has brought a server up to date."""
        with self._changed:
            if not session.ready and session.epoch == epoch:
                self._take_in(session)

    def _wait_for(self, session: ServerSession) -> None:
        """Has a thread bring it back, unless it has left meanwhile."""
        with self._changed:
            if not session.left:
                name = f"restore {session.url}"
                session.restoring = threading.Thread(target=self._restore, args=(session,), name=name, daemon=True)
                session.restoring.start()

    def _see_off(self, session: ServerSession) -> None:
        """Closes a session in a thread, once nobody works with it; all that work has deadlines. Under the lock."""

        def close() -> None:
            try:
                if session.restoring is not None:
                    session.restoring.join()
                with self._changed:
                    while session.users:
                        self._changed.wait(LOOK_S)
                session.close()
            finally:
                with self._changed:
                    if self._leaving.get(session.url) is threading.current_thread():
                        del self._leaving[session.url]
                    self._changed.notify_all()

        self._leaving[session.url] = threading.Thread(target=close, name=f"leave {session.url}", daemon=True)
        self._leaving[session.url].start()

    def _take_out(self, session: ServerSession) -> None:
        if [one for one in self.sessions if one.ready] == [session]:
            self._none_since = time.monotonic()
        session.ready = False
        session.epoch += 1
        self._changed.notify_all()

    def _take_in(self, session: ServerSession) -> None:
        session.ready = self._returned = True
        does = "is back" if session.joined else "joins"
        text = f"the rollout server at {session.url} {does} with weight version {max(self._served.current)}"
        self._tell("server_restored" if session.joined else "server_joined", text, server=session.url)
        logger.info("%s: %d of %d servers", text, len(self.ready), len(self.sessions))
        session.joined = True
        self._changed.notify_all()

    def _restore(self, session: ServerSession) -> None:
        """Waits for a server until it has the newest weights, is given up, has left, or the run ends."""
        epoch = session.epoch
        quiet_until = 0.0
        superseded = 0

        def report(line: str) -> None:
            """The countdown; seldom while other servers work."""
            nonlocal quiet_until
            self._check_wanted(session)
            if not self.ready or time.monotonic() >= quiet_until:
                logger.info(line)
                quiet_until = time.monotonic() + _QUIET_S

        while True:
            try:
                if self._bring_back(session, report, patient=superseded >= _MAX_SUPERSEDED):
                    return
            except _Unwanted:
                return
            except Superseded:
                superseded += 1
            except ServerLost:
                continue
            except SwiftError as error:
                if isinstance(error, GIVEN_UP) or not isinstance(error, ServerUnreachable):
                    self.give_up(session, epoch, error)
                    return
                if session not in self._overdue and len(self.sessions) > 1:
                    going_on = f"continuing with {len(self.ready)} of {len(self.sessions)} servers"
                    logger.warning("%s: %s", error, going_on if self.ready else "there is no other one")
                with self._changed:
                    self._overdue[session] = error
                    self._changed.notify_all()
            except Exception as error:
                if self._closed or session.left:  # its connections may have been closed under it
                    return
                logger.exception("bringing %s back failed", session.url)
                self.give_up(session, epoch, RunFailed(f"bringing {session.url} back failed: {error!r}"))
                return

    def _bring_back(self, session: ServerSession, report: Callable[[str], None], patient: bool) -> bool:
        """Waits for a server, at most the session's time; whether nothing is left to do for it here. A `patient` one
        gets its weights with the next version, if others work until then. Raises as `ServerSession.wait_until_back` and
        `push`, and _Unwanted."""
        with self._changed:
            # A version that is being written is waited for: the training thread completes it, or ends the run. So is
            # the end of an earlier session with this server, which gives its lease back.
            while self._snapshot.writing or session.url in self._leaving:
                self._check_wanted(session)
                self._changed.wait(LOOK_S)
            version = self._snapshot.version
            session.adapters = self._snapshot.adapter is not None
        check_wanted = partial(self._check_wanted, session)
        target = session.wait_until_back(self._served.current, report, check_wanted, self._members)
        with self._changed:
            self._overdue.pop(session, None)
        if session.pushing is not None and session.pushing.is_alive():
            # A push in which it was lost ends with its next answer, and may have succeeded.
            while session.pushing.is_alive():
                self._check_wanted(session)
                session.pushing.join(LOOK_S)
            return False
        if target is not None:
            with self._changed:
                self._check_wanted(session)
                if not self._is_newest(version):
                    return False
                if not self._snapshot.whole or (patient and self.ready):
                    self._awaiting_weights[session] = target
                    self._changed.notify_all()
                    return True
                self._served.pushing(target, again=True)
            with self._using(session):
                session.push(target, SnapshotReader(self._snapshot, version, copy=True), self._snapshot.adapter)
        with self._changed:
            self._check_wanted(session)
            if not self._is_newest(version):
                return False
            self._take_in(session)
        return True

    @contextmanager
    def _using(self, session: ServerSession) -> Iterator[None]:
        """While one works with a server: it is not closed, and nobody gives up waiting for it. Raises _Unwanted where
        it has left."""
        with self._changed:
            if session.left:
                raise _Unwanted
            session.users += 1
        try:
            yield
        finally:
            with self._changed:
                session.users -= 1
                self._changed.notify_all()

    def _members(self) -> list[tuple[str, ServerInfo]]:
        """Those that a newcomer must be like, and none of."""
        with self._changed:
            return [*self._like, *((one.url, one.info) for one in self.sessions if one.joined)]

    def _is_newest(self, version: int) -> bool:
        return self._snapshot.version == version and not self._snapshot.writing

    def _check_wanted(self, session: ServerSession) -> None:
        if self._closed or session.left:
            raise _Unwanted


class _Unwanted(Exception):
    """The run ends, or the server has left it."""
