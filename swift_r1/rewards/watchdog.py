"""A process beside the reward workers that outlives the trainer. Linux.

A trainer that is killed with SIGKILL can clean up nothing, and its workers may be inside C code. So a process in a
session of its own watches the trainer and the workers (by pidfd, which cannot be forgotten or inherited like a pipe):

- when the trainer ends, each worker is stopped and all below it are killed, then the worker. A worker adopts what its
  descendants leave behind (`confine.py`), so while it is there nothing that a running reward started can hide, whatever
  its session or environment;
- when a worker ends, so does its process group.

It also passes on what workers print (`output.py`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import selectors
import socket
import struct
import sys
import threading
import time
from multiprocessing.connection import Connection

from swift_r1.rewards.confine import end_group, end_strays, end_whole
from swift_r1.rewards.output import Output, show

_REGISTER_SECONDS = 60.0  # for the watchdog's own start, on a busy machine
_END_SECONDS = 10.0  # for what was killed to be gone
_CREDENTIALS = struct.Struct("3i")  # of SO_PEERCRED: process, user, group


class Watchdog:
    """The trainer's handle of the process, which starts at once; `mark` is the pool's."""

    def __init__(self, mark: str) -> None:
        self.address = f"\0swift-r1-rewards-{mark}-{os.getpid()}-{time.monotonic_ns()}"
        context = multiprocessing.get_context("spawn")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(64)
            self._line, theirs = context.Pipe()
            arguments = (listener, theirs, os.getpid(), mark)
            self._process = context.Process(target=_watch, args=arguments, name="reward_watchdog", daemon=True)
            self._process.start()
            theirs.close()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def close(self) -> None:
        """Ends it, after the workers: what they printed last is shown first."""
        with contextlib.suppress(OSError):  # it was killed
            self._line.send(None)
        self._process.join(_END_SECONDS)
        self._process.kill()
        self._process.join()
        self._line.close()


def put_under_watch(address: str) -> Output:
    """In a worker, before any user's code: from here on this process and what it prints are the watchdog's.

    Raises:
        OSError: there is no watchdog, or it does not answer: nobody would end this process.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_REGISTER_SECONDS)
    connection.connect(address)
    output = Output(connection)
    output.hand_over()
    return output


def _watch(listener: socket.socket, line: Connection, trainer: int, mark: str) -> None:
    os.setsid()  # what is sent to the trainer's group is not for this process
    workers: dict[int, int] = {}
    shows: list[threading.Thread] = []
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(line, selectors.EVENT_READ)
        try:
            watched = os.pidfd_open(trainer)
        except ProcessLookupError:
            return
        selector.register(watched, selectors.EVENT_READ)
        while os.getppid() == trainer:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    found = _taken(listener)
                    if found is not None:
                        pidfd, pid, shown = found
                        workers[pidfd] = pid
                        shows = [*(thread for thread in shows if thread.is_alive()), shown]
                        selector.register(pidfd, selectors.EVENT_READ)
                elif key.fileobj is line:
                    if _asked_to_end(line):
                        for thread in shows:
                            thread.join(1.0)
                        return
                    selector.unregister(line)  # the trainer is dying
                elif key.fd in workers:
                    selector.unregister(key.fd)
                    end_group(workers.pop(key.fd))
                    os.close(key.fd)
    _end_all(list(workers.values()), mark)


def _asked_to_end(line: Connection) -> bool:
    try:
        line.recv()
    except (EOFError, OSError):
        return False
    return True


def _taken(listener: socket.socket) -> tuple[int, int, threading.Thread] | None:
    """A worker that registers: a descriptor that tells its end, its id, and the thread that shows what it prints."""
    connection, _ = listener.accept()
    pid, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.getuid():
        connection.close()
        return None
    try:
        connection.settimeout(5)
        pidfd = os.pidfd_open(pid)
        thread = threading.Thread(target=show, args=(connection, *Output.taken_over(connection)), daemon=True)
    except OSError as error:  # it ended while it registered, or is no worker
        print(f"swift_r1.rewards: process {pid} did not register: {error}", file=sys.stderr)
        connection.close()
        return None
    thread.start()
    return pidfd, pid, thread


def _end_all(workers: list[int], mark: str) -> None:
    """Ends the workers with all that is below them, then what carries the pool's mark and has no worker any more."""
    end_whole(workers)
    deadline = time.monotonic() + _END_SECONDS
    while end_strays(mark, frozenset()) and time.monotonic() < deadline:
        time.sleep(0.05)
