"""A process beside the reward workers that outlives the trainer and shows what workers print. Linux.

A trainer that is killed with SIGKILL cleans up nothing. So a process in a session of its own watches trainer and
workers by pidfd. When the trainer ends, each worker is stopped, and killed after everything below it: a worker adopts
what its descendants leave (`confine.py`), so nothing can hide. When a worker ends, so does its process group, and what
carries the pool's mark and has no worker any more.

The workers' output goes through pipes to the watchdog, which shows a limited part of each call's, whoever writes
(Python, C code that holds the GIL, a child process), also the last words of a process that crashes.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import TextIO

from swift_r1.runtime.processes import module_words
from swift_r1.workers.killing import end_group, end_marked, end_whole
from swift_r1.workers.process import SupervisedProcess

OUTPUT_PER_CALL = 64 << 10  # bytes of each of the two streams that are shown; the rest is dropped
_DROPPED = b"\n[more output of this reward call is dropped]\n"
_STREAMS = (1, 2)
_CLOSED = b"."  # comes to its standard input when the pool has ended
_PASS_ON_SECONDS = 1.0
_REGISTER_SECONDS = 60.0  # for the watchdog's own start, on a busy machine
_END_SECONDS = 10.0  # for what was killed to be gone
_CREDENTIALS = struct.Struct("3i")  # of SO_PEERCRED: process, user, group


class WorkerWatchdog:
    """The trainer's handle of the process; `mark` is the pool's."""

    def __init__(self, mark: str) -> None:
        self.address = f"\0swift-r1-rewards-{mark}-{os.getpid()}-{time.monotonic_ns()}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(64)
            number = listener.fileno()
            words = module_words(__name__, str(number), str(os.getpid()), mark)
            self._process = SupervisedProcess(
                [sys.executable, *words], stdin=subprocess.PIPE, pass_fds=[number]
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Ends it, after the workers; what they printed last is shown before."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as line:  # it was killed
            line.write(_CLOSED)
        self._process.finish(_END_SECONDS)


class WorkerOutput:
    """Ties a worker to the watchdog: once it is made, before any user's code, the watchdog ends this process and shows
    what it prints. Raises OSError: the watchdog is gone, and could not end this process."""

    def __init__(self, address: str) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.settimeout(_REGISTER_SECONDS)
        self._connection.connect(address)
        pipes = [os.pipe() for _ in _STREAMS]
        socket.send_fds(self._connection, [b"."], [read for read, _ in pipes])
        if self._connection.recv(1) != b".":
            raise ConnectionError("the rewards' watchdog is gone")
        for number, (read, write) in zip(_STREAMS, pipes, strict=True):
            os.dup2(write, number)
            os.close(read)
            os.close(write)
        # New ones: those of the start may be for a file, and would seek.
        self._texts: list[TextIO] = [
            open(number, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
            for number in _STREAMS
        ]
        sys.stdout, sys.stderr = self._texts

    def end_call(self) -> None:
        """Counts further output as another call's; waits at most a second until what was printed is passed on."""
        for text in self._texts:
            text.flush()
        self._connection.settimeout(_PASS_ON_SECONDS)
        # the trainer's terminal takes no more: then it is its reader's turn
        with contextlib.suppress(TimeoutError):
            self._connection.sendall(b".")
            self._connection.recv(1 << 10)


def _watch(listener: socket.socket, trainer: int, mark: str) -> None:
    workers: dict[int, int] = {}  # by pidfd
    shows: list[threading.Thread] = []
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        try:
            watched = os.pidfd_open(trainer)
        except ProcessLookupError:
            return
        selector.register(watched, selectors.EVENT_READ)
        while os.getppid() == trainer:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    registered = _registered(listener)
                    if registered is not None:
                        pidfd, pid, shown = registered
                        workers[pidfd] = pid
                        shows = [*(thread for thread in shows if thread.is_alive()), shown]
                        selector.register(pidfd, selectors.EVENT_READ)
                elif key.fd == 0:
                    if os.read(0, 1) != _CLOSED:  # the trainer is dying
                        selector.unregister(0)
                        continue
                    for thread in shows:
                        thread.join(1.0)
                    return
                elif key.fd in workers:
                    selector.unregister(key.fd)
                    end_group(workers.pop(key.fd))
                    os.close(key.fd)
                    strays = end_marked(mark, frozenset(workers.values()))
                    if strays:
                        _say(f"ended {len(strays)} processes that rewards left behind")
    # The workers with all that is below them; then what carries the mark and has no worker any more.
    end_whole(list(workers.values()))
    deadline = time.monotonic() + _END_SECONDS
    while end_marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)


def _registered(listener: socket.socket) -> tuple[int, int, threading.Thread] | None:
    """Returns a new worker: its pidfd, its id, and the thread that shows what it prints."""
    connection, _ = listener.accept()
    pid, user, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    if user != os.getuid():
        connection.close()
        return None
    try:
        connection.settimeout(5)
        pidfd = os.pidfd_open(pid)
        _, pipes, _, _ = socket.recv_fds(connection, 1, len(_STREAMS))
        if len(pipes) != len(_STREAMS):
            raise ConnectionError("it sent no pipes")
        connection.sendall(b".")
    except OSError as error:  # it ended while it registered, or is no worker
        _say(f"process {pid} did not register: {error}")
        connection.close()
        return None
    for pipe in pipes:
        os.set_blocking(pipe, False)
    thread = threading.Thread(target=_show, args=(connection, *pipes), daemon=True)
    thread.start()
    return pidfd, pid, thread


def _say(text: str) -> None:
    """Writes in a thread, since writing blocks while standard error is not read."""
    threading.Thread(
        target=_write, args=(2, f"swift_r1.rewards: {text}\n".encode()), daemon=True
    ).start()


def _show(connection: socket.socket, *pipes: int) -> None:
    """Copies the pipes to this process's standard streams until the worker, and all that write to them, have ended."""
    connection.setblocking(False)
    shown = dict(zip(pipes, _STREAMS, strict=True))
    left = dict.fromkeys(pipes, OUTPUT_PER_CALL)
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        for pipe in pipes:
            selector.register(pipe, selectors.EVENT_READ)
        while shown:
            for key, _ in selector.select():
                if key.fileobj is connection:
                    data = b""
                    with contextlib.suppress(OSError):
                        data = connection.recv(1 << 10)
                    if not data:
                        selector.unregister(connection)
                        continue
                    for pipe in tuple(shown):
                        _copy(pipe, shown, left, selector)
                    left = dict.fromkeys(pipes, OUTPUT_PER_CALL)
                    with contextlib.suppress(OSError):  # the worker has ended
                        connection.send(b".")
                elif key.fd in shown:
                    _copy(key.fd, shown, left, selector)
    connection.close()


def _copy(
    pipe: int, shown: dict[int, int], left: dict[int, int], selector: selectors.BaseSelector
) -> None:
    """Copies what is in a pipe now, up to the limit; a pipe that has ended is taken out of `shown`."""
    for _ in range(64):  # more than fits into a pipe, and then the others have their turn
        try:
            data = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            selector.unregister(pipe)
            os.close(pipe)
            del shown[pipe]
            return
        if left[pipe] > 0:
            _write(shown[pipe], data[: left[pipe]])
            if len(data) >= left[pipe]:
                _write(shown[pipe], _DROPPED)
            left[pipe] -= len(data)


def _write(stream: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(stream, data) :]
        except OSError:  # its reader is gone; the workers' pipes are emptied all the same
            return


if __name__ == "__main__":
    _watch(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3])
