"""A pool of processes for users' code, each call of which can be killed. Linux."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, Generic, Literal, TypeVar

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from swift_r1.errors import RunFailed
from swift_r1.workers.confine import MEMORY_EXIT
from swift_r1.workers.killing import end_group, end_marked, end_whole
from swift_r1.workers.watchdog import WorkerWatchdog
from swift_r1.workers.worker import become_worker

T = TypeVar("T")
ReadyT = TypeVar("ReadyT")

START_SECONDS = 120.0  # for a worker to import the plugins
_LOOK_SECONDS = 0.2


class NoAnswer(Exception):
    """Says why a call has no answer: it was not reached before the `deadline`, its worker was killed after its own
    time limit (`timeout`) or by its `memory` limit, or it `died` with an exit code."""

    def __init__(
        self, kind: Literal["deadline", "timeout", "memory", "died"], code: int | None = None
    ) -> None:
        super().__init__(kind, code)
        self.kind = kind
        self.code = code


@dataclass(frozen=True, slots=True)
class WorkerCall(Generic[T]):
    """A call that was given to the workers of a pool."""

    future: ProcessFuture[T]
    pool: ProcessPool

    def wait(self, deadline: float) -> T | None:
        """Returns what the call has returned; None where the pool broke down under it, whether or not the call is to
        blame. Raises NoAnswer."""
        while not self.future.done():
            left = deadline - time.monotonic()
            if left <= 0:
                self.future.cancel()  # type: ignore[no-untyped-call]  # pebble leaves it untyped
                raise NoAnswer("deadline")
            if not self.pool.active:  # it broke down, and may have forgotten the call
                return None
            futures.wait([self.future], min(_LOOK_SECONDS, left))
        return self._result()

    async def arrival(self) -> T | None:
        """Waits in an event loop for what the call returns; None where the pool broke down under it. Raises
        NoAnswer."""
        done = asyncio.wrap_future(self.future)
        while not done.done():
            if not self.pool.active:
                return None
            await asyncio.wait([done], timeout=_LOOK_SECONDS)
        if not done.cancelled():
            done.exception()  # asyncio complains of one that nobody has asked for
        return self._result()

    def _result(self) -> T | None:
        try:
            return self.future.result()
        except TimeoutError as error:
            raise NoAnswer("timeout") from error
        except ProcessExpired as error:
            raise NoAnswer(
                "memory" if error.exitcode == MEMORY_EXIT else "died", error.exitcode
            ) from error
        except (BrokenProcessPool, CancelledError):
            return None


class WorkerPool(Generic[ReadyT]):
    """Worker processes, for all threads; where a worker's death breaks the pool down, it is started again.

    Workers start by spawn, so it does not matter what threads or libraries this process has. They import the main
    module of the program again: keep that light.

    Args:
        what: the workers work on, in messages.
        count: of the workers.
        load: loads users' code into a worker; it must pickle.
        ready: called in the first worker that is up.
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
        self._count = count
        self._become = partial(become_worker, load, kept, memory, own)
        self._call_when_ready = ready
        self._logger = logging.getLogger(f"swift_r1.{what}s")
        self._mark = secrets.token_hex(8)
        self._lock = threading.RLock()
        self._watchdog: WorkerWatchdog | None = None
        self._pool: ProcessPool | None = None
        self._ready: ProcessFuture[ReadyT] | None = None

    def start(self) -> None:
        self._watchdog = WorkerWatchdog(self._mark)
        self._pool = ProcessPool(
            max_workers=self._count,
            initializer=self._become,
            initargs=(self._mark, self._watchdog.address),
            context=_WorkerContext(),
        )
        self._ready = self._pool.schedule(self._call_when_ready)

    def close(self) -> None:
        with self._lock:
            if self._pool is not None:
                self._pool.stop()  # type: ignore[no-untyped-call]  # pebble leaves it untyped
                self._pool.join()
                self._pool = None
            if self._watchdog is not None:
                self._watchdog.close()
                self._watchdog = None
                end_marked(self._mark)  # where the watchdog was killed

    def wait_ready(self) -> ReadyT:
        """Returns what `ready` returned in a worker. Raises RunFailed: none is up within its deadline."""
        assert self._ready is not None, "the pool was not started"
        try:
            return self._ready.result(timeout=START_SECONDS)
        except TimeoutError as error:
            what = f"no {self._what} worker was ready within {START_SECONDS:g} s"
            raise RunFailed(f"{what}: does a plugin hang?") from error
        except (BrokenProcessPool, ProcessExpired) as error:
            raise RunFailed(
                f"the {self._what} workers die while they load the plugins: {error}"
            ) from error

    def submit(
        self, function: Callable[..., T], arguments: tuple[Any, ...], limit: float
    ) -> WorkerCall[T]:
        """Gives the workers a call, which is killed after `limit` seconds. Raises RuntimeError: the pool has broken
        down, or its watchdog is gone."""
        with self._lock:
            assert self._pool is not None and self._watchdog is not None, "the pool is closed"
            if not self._watchdog.alive:
                raise RuntimeError("their watchdog was killed")
            future: ProcessFuture[T] = self._pool.schedule(function, args=arguments, timeout=limit)
            return WorkerCall(future, self._pool)

    def submit_surely(
        self, function: Callable[..., T], arguments: tuple[Any, ...], limit: float
    ) -> WorkerCall[T]:
        """Gives the workers a call, and starts them again where the pool has broken down."""
        with self._lock:
            try:
                return self.submit(function, arguments, limit)
            except RuntimeError as error:  # mostly: a worker died between two calls
                self._logger.warning(
                    "the %s workers broke down (%s), and are started again", self._what, error
                )
                self.close()
                self.start()
                return self.submit(function, arguments, limit)


class _WorkerProcess(SpawnProcess):
    def terminate(self) -> None:
        """Kills the worker, which ignores SIGTERM, with what it has started."""
        if self.pid is not None and self.is_alive():
            end_whole([self.pid])

    def is_alive(self) -> bool:
        """Returns whether the process runs; where it has ended by itself, ends what is left of its process group."""
        alive = super().is_alive()
        if self.pid is not None and not alive:
            end_group(self.pid)
        return alive

    @property
    def exitcode(self) -> int | None:
        """Returns 1 in the place of 0, which pebble takes for an orderly end: user's code has ended the worker."""
        return 1 if super().exitcode == 0 else super().exitcode


class _WorkerContext(SpawnContext):
    Process = _WorkerProcess
