"""The rollout servers of a run (one or more) as one, on rank 0. Which of them take work is in `health.py`, how requests
are spread over them in `router.py`."""

from __future__ import annotations

import logging
import resource
import threading
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from swift_r1.errors import ServerUnreachable, UsageError
from swift_r1.record.events import Events
from swift_r1.record.metrics import slowdown
from swift_r1.record.spans import Spans
from swift_r1.rollout.calls import OpenCalls
from swift_r1.rollout.pool.health import LOOK_S, Connection, GatherAgain, Health
from swift_r1.rollout.pool.router import Router
from swift_r1.rollout.pool.session import LogProbs, ServerSession, why_not_alike
from swift_r1.rollout.staleness import ServedVersions
from swift_r1.sync.buckets import Tensors
from swift_r1.sync.snapshot import SnapshotReader, Superseded, WeightSnapshot
from swift_r1.sync.transport import HTTP, NCCL, overlapped
from swift_r1.sync.writer import Link, fanout_of, joined
from swift_r1.wire.client import ReadImage
from swift_r1.wire.connections import KEPT, ServerLoop
from swift_r1.wire.protocol import AdapterConfig, RolloutOutput, RolloutRequest
from swift_r1.wire.server_file import parsed

logger = logging.getLogger(__name__)

_AT_ONCE = 64  # servers that are asked for something else than completions
# open files: of the process without its servers, of each server, and the most that are asked for
_FILES = 256
_FILES_EACH = 4
_MOST_FILES = 1 << 16
_FILE_LOOK_S = 0.5
_FILE_CLOSE_S = 10.0


class ServerPool:
    """Asks all servers, pushes to all, and brings lost ones back.

    Args:
        sessions: of servers that are alike (see `why_not_alike`); else UsageError is raised.
        timeout_s: longest wait with no server at all.
        transport: `--weight_transport`; `nccl` with one server.
        compare: whether only changes to the version before are sent; None: where weights went by HTTP the last time.
        fanout: `--weight_fanout`; None: what suits the servers.
        spans, tell: get what each server does, and which is lost or back, joins or leaves.
        source: what names the servers, where they come and go (`follow`).
        stopping: whether the run was told to stop.
    """

    def __init__(
        self,
        sessions: Sequence[ServerSession],
        timeout_s: float,
        transport: str,
        compare: bool | None = None,
        fanout: int | None = None,
        spans: Spans | None = None,
        tell: Events | None = None,
        source: str | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        if _requests_at_once(len(sessions)) < len(sessions):
            needed = _FILES + (_FILES_EACH + 1) * len(sessions)
            allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise UsageError(
                f"{len(sessions)} rollout servers take {needed} open files, and this process may open {allowed}: "
                "raise its limit (ulimit -Hn)"
            )
        why = why_not_alike([(one.url, one.first) for one in sessions])
        if why is not None:
            raise UsageError(why)
        infos = [one.first for one in sessions]
        # The servers' info at the start.
        of_all = {
            name: all(getattr(info, name) for info in infos) for name in ("own_base", "can_sleep")
        }
        self.first = infos[0].model_copy(update=of_all)
        self.served = ServedVersions(max(info.weight_version for info in infos))
        self.snapshot = WeightSnapshot()
        self.health = Health(
            sessions, self.snapshot, self.served, timeout_s, tell, source, stopping
        )
        self._spans = spans or Spans()
        self._numbers: dict[str, int] = {}
        for one in sessions:
            self._record(one)
        self.by_nccl = transport == NCCL
        self._compare = compare
        self._fanout = fanout
        self._told_fanout: int | None = None
        self._told_files = False
        self._shares_gpu = source is None and len(sessions) == 1 and sessions[0].shares_gpu
        # answers by weights that were too old, or not of this run; on the loop alone
        self._refused = 0
        self._counted_bytes = sum(one.writer.sent_bytes for one in sessions)
        # On the loop alone too: a server counts once, as one of the sessions or as one that has left.
        self._bytes_of_left = 0
        self._loop = ServerLoop.shared()

    @property
    def sessions(self) -> Sequence[ServerSession]:
        return self.health.sessions

    @property
    def version(self) -> int:
        """The highest number of the newest weights."""
        return max(self.served.current)

    def close(self) -> None:
        """Ends the waiting for servers, gives the leases back, and closes the connections."""
        self.health.close()
        self._loop.close()

    def follow(self, urls: Collection[str], make: Callable[[str], ServerSession]) -> None:
        """Makes the servers those of these `urls`: a newcomer's session, which `make` makes, joins, and who
        is no longer named leaves. To be called by one thread."""
        members = {one.url: one for one in self.sessions}
        for url in members.keys() - urls:
            self._loop.call(partial(self._part_from, members[url]))
        for url in sorted(set(urls) - members.keys()):
            newcomer = make(url)
            self._record(newcomer)
            self.health.join(newcomer)

    def _part_from(self, session: ServerSession) -> None:
        self._bytes_of_left += session.writer.sent_bytes
        self.health.leave(session)

    def _record(self, session: ServerSession) -> None:
        """A server that comes again writes its lane on."""
        number = self._numbers.setdefault(session.url, len(self._numbers))
        session.record(self._spans, f"server-{number}")

    def count_stale(self) -> None:
        """Counts an answer by weights of this run that were too old; called by the threads of prefetched rounds."""
        self._loop.call(self._count_refused)

    def _count_refused(self) -> None:
        self._refused += 1

    def take_metrics(self) -> dict[str, float]:
        """Returns what there is to log since the last call: answers that were refused, servers that take work, bytes of
        weights that were sent to all servers, the share of weights that changed, where versions are compared, and the
        slowest of several servers (`slowdown`)."""
        return self._loop.call(self._take_metrics)

    def _take_metrics(self) -> dict[str, float]:
        sessions = self.sessions
        sent = self._bytes_of_left + sum(one.writer.sent_bytes for one in sessions)
        taken = {
            "rollout/refused": float(self._refused),
            "rollout/servers": float(len(self.health.ready)),
            "rollout/bytes": float(sent - self._counted_bytes),
        }
        self._refused = 0
        self._counted_bytes = sent
        if self.snapshot.total:
            taken["rollout/changed_weights"] = self.snapshot.changed / self.snapshot.total
        paces = {one.url: one.take_pace() for one in sessions}
        return taken | slowdown("server", [paces.get(url, 0.0) for url in self._numbers])

    def ask(
        self,
        calls: OpenCalls,
        versions: Container[int],
        on_answer: Callable[[RolloutOutput], None] | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        """Asks for completions of the calls, until they are closed, by weights of these `versions`. Each output goes to
        `on_answer` (default: to the calls) as it comes; `look` (default: theirs) is called again and again, and what it
        raises ends it. Threads may ask at the same time, also while another one pushes.

        Raises:
            ServerUnreachable: no server was there for too long, or all are given up.
            RunFailed: a server refused a request, answered with other weights, or all are given up.
            GatherAgain: see there; what was answered by then has been handed over.
        """
        at_once = max(1, _requests_at_once(len(self.sessions)))
        if len(calls) > at_once and not self._told_files:
            allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            line = "at most %d requests at a time: this process may open %d files (raise `ulimit -Hn` for more)"
            logger.warning(line, at_once, allowed)
            self._told_files = True
        router = Router(self.health, calls, versions, at_once, self._count_refused)
        self._loop.run_with_items(router.run, on_answer or calls.answered, look or calls.look)
        self._loop.run(self._drop_connections(at_once))

    async def _drop_connections(self, at_once: int) -> None:
        """Closes all connections but a few to each server, where there are files for these beside so many requests."""
        sessions = self.sessions
        kept = int(KEPT * len(sessions) <= at_once)
        for session in sessions:
            await session.client.drop_connections(kept)

    def publish(self, buckets: Iterable[Tensors], adapter: AdapterConfig | None = None) -> None:
        """Brings all servers to new weights, those that are ready at once, the others as they come back. Raises as
        `ask`, and RunFailed where another trainer writes to one, or all refused the weights again and again."""
        try:
            if self.from_device(adapter is not None):
                self._send_from_device(buckets, adapter)
            else:
                self._send_from_snapshot(buckets, adapter)
        finally:
            if self.snapshot.writing:
                self.snapshot.end(whole=False)
        self.health.wait_for_any()

    def from_device(self, adapter: bool) -> bool:
        """Whether weights, or with `adapter` an adapter alone, are taken where they are."""
        return self.by_nccl or (self._shares_gpu and not adapter)

    def published(self) -> None:
        """A new version is served: earlier losses no longer count."""
        for connection in self.health.ready:
            connection.session.gained()

    def sleep(self, level: int) -> None:
        """The engines give their memory back, except one that is lost while another is there: it stays awake when it is
        back. Raises as `push`."""
        self._each(lambda session: session.sleep(level))

    def wake(self) -> None:
        """The engines have their memory again; raises as `push`."""
        self._each(ServerSession.wake)

    def largest_difference(
        self, sequences: Sequence[Sequence[int]], difference: Callable[[LogProbs], float]
    ) -> float:
        """The largest `difference` of an engine's log-probs of given tokens; each server's is logged. Raises as `push`,
        and RunFailed where a server refused the sequences."""
        found: dict[str, float] = {}

        def compare(session: ServerSession) -> None:
            copies = session.score(sequences, self.served.current)
            found[session.url] = max(map(difference, copies), key=_nan_is_largest)

        self._each(compare)
        if len(found) > 1:
            logger.info(
                "weight check: %s", ", ".join(f"{url} {value:.3g}" for url, value in found.items())
            )
        return max(found.values(), key=_nan_is_largest)

    def answers(self, request: RolloutRequest, read_image: ReadImage) -> list[RolloutOutput]:
        """Each server's own answer to a request. Raises as `largest_difference`."""
        found: dict[str, RolloutOutput] = {}

        def ask(session: ServerSession) -> None:
            found[session.url] = session.answer(request, read_image, self.served.current)

        self._each(ask)
        return list(found.values())

    def _each(self, work: Callable[[ServerSession], None]) -> None:
        """Runs `work` on each server that is ready, all at the same time, until it has ended well on at least one."""
        done = [False]
        while not any(done):
            self.health.wait_for_any()
            ready = self.health.ready
            with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(ready)))) as threads:
                done = list(
                    threads.map(
                        lambda one: self.health.attempt(one, lambda: work(one.session)), ready
                    )
                )

    def _send_from_device(self, buckets: Iterable[Tensors], adapter: AdapterConfig | None) -> None:
        """By NCCL, or to an engine on the same GPU. The snapshot has nothing, so a server that is lost gets its
        weights by another push."""
        with suppress(GatherAgain):
            self.health.wait_for_any()
        version, targets = self.health.begin_version(
            lambda number: self.snapshot.begin(number, None, False, False)
        )
        for connection in targets:
            lend = not self.by_nccl
            self.health.update(
                connection, partial(connection.session.update, version, buckets, adapter, lend=lend)
            )

    def _send_from_snapshot(
        self, buckets: Iterable[Tensors], adapter: AdapterConfig | None
    ) -> None:
        ready = [connection.session for connection in self.health.ready]
        by_http = any(one.writer.transport == HTTP for one in ready)
        compare = by_http if self._compare is None else self._compare
        shared = any(one.takes_files for one in ready)
        version, targets = self.health.begin_version(
            lambda number: self.snapshot.begin(number, adapter, compare, shared)
        )
        links = self._tree(targets)
        faults: list[Exception] = []

        def send_kept(connection: Connection) -> None:
            kept = SnapshotReader(
                self.snapshot, version, copy=False, wanted=lambda: not connection.over
            )
            try:
                link = links.get(connection)
                self.health.update(
                    connection,
                    partial(connection.session.update, version, kept, adapter, link=link),
                )
            except Superseded:
                pass  # the weights could not be gathered, or this server was lost for silence
            except Exception as error:  # noqa: BLE001 - of a thread: raised where it is waited for
                if not connection.over:
                    faults.append(error)
            finally:
                if connection in links:
                    links[connection].tell(False)

        threads = {
            connection: self.health.start_update(connection, partial(send_kept, connection))
            for connection in targets
        }
        overlapped(buckets, lambda _index, bucket: self.snapshot.add(bucket))
        self.snapshot.end(whole=True)
        self._wait_for(threads)
        if faults:
            raise faults[0]

    def _tree(self, targets: Sequence[Connection]) -> dict[Connection, Link]:
        """The servers that get weights over the network, each with its place in the tree. By itself a tree is made only
        of servers that others reach under the trainer's name for them."""
        within = [connection for connection in targets if self._is_within(connection.session)]
        fanout = fanout_of(self._fanout, len(within))
        if fanout and fanout != self._told_fanout:
            logger.info(
                "weights go to %d of %d servers, which pass them on (--weight_fanout)",
                fanout,
                len(within),
            )
            self._told_fanout = fanout

        def link(connection: Connection) -> Link:
            return Link(
                connection.session.client,
                connection.session.writer.token,
                lambda: not connection.over,
            )

        return dict(
            zip(within, joined([link(connection) for connection in within], fanout), strict=True)
        )

    def _is_within(self, session: ServerSession) -> bool:
        reached = self._fanout is not None or not session.is_on_loopback
        return session.writer.takes_relays and not session.takes_files and reached

    def _wait_for(self, threads: Mapping[Connection, threading.Thread]) -> None:
        """Until every push has ended, or its server is silent: a stopped one keeps its connection open."""

        watches = []
        for connection in threads:
            watch = self._loop.start(connection.session.client.watch(lambda: len(threads)))
            watch.add_done_callback(partial(self._lose_silent, connection))
            watches.append(watch)
        try:
            for connection, thread in threads.items():
                while thread.is_alive() and not connection.over:
                    thread.join(LOOK_S)
        finally:
            for watch in watches:
                watch.cancel()

    def _lose_silent(self, connection: Connection, watch: Future[None]) -> None:
        """Takes a server out whose watch has ended by itself."""
        if not watch.cancelled():
            error = watch.exception()
            if not isinstance(error, ServerUnreachable):
                logger.error("watching %s failed", connection.session.url, exc_info=error)
            self.health.lose(connection)


class Membership:
    """Has a pool follow a file (`wire/server_file.py`), from now on until `close`.

    What the file says counts once it was the same in two looks, half a second apart: it may be half-written. While it
    cannot be read the servers stay. A line that is no URL is left out.

    Args:
        make: makes the session with a newcomer, see `ServerPool.follow`.
    """

    def __init__(self, path: Path, pool: ServerPool, make: Callable[[str], ServerSession]) -> None:
        self._path = path
        self._pool = pool
        self._make = make
        self._seen: bytes | OSError | None = None
        self._followed: bytes | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server file", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(_FILE_CLOSE_S)

    def _run(self) -> None:
        while not self._closed.wait(_FILE_LOOK_S):
            try:
                self._look()
            except Exception:  # such as too many open files
                logger.exception("%s is not followed until it changes again", self._path)

    def _look(self) -> None:
        try:
            seen = self._path.read_bytes()
        except OSError as error:
            if not isinstance(self._seen, OSError):
                why = error.strerror or error
                logger.warning(
                    "%s cannot be read (%s): the rollout servers stay as they are",
                    self._path,
                    why,
                )
            self._seen = error
            return
        before = self._seen
        self._seen = seen
        if seen != before or seen == self._followed:
            return
        self._followed = seen
        servers = parsed(seen.decode(errors="replace"), str(self._path))
        for fault in servers.faults:
            logger.warning("%s: left out", fault)
        self._pool.follow(servers.urls, self._make)


def _requests_at_once(servers: int) -> int:
    """Returns for how many requests there are files: one that waits for its answer has a connection of its own. Raises
    this process's limit, usually 1,024, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = min(hard, _MOST_FILES)
    if soft < raised:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = raised
    return soft - _FILES - _FILES_EACH * servers


def _nan_is_largest(value: float) -> tuple[bool, float]:
    return value != value, value
