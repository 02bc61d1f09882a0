"""What reward workers print: all of it goes through pipes to the watchdog, which shows so much of each call.

So it does not matter who writes, Python, C code or a child process, nor whether the worker holds the GIL or dies: a
gigabyte costs the time to write it and is not seen, and the last words of a process that crashes are.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
from typing import TextIO

OUTPUT_A_CALL = 64 << 10  # bytes of each of the two streams that are shown; the rest is dropped
_DROPPED = b"\n[more output of this reward call is dropped]\n"
_STREAMS = (1, 2)
_PASS_ON_SECONDS = 1.0


class Output:
    """The worker's end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._texts: list[TextIO] = []

    def hand_over(self) -> None:
        """Makes both standard streams pipes to the watchdog, and waits until it has them.

        Raises:
            OSError: it does not answer.
        """
        pipes = [os.pipe() for _ in _STREAMS]
        socket.send_fds(self._connection, [b"."], [read for read, _ in pipes])
        if self._connection.recv(1) != b".":
            raise ConnectionError("the rewards' watchdog is gone")
        for number, (read, write) in zip(_STREAMS, pipes, strict=True):
            os.dup2(write, number)
            os.close(read)
            os.close(write)
        # New ones: those of the start may be for a file, and would seek.
        sys.stdout, sys.stderr = self._texts = [
            open(number, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
            for number in _STREAMS
        ]

    @staticmethod
    def taken_over(connection: socket.socket) -> list[int]:
        """In the watchdog: the readable ends.

        Raises:
            OSError: what came is not what `hand_over` sends.
        """
        _, found, _, _ = socket.recv_fds(connection, 1, len(_STREAMS))
        if len(found) != len(_STREAMS):
            raise ConnectionError("it sent no pipes")
        for number in found:
            os.set_blocking(number, False)
        connection.sendall(b".")
        return found

    def end_call(self) -> None:
        """What follows is another call's; waits a second at most until what was printed before is passed on."""
        for text in self._texts:
            text.flush()
        self._connection.settimeout(_PASS_ON_SECONDS)
        with contextlib.suppress(TimeoutError):  # the trainer's terminal takes no more: then it is its reader's turn
            self._connection.sendall(b".")
            self._connection.recv(1 << 10)


def show(connection: socket.socket, *pipes: int) -> None:
    """Copies the pipes to this process's standard streams until the worker, and all that write to them, have ended."""
    connection.setblocking(False)
    shown = dict(zip(pipes, _STREAMS, strict=True))
    left = dict.fromkeys(pipes, OUTPUT_A_CALL)
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        for pipe in pipes:
            selector.register(pipe, selectors.EVENT_READ)
        while shown:
            for key, _ in selector.select():
                if key.fileobj is connection:
                    if not _received(connection):
                        selector.unregister(connection)
                        continue
                    for pipe in tuple(shown):
                        _copy(pipe, shown, left, selector)
                    left = dict.fromkeys(pipes, OUTPUT_A_CALL)
                    with contextlib.suppress(OSError):  # the worker has ended
                        connection.send(b".")
                elif key.fd in shown:
                    _copy(key.fd, shown, left, selector)
    connection.close()


def _received(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1 << 10))
    except OSError:
        return False


def _copy(pipe: int, shown: dict[int, int], left: dict[int, int], selector: selectors.BaseSelector) -> None:
    """Copies what is in a pipe now, as far as it is to be seen; an ended one leaves `shown`."""
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
        except OSError:  # nobody reads it any more: the workers' pipes are emptied all the same
            return
