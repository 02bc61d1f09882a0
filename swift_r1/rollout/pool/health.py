"""Which servers of a pool take work: new and lost ones are waited for, and get the newest weights before.

    away --has or gets the newest weights--> ready --breaks off, or answers with other weights--> away
      |
      `--is there, but no snapshot has the weights--> behind --next version--> updating --has it--> ready
                                                                                  `--breaks off--> away
    away, ready, updating --fails again and again, or is not for this run--> given up
    any --is no longer named--> left

Only `Health` changes a state, under its lock and in `_enter`. A thread of its own waits for each server that is away,
and ends when the server enters another state. What follows a failure is decided at four places, from the inside out:

    another way for the buckets of a push   `_Delivery` in `sync/writer.py`
    lost, given up, or the run ends         `ServerSession.judge`
    back with or without a push, or behind  `Health._bring_back`
    all ranks gather the weights again      `Health.check_any` (GatherAgain), which `ServerRollouts.attend` follows
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
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


class ServerState(Enum):
    AWAY = auto()  # a thread waits for it: it has just been named, or it broke off
    BEHIND = auto()  # it is there, and gets the next version
    UPDATING = auto()  # it was behind, and the next version is on its way
    READY = auto()  # it has the newest weights, and takes work
    GIVEN_UP = auto()
    LEFT = auto()


@dataclass(eq=False, slots=True)
class Connection:
    """A server's part in the run until it breaks off, is given up or leaves: what belongs to one that is `over` no longer
    counts."""

    session: ServerSession
    over: bool = False


@dataclass(eq=False, slots=True)
class _Server:
    """One server's state, and what belongs to it.

    Attributes:
        joined: whether it was ever ready.
        error: why it is given up, or has been away for too long.
        needs: the lowest number that weights for it may have, where it is behind.
        restoring: what waits for it.
        pushing: the last push in a thread; two at once would disturb each other.
        users: threads that work with it.
    """

    session: ServerSession
    connection: Connection
    state: ServerState
    joined: bool
    error: SwiftError | None = None
    needs: int = 0
    restoring: threading.Thread | None = None
    pushing: threading.Thread | None = None
    users: int = 0


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
        self._servers = {
            one: _Server(one, Connection(one), ServerState.READY, joined=True) for one in sessions
        }
        self._snapshot = snapshot
        self._served = served
        self._timeout_s = timeout_s
        self._tell = tell or Events()
        self._source = source
        self._stopping = stopping
        # What a newcomer must be like; without an instance, so that the server itself may come again.
        self._like = [
            (one.url, one.info.model_copy(update={"instance": ""}))
            for one in sessions[:1]
            if source
        ]
        self._none_since = self._next_report = time.monotonic()  # where none is ready
        self._leaving: dict[str, threading.Thread] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._returned = False

    def close(self) -> None:
        """Ends the waiting for servers, and closes the sessions."""
        with self._changed:
            self._closed = True
            for server in self._servers.values():
                self._see_off(server)
            self._changed.notify_all()
        end = time.monotonic() + _CLOSE_S
        for thread in list(self._leaving.values()):
            thread.join(max(0.0, end - time.monotonic()))

    def join(self, session: ServerSession) -> None:
        """A newcomer's session, from now on in this one's hands: it takes part once it has the newest weights."""
        with self._changed:
            server = _Server(session, Connection(session), ServerState.AWAY, joined=False)
            self._servers[session] = server
            if self._closed:
                self._see_off(server)
                return
            if not self.ready:
                self._none_since = time.monotonic()
            self._wait_for(server)

    def leave(self, session: ServerSession) -> None:
        """Takes a server out for good: others do what it has not answered, and its lease is given back."""
        with self._changed:
            server = self._servers[session]
            self._enter(server, ServerState.LEFT)
            del self._servers[session]
            self._see_off(server)
            text = f"the rollout server at {session.url} leaves: {len(self.ready)} of {len(self._servers)} servers"
        if server.joined:
            self._tell("server_left", text, server=session.url)
        logger.info(text)

    @property
    def sessions(self) -> tuple[ServerSession, ...]:
        """With the servers that have not left."""
        with self._changed:
            return tuple(self._servers)

    def state(self, session: ServerSession) -> ServerState:
        with self._changed:
            return self._servers[session].state if session in self._servers else ServerState.LEFT

    @property
    def ready(self) -> list[Connection]:
        """The servers that take work."""
        with self._changed:
            return [one.connection for one in self._in(ServerState.READY)]

    @property
    def wants_gather(self) -> bool:
        """Whether all servers that there are wait for weights that no snapshot has."""
        with self._changed:
            return bool(self._in(ServerState.BEHIND)) and not self._in(ServerState.READY)

    def take_returned(self) -> bool:
        """Whether a server came back since the last call."""
        with self._changed:
            returned = self._returned
            self._returned = False
        return returned

    def lose(self, connection: Connection) -> None:
        """Takes a server out, unless its connection is over, and waits for it in a thread."""
        session = connection.session
        with self._changed:
            if connection.over or self._closed:
                return
            server = self._servers[session]
            self._enter(server, ServerState.AWAY)
        self._tell(
            "server_lost", f"the rollout server at {session.url} is lost", server=session.url
        )
        left = len(self.ready)
        if left:
            others = f"the other {left}" if left > 1 else "the other one"
            logger.warning(
                "the rollout server at %s is lost: its work goes to %s", session.url, others
            )
        self._wait_for(server)

    def give_up(self, connection: Connection, error: SwiftError) -> None:
        """Takes a server out for good, unless its connection is over."""
        session = connection.session
        with self._changed:
            if connection.over:
                return
            server = self._servers[session]
            server.error = error
            self._enter(server, ServerState.GIVEN_UP)
        if server.joined:
            text = f"the rollout server at {session.url} is given up: {error}"
            self._tell("server_lost", text, server=session.url)
        else:
            text = f"the rollout server at {session.url} does not join: {error}"
        logger.error(text)

    def attempt(self, connection: Connection, work: Callable[[], None]) -> bool:
        """Whether `work` with a server succeeded; where it did not, the server is lost, given up, or has left."""
        session = connection.session
        try:
            with self._using(session):
                work()
            return True
        except _Unwanted:
            return False
        except ServerLost:
            self.lose(connection)
        except GIVEN_UP as error:
            self.give_up(connection, error)
        except SwiftError as error:
            if self.state(session) is not ServerState.LEFT:
                raise
            logger.info("of the rollout server at %s, which has left: %s", session.url, error)
        return False

    def check_any(self) -> None:
        """Raises ServerUnreachable where all servers have been away for `timeout_s`, or are while the run ends; what
        they were given up for where all were and no others can come; or GatherAgain."""
        if self.wants_gather:
            raise GatherAgain
        with self._changed:
            if self._in(ServerState.READY):
                return
            if self._stopping():
                raise ServerUnreachable("no rollout server is there, and the run was told to stop")
            # with a large model longer than `timeout_s`
            if any(one.users for one in self._servers.values()):
                self._none_since = time.monotonic()
            failed = [one.error for one in self._in(ServerState.GIVEN_UP) if one.error is not None]
            others = [
                one for one in self._servers.values() if one.state is not ServerState.GIVEN_UP
            ]
            overdue = [one.error for one in others if one.error is not None]
            left_s = self._none_since + self._timeout_s - time.monotonic()
        if self._source is not None:
            if left_s > 0:
                if time.monotonic() >= self._next_report:
                    logger.info(
                        "waiting for a rollout server of %s: none is ready; %.0f s left",
                        self._source,
                        left_s,
                    )
                    self._next_report = time.monotonic() + _REPORT_EVERY_S
                return
            waited_for = [f"{one.session.url} was not ready" for one in others]
            why = "; ".join(map(str, [*failed, *(overdue or waited_for)])) or "it names none"
            raise ServerUnreachable(
                f"no rollout server of {self._source} came within {self._timeout_s:g} s ({why})"
            )
        if not others:
            raise failed[-1]
        if len(overdue) == len(others):
            if not failed and len(overdue) == 1:
                raise overdue[0]
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

    def begin_version(self, begin: Callable[[int], None]) -> tuple[int, list[Connection]]:
        """Returns the number of a new version, above those of all before, for which `begin` is called; and the servers
        that get it."""
        with self._changed:
            behind = self._in(ServerState.BEHIND)
            version = max(max(self._served.current) + 1, *(one.needs for one in behind), 0)
            begin(version)
            self._served.pushing(version)
            for server in behind:
                self._enter(server, ServerState.UPDATING)
            get_it = (ServerState.READY, ServerState.UPDATING)
            return version, [
                one.connection for one in self._servers.values() if one.state in get_it
            ]

    def update(self, connection: Connection, push: Callable[[], None]) -> None:
        """Runs `push`, see `attempt`; a server that was behind takes work afterwards."""
        if self.attempt(connection, push):
            with self._changed:
                if not connection.over and self.state(connection.session) is ServerState.UPDATING:
                    self._take_in(self._servers[connection.session])

    def start_update(self, connection: Connection, push: Callable[[], None]) -> threading.Thread:
        """Runs `push` in a thread, whose end is waited for before the server gets weights again."""
        thread = threading.Thread(target=push, name=f"push {connection.session.url}", daemon=True)
        with self._changed:
            if connection.session in self._servers:
                self._servers[connection.session].pushing = thread
        thread.start()
        return thread

    def _in(self, state: ServerState) -> list[_Server]:
        return [one for one in self._servers.values() if one.state is state]

    def _wait_for(self, server: _Server) -> None:
        """Has a thread bring it back, unless it has left meanwhile."""
        with self._changed:
            if server.state is not ServerState.LEFT:
                name = f"restore {server.session.url}"
                server.restoring = threading.Thread(
                    target=self._restore, args=(server,), name=name, daemon=True
                )
                server.restoring.start()

    def _see_off(self, server: _Server) -> None:
        """Closes a session in a thread, once nobody works with it; all that work has deadlines. Under the lock."""
        session = server.session

        def close() -> None:
            try:
                if server.restoring is not None:
                    server.restoring.join()
                with self._changed:
                    while server.users:
                        self._changed.wait(LOOK_S)
                session.close()
            finally:
                with self._changed:
                    if self._leaving.get(session.url) is threading.current_thread():
                        del self._leaving[session.url]
                    self._changed.notify_all()

        self._leaving[session.url] = threading.Thread(
            target=close, name=f"leave {session.url}", daemon=True
        )
        self._leaving[session.url].start()

    def _enter(self, server: _Server, state: ServerState) -> None:
        """Changes a server's state; under the lock."""
        if state in (ServerState.AWAY, ServerState.GIVEN_UP, ServerState.LEFT):
            if self._in(ServerState.READY) == [server]:
                self._none_since = time.monotonic()
            server.connection.over = True
            server.connection = Connection(server.session, over=state is ServerState.LEFT)
        server.state = state
        self._changed.notify_all()

    def _take_in(self, server: _Server) -> None:
        url = server.session.url
        self._enter(server, ServerState.READY)
        self._returned = True
        does = "is back" if server.joined else "joins"
        text = f"the rollout server at {url} {does} with weight version {max(self._served.current)}"
        self._tell("server_restored" if server.joined else "server_joined", text, server=url)
        logger.info("%s: %d of %d servers", text, len(self.ready), len(self._servers))
        server.joined = True

    def _restore(self, server: _Server) -> None:
        """Waits for a server until it has the newest weights, is given up, has left, or the run ends."""
        session = server.session
        connection = server.connection
        quiet_until = 0.0
        superseded = 0

        def report(line: str) -> None:
            """The countdown; seldom while other servers work."""
            nonlocal quiet_until
            self._check_wanted(server)
            if not self.ready or time.monotonic() >= quiet_until:
                logger.info(line)
                quiet_until = time.monotonic() + _QUIET_S

        while True:
            try:
                if self._bring_back(server, report, patient=superseded >= _MAX_SUPERSEDED):
                    return
            except _Unwanted:
                return
            except Superseded:
                superseded += 1
            except ServerLost:
                continue
            except SwiftError as error:
                if isinstance(error, GIVEN_UP) or not isinstance(error, ServerUnreachable):
                    self.give_up(connection, error)
                    return
                if server.error is None and len(self._servers) > 1:
                    going_on = f"continuing with {len(self.ready)} of {len(self._servers)} servers"
                    logger.warning(
                        "%s: %s", error, going_on if self.ready else "there is no other one"
                    )
                with self._changed:
                    server.error = error
                    self._changed.notify_all()
            except Exception as error:
                # its connections may have been closed under it
                if self._closed or server.state is ServerState.LEFT:
                    return
                logger.exception("bringing %s back failed", session.url)
                self.give_up(
                    connection, RunFailed(f"bringing {session.url} back failed: {error!r}")
                )
                return

    def _bring_back(self, server: _Server, report: Callable[[str], None], patient: bool) -> bool:
        """Waits for a server, at most the session's time; whether nothing is left to do for it here. A `patient` one
        gets its weights with the next version, if others work until then. Raises as `ServerSession.wait_until_back` and
        `push`, and _Unwanted."""
        session = server.session
        with self._changed:
            # A version that is being written is waited for: the training thread completes it, or ends the run. So is
            # the end of an earlier session with this server, which gives its lease back.
            while self._snapshot.writing or session.url in self._leaving:
                self._check_wanted(server)
                self._changed.wait(LOOK_S)
            version = self._snapshot.version
            session.adapters = self._snapshot.adapter is not None
        check_wanted = partial(self._check_wanted, server)
        target = session.wait_until_back(self._served.current, report, check_wanted, self._members)
        with self._changed:
            server.error = None
        if server.pushing is not None and server.pushing.is_alive():
            # A push in which it was lost ends with its next answer, and may have succeeded.
            while server.pushing.is_alive():
                self._check_wanted(server)
                server.pushing.join(LOOK_S)
            return False
        if target is not None:
            with self._changed:
                self._check_wanted(server)
                if not self._is_newest(version):
                    return False
                if not self._snapshot.whole or (patient and self.ready):
                    server.needs = target
                    self._enter(server, ServerState.BEHIND)
                    return True
                self._served.pushing(target, again=True)
            with self._using(session):
                session.update(
                    target,
                    SnapshotReader(self._snapshot, version, copy=True),
                    self._snapshot.adapter,
                )
        with self._changed:
            self._check_wanted(server)
            if not self._is_newest(version):
                return False
            self._take_in(server)
        return True

    @contextmanager
    def _using(self, session: ServerSession) -> Iterator[None]:
        """While one works with a server: it is not closed, and nobody gives up waiting for it. Raises _Unwanted where
        it has left."""
        with self._changed:
            server = self._servers.get(session)
            if server is None:
                raise _Unwanted
            server.users += 1
        try:
            yield
        finally:
            with self._changed:
                server.users -= 1
                self._changed.notify_all()

    def _members(self) -> list[tuple[str, ServerInfo]]:
        """Returns the servers that a newcomer must be like, and must not be one of."""
        with self._changed:
            return [
                *self._like,
                *(
                    (one.session.url, one.session.info)
                    for one in self._servers.values()
                    if one.joined
                ),
            ]

    def _is_newest(self, version: int) -> bool:
        return self._snapshot.version == version and not self._snapshot.writing

    def _check_wanted(self, server: _Server) -> None:
        if self._closed or server.state is ServerState.LEFT:
            raise _Unwanted


class _Unwanted(Exception):
    """The run ends, or the server has left it."""
