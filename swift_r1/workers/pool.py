"""A pool of processes for users' code, each call of which can be killed. Linux.

A host (`serve_workers`) beside the trainer loads nothing of the user's, and forks the workers, so that one that was killed
is replaced at once. It shows what they print, and ends them, with all that they have started, when the trainer ends,
however that ends. Calls and answers go between trainer and worker.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from queue import SimpleQueue
from typing import Any, Generic, Literal, TypeVar

from swift_r1.errors import RunFailed
from swift_r1.runtime.processes import adopt_orphans
from swift_r1.workers.confine import MEMORY_EXIT
from swift_r1.workers.fork_server import ForkServer, take_more_files
from swift_r1.workers.killing import end_group, end_marked
from swift_r1.workers.worker import become_worker

T = TypeVar("T")
ReadyT = TypeVar("ReadyT")

START_SECONDS = 120.0  # for a worker to import the plugins
_LOOK_SECONDS = 0.2
_END_SECONDS = 15.0  # for the host to end a worker, or all of them and itself
_TAKEN = "taken"
_SPAWN = multiprocessing.get_context("spawn")


class NoAnswer(Exception):
    """Says why a call has no answer: its worker was killed after the call's time limit (`timeout`) or by its `memory`
    limit, or it `died` with an exit code."""

    def __init__(self, kind: Literal["timeout", "memory", "died"], code: int | None = None) -> None:
        super().__init__(kind, code)
        self.kind = kind
        self.code = code


class _NotTaken(Exception):
    """The worker, or its host, was gone through no fault of the call."""


@dataclass(eq=False)
class _Call:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    limit: float
    future: Future[Any] = field(default_factory=Future)


def serve_workers(
    control: socket.socket, become: Callable[[int], None], ready: Callable[[], object]
) -> None:
    """Forks workers for the trainer at the other end of `control`, until that is gone."""
    os.setsid()  # the trainer decides when its workers end
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

    def work(row: Mapping[str, Any], ends: int) -> int:
        line = Connection(row["line"])
        become(ends)
        line.send((os.getpid(), ready()))
        with suppress(EOFError, ConnectionError):
            while True:
                function, arguments = line.recv()
                line.send(_TAKEN)
                line.send(function(*arguments))
        return 0

    server = ForkServer(control, None, take_more_files(), work, lambda _code, _said: {}, shown=True)
    try:
        with suppress(ConnectionError):
            server.serve()
    finally:
        server.close()


class _Host:
    """The trainer's handle of a host."""

    def __init__(
        self, become: Callable[[str, int], None], ready: Callable[[], object], mark: str
    ) -> None:
        self._mark = mark
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = _SPAWN.Process(
                target=serve_workers, args=(theirs, partial(become, mark), ready)
            )
            self._process.start()
        # Python waits at its end for processes that it has started
        Finalize(None, self._control.close, exitpriority=1)
        self._lock = threading.Lock()
        self._numbers = 0
        self._ended: dict[int, Future[int | None]] = {}
        self._listening = threading.Thread(target=self._listen, name="workers", daemon=True)
        self._listening.start()

    @property
    def alive(self) -> bool:
        return self._listening.is_alive()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def begin(self) -> tuple[int, Connection, Future[int | None]]:
        """Begins a worker: its number, the line to it, and its exit code, None where the host was lost. Raises OSError:
        the host is gone."""
        mine, theirs = socket.socketpair()
        with self._lock, theirs:
            self._numbers += 1
            number = self._numbers
            ended = self._ended[number] = Future()
            order = json.dumps({"begin": number, "environ": {}, "row": {}}).encode() + b"\n"
            socket.send_fds(self._control, [order], [theirs.fileno()])
        return number, Connection(mine.detach()), ended

    def end(self, number: int) -> None:
        with self._lock, suppress(OSError):  # it is gone, and its workers with it
            self._control.sendall(json.dumps({"end": number}).encode() + b"\n")

    def close(self) -> None:
        """Ends all workers, and shows before what they have printed."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._process.join(_END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._listening.join()
        self._control.close()

    def _listen(self) -> None:
        with suppress(OSError), self._control.makefile("rb") as lines:
            for line in lines:
                about = json.loads(line)
                self._ended.pop(about["ended"]).set_result(about["code"])
        # Where the host was killed, so were its children, but not what is below them.
        self._process.join(_END_SECONDS)
        end_marked(self._mark)
        for ended in list(self._ended.values()):
            ended.set_result(None)


class _Worker:
    """One place of a pool: a worker, or none until the next call."""

    def __init__(self, pool: WorkerPool[Any]) -> None:
        self._pool = pool
        self._host: _Host | None = None
        self._number = 0
        self._line: Connection | None = None
        self._ended: Future[int | None] = Future()
        self.pid: int | None = None

    def start(self) -> object:
        """Returns what `ready` has returned there. Raises NoAnswer, OSError."""
        self._host = self._pool.host()
        self._number, self._line, self._ended = self._host.begin()
        self.pid = None
        try:
            self.pid, ready = self._receive(START_SECONDS, lambda: self._pool.closed)
        except _NotTaken:
            raise NoAnswer("died") from None
        return ready

    @property
    def lives(self) -> bool:
        return self._line is not None and not self._ended.done()

    def answer(self, call: _Call) -> Any:
        """Returns what a call returns. Raises NoAnswer; _NotTaken: another worker may try it."""
        if not self.lives:
            self.start()
        assert self._line is not None
        try:
            self._line.send((call.function, call.arguments))
        except ConnectionError:
            self._lose()
            raise _NotTaken from None
        taken = False
        deadline = time.monotonic() + call.limit
        while not taken:
            try:
                taken = self._receive(deadline - time.monotonic(), call.future.cancelled) == _TAKEN
            except NoAnswer as error:
                raise (_NotTaken if error.kind == "died" else error) from None
        return self._receive(deadline - time.monotonic(), call.future.cancelled)

    def _receive(self, seconds: float, unwanted: Callable[[], bool]) -> Any:
        """Returns what the worker says; kills it when its time is over, or nobody wants that any more. Raises NoAnswer,
        _NotTaken."""
        assert self._line is not None and self._host is not None
        deadline = time.monotonic() + seconds
        try:
            while not self._line.poll(min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic()))):
                if time.monotonic() >= deadline or unwanted():
                    self._host.end(self._number)
                    self._lose()
                    raise NoAnswer("timeout")
            return self._line.recv()
        except (EOFError, ConnectionError):
            code = self._lose()
            if code is None:
                raise _NotTaken from None
            raise NoAnswer("memory" if code == MEMORY_EXIT else "died", code or 1) from None

    def _lose(self) -> int | None:
        """Returns the exit code of a worker that has ended or does so now; None where its host was lost."""
        assert self._line is not None
        self._line.close()
        self._line = None
        code = self._ended.result(_END_SECONDS)
        if code is None and self.pid is not None:
            end_group(self.pid)
        return code


class WorkerPool(Generic[ReadyT]):
    """Worker processes, for all threads; one that dies takes the call that it had with it, and is replaced.

    The host starts by spawn, so it does not matter what threads or libraries this process has. It imports the main
    module of the program again: keep that light.

    Args:
        what: the workers work on, in messages.
        count: of the workers.
        load: loads users' code into a worker; it must pickle.
        ready: called in each worker that is up.
        kept, memory, own: as of `become_worker`.
    """

    def __init__(
        self,
        what: str,
        count: int,
        load: Callable[[], object],
        ready: Callable[[], ReadyT],
        kept: Sequence[str],
        memory: float,
        own: Sequence[str] = (),
    ) -> None:
        self._what = what
        self._become = partial(become_worker, load, kept, memory, own)
        self._call_when_ready = ready
        self._logger = logging.getLogger(f"swift_r1.{what}s")
        self._lock = threading.RLock()
        self._host: _Host | None = None
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._ready: Future[ReadyT] = Future()
        self._workers = [_Worker(self) for _ in range(count)]
        self._threads: list[threading.Thread] = []
        self.closed = True

    def start(self) -> None:
        self.closed = False
        self._threads = [
            threading.Thread(target=self._work, args=(worker,), name=self._what, daemon=True)
            for worker in self._workers
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends the workers; calls without an answer get none."""
        self.closed = True
        for _ in self._threads:
            self._calls.put(None)
        with self._lock:
            if self._host is not None:
                self._host.close()
                self._host = None
        for thread in self._threads:
            thread.join()
        self._threads = []

    def pids(self) -> frozenset[int]:
        """Returns the workers that live."""
        return frozenset(one.pid for one in self._workers if one.lives and one.pid is not None)

    def host(self) -> _Host:
        """Returns the host, started again where it was killed. Raises NoAnswer: the pool is closed."""
        with self._lock:
            if self.closed:
                raise NoAnswer("died")
            if self._host is not None and not self._host.alive:
                self._logger.warning(
                    "the host of the %s workers was killed: started again", self._what
                )
                self._host.close()
                self._host = None
            if self._host is None:
                self._host = _Host(self._become, self._call_when_ready, secrets.token_hex(8))
            return self._host

    def wait_ready(self) -> ReadyT:
        """Returns what `ready` returned in a worker. Raises RunFailed: none is up within its deadline."""
        try:
            return self._ready.result(START_SECONDS + _END_SECONDS)
        except (NoAnswer, TimeoutError) as error:
            if isinstance(error, NoAnswer) and error.kind != "timeout":
                raise RunFailed(
                    f"the {self._what} workers die while they load the plugins (exit code {error.code})"
                ) from error
            what = f"no {self._what} worker was ready within {START_SECONDS:g} s"
            raise RunFailed(f"{what}: does a plugin hang?") from error

    def submit(
        self, function: Callable[..., T], arguments: tuple[Any, ...], limit: float
    ) -> Future[T]:
        """Gives the workers a call, which is killed after `limit` seconds, or when it is cancelled; its exception is
        NoAnswer."""
        call = _Call(function, arguments, limit)
        self._calls.put(call)
        return call.future

    def _work(self, worker: _Worker) -> None:
        try:
            ready = worker.start()
            with suppress(InvalidStateError):  # another was first
                self._ready.set_result(ready)  # type: ignore[arg-type]
        except (NoAnswer, OSError) as error:
            failure = error if isinstance(error, NoAnswer) else NoAnswer("died")
            with suppress(InvalidStateError):
                self._ready.set_exception(failure)
        for call in iter(self._calls.get, None):
            if self.closed:
                call.future.cancel()
            if call.future.cancelled():
                continue
            try:
                answer = self._answered(worker, call)
            except (NoAnswer, OSError) as error:
                failure = error if isinstance(error, NoAnswer) else NoAnswer("died")
                with suppress(InvalidStateError):  # it was cancelled
                    call.future.set_exception(failure)
            else:
                with suppress(InvalidStateError):
                    call.future.set_result(answer)

    def _answered(self, worker: _Worker, call: _Call) -> Any:
        try:
            return worker.answer(call)
        except _NotTaken:
            pass
        try:
            return worker.answer(call)
        except _NotTaken:
            raise NoAnswer("died") from None
