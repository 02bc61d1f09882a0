"""Which servers of a pool take work: lost ones are waited for, and come back with the newest weights."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from swift_r1.errors import RunFailed, ServerUnreachable, SwiftError
from swift_r1.sampling.pool.session import GIVEN_UP, ServerLost, ServerSession
from swift_r1.sampling.staleness import ServedVersions
from swift_r1.tracking.events import Events
from swift_r1.weights.snapshot import SnapshotReader, Superseded, WeightSnapshot

logger = logging.getLogger(__name__)

LOOK_S = 0.2
_QUIET_S = 60.0


class GatherAgain(Exception):
    """The servers are back, and no snapshot has their weights (they went by NCCL): all ranks push them again."""


class Health:
    """Who is ready, lost, or given up. Each lost server has a thread that waits for it, pushes what the snapshot holds,
    and lets it work again, also in the middle of a round, since no other rank takes part.

    Args:
        served: learns under which number a server that comes back got the weights.
        timeout_s: longest wait with no server at all; a line says when one has been away for as long.
        tell: hears of each server that is lost, given up, or back.
    """

    def __init__(
        self,
        sessions: Sequence[ServerSession],
        snapshot: WeightSnapshot,
        served: ServedVersions,
        timeout_s: float,
        tell: Events | None = None,
    ) -> None:
        self.sessions, self._snapshot, self._served, self._timeout_s = sessions, snapshot, served, timeout_s
        self._tell = tell or Events()
        self._changed = threading.Condition()
        self._closed = False
        self._returned = False
        self._overdue: dict[ServerSession, ServerUnreachable] = {}
        self._awaiting_weights: set[ServerSession] = set()

    def close(self) -> None:
        """Ends the waiting for lost servers."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

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
            returned, self._returned = self._returned, False
        return returned

    def lose(self, session: ServerSession, epoch: int) -> None:
        """Takes a server out, unless it was taken out since `epoch`, and waits for it in a thread."""
        with self._changed:
            if session.epoch != epoch or self._closed:
                return
            self._take_out(session)
        self._tell("server_lost", f"the rollout server at {session.url} is lost", server=session.url)
        if left := len(self.ready):
            others = f"the other {left}" if left > 1 else "the other one"
            logger.warning("the rollout server at %s is lost: its work goes to %s", session.url, others)
        threading.Thread(target=self._restore, args=(session,), name=f"restore {session.url}", daemon=True).start()

    def give_up(self, session: ServerSession, epoch: int, error: SwiftError) -> None:
        """Takes a server out for good, unless it was taken out since `epoch`."""
        with self._changed:
            if session.epoch != epoch:
                return
            session.failed = error
            self._take_out(session)
        text = f"the rollout server at {session.url} is given up: {error}"
        self._tell("server_lost", text, server=session.url)
        logger.error(text)

    def attempt(self, session: ServerSession, epoch: int, work: Callable[[], None]) -> bool:
        """Whether `work` with a server succeeded; where it did not, the server is lost or given up."""
        try:
            work()
            return True
        except ServerLost:
            self.lose(session, epoch)
        except GIVEN_UP as error:
            self.give_up(session, epoch, error)
        return False

    def check_any(self) -> None:
        """Raises ServerUnreachable where all servers have been away for `timeout_s`, what they were given up for where
        all were, or GatherAgain."""
        if self.wants_gather:
            raise GatherAgain
        with self._changed:
            if any(one.ready for one in self.sessions):
                return
            failed = [one.failed for one in self.sessions if one.failed is not None]
            away = [self._overdue[one] for one in self.sessions if one in self._overdue and one.failed is None]
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
            version = max(self._served.current) + 1
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

    def _take_out(self, session: ServerSession) -> None:
        session.ready = False
        session.epoch += 1
        self._changed.notify_all()

    def _take_in(self, session: ServerSession) -> None:
        session.ready = self._returned = True
        text = f"the rollout server at {session.url} is back with weight version {max(self._served.current)}"
        self._tell("server_restored", text, server=session.url)
        self._changed.notify_all()

    def _restore(self, session: ServerSession) -> None:
        """Waits for a lost server until it is back with the newest weights, is given up, or the run ends."""
        epoch, quiet_until = session.epoch, 0.0

        def report(line: str) -> None:
            """The countdown; seldom while other servers work."""
            nonlocal quiet_until
            self._check_open()
            if not self.ready or time.monotonic() >= quiet_until:
                logger.info(line)
                quiet_until = time.monotonic() + _QUIET_S

        while not self._closed:
            try:
                if self._bring_back(session, report):
                    return
            except _Closed:
                return
            except (Superseded, ServerLost):
                continue
            except SwiftError as error:
                if isinstance(error, GIVEN_UP) or not isinstance(error, ServerUnreachable):
                    self.give_up(session, epoch, error)
                    return
                if session not in self._overdue and len(self.sessions) > 1:
                    going_on = f"going on with {len(self.ready)} of {len(self.sessions)} servers"
                    logger.warning("%s: %s", error, going_on if self.ready else "there is no other one")
                with self._changed:
                    self._overdue[session] = error
                    self._changed.notify_all()
            except Exception as error:
                if not self._closed:  # else its connections were closed under it
                    logger.exception("bringing %s back failed", session.url)
                    self.give_up(session, epoch, RunFailed(f"bringing {session.url} back failed: {error!r}"))
                return

    def _bring_back(self, session: ServerSession, report: Callable[[str], None]) -> bool:
        """Waits for a server, at most the session's time; whether nothing is left to do for it here. Raises as
        `ServerSession.wait_until_back` and `push`."""
        with self._changed:
            # A version that is being written is waited for: the training thread completes it, or ends the run.
            while self._snapshot.writing:
                self._check_open()
                self._changed.wait(LOOK_S)
            version = self._snapshot.version
        target = session.wait_until_back(self._served.current, report)
        with self._changed:
            self._overdue.pop(session, None)
        if session.pushing is not None and session.pushing.is_alive():
            # A push in which it was lost ends with its next answer, and may have succeeded.
            while session.pushing.is_alive():
                self._check_open()
                session.pushing.join(LOOK_S)
            return False
        if target is not None:
            with self._changed:
                if not self._is_newest(version):
                    return False
                if not self._snapshot.whole:
                    self._awaiting_weights.add(session)
                    self._changed.notify_all()
                    return True
                self._served.pushing(target, again=True)
            session.push(target, SnapshotReader(self._snapshot, version, copy=True), self._snapshot.adapter)
        with self._changed:
            if not self._is_newest(version):
                return False
            self._take_in(session)
        logger.info(
            "the rollout server at %s is back with weight version %d: %d of %d servers",
            *(session.url, target or max(self._served.current), len(self.ready), len(self.sessions)),
        )
        return True

    def _is_newest(self, version: int) -> bool:
        return self._snapshot.version == version and not self._snapshot.writing and not self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise _Closed


class _Closed(Exception):
    """The run ends."""
