"""A process that others are forked from, so that what they import is imported once. Linux.

It speaks JSON lines over a socket. `{"begin": number, "environ": {...}, "row": {...}}` begins a process, whose standard
input is the row, and `{"end": number}` kills it. An open file that comes with the former is `line` of the row. Either
way `{"ended": number, "code": n, "stdout": text, "stderr": text, ...}` comes once the process and whatever it has
started are gone. When the socket closes, all of them are killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import selectors
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from swift_r1.errors import describe
from swift_r1.runtime.processes import adopt_orphans, end_with_parent
from swift_r1.workers.confine import limit_memory
from swift_r1.workers.killing import end_children, end_group, end_whole, own_children

KEPT_BYTES = {"stdout": 1 << 20, "stderr": 8 << 10, "result": 16 << 20}
"""Bytes at the end of what a process writes to each of its pipes."""
READ_BYTES = 1 << 16
_MOST_FILES = 1 << 16
_MOST_LINES = 64  # that come with orders read at once


OUTPUT_PER_CALL = 64 << 10  # bytes of each of the two streams that are shown; the rest is dropped
_DROPPED = b"\n[more output of this call is dropped]\n"
_SHOWN_ON = {"stdout": 1, "stderr": 2}
_SHOW_SECONDS = 0.2  # for what is shown to be read


@dataclass(eq=False)
class _Forked:
    number: int
    pid: int
    pidfd: int
    pipes: dict[int, str]  # by descriptor, what comes from it
    written: dict[str, bytearray] = field(
        default_factory=lambda: {name: bytearray() for name in KEPT_BYTES}
    )

    def read(self, descriptor: int) -> bool:
        """Takes what is there; False at the end of the pipe."""
        name = self.pipes[descriptor]
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        kept = self.written[name]
        kept += data
        del kept[: -KEPT_BYTES[name]]
        return bool(data)

    def read_all(self) -> None:
        for descriptor in self.pipes:
            while self.read(descriptor):
                pass

    def text(self, name: str) -> str:
        return self.written[name].decode(errors="replace")


@dataclass(eq=False)
class _Shown(_Forked):
    """Its output is shown by this process, of each call so much; a byte in `result` is the end of a call."""

    left: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SHOWN_ON, OUTPUT_PER_CALL))

    def read(self, descriptor: int) -> bool:
        name = self.pipes[descriptor]
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        if name not in _SHOWN_ON:
            for other, own in self.pipes.items():
                while own in _SHOWN_ON and self._more(other):
                    pass
            self.left = dict.fromkeys(_SHOWN_ON, OUTPUT_PER_CALL)
        elif self.left[name] > 0:
            _show(_SHOWN_ON[name], data[: self.left[name]])
            if len(data) >= self.left[name]:
                _show(_SHOWN_ON[name], _DROPPED)
            self.left[name] -= len(data)
        return bool(data)

    def _more(self, descriptor: int) -> bool:
        """Says whether there was something to show."""
        return bool(select.select([descriptor], [], [], 0)[0]) and self.read(descriptor)


def _show(stream: int, data: bytes) -> None:
    """Writes what is read in time: whoever waits for this process must not wait for a terminal."""
    while data and select.select([], [stream], [], _SHOW_SECONDS)[1]:
        try:
            data = data[os.write(stream, data[: select.PIPE_BUF]) :]
        except OSError:  # its reader is gone; the pipes are emptied all the same
            return


def take_more_files() -> tuple[int, int]:
    """Raises this process's limit of open files, and returns what it was, usually 1,024: a fork server has up to four
    files for each process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _MOST_FILES)), hard))
    return soft, hard


class ForkServer:
    """Starts processes, reads what they write, and tells when they have ended.

    Args:
        control: the socket.
        memory: GiB that each process may take beside what this one has; None: `run` sees to that.
        files: limits of each process's open files (`take_more_files`).
        run: runs in the forked process, with its row and the descriptor that it writes its result to; what it returns
            is the exit code.
        outcome: makes of an exit code and a result what `ended` says beside them.
        shown: whether what they print is shown here, instead of kept for `ended`.

    What this process has started before is none of theirs, and stays as long as this one.
    """

    def __init__(
        self,
        control: socket.socket,
        memory: float | None,
        files: tuple[int, int],
        run: Callable[[Mapping[str, Any], int], int],
        outcome: Callable[[int, bytes], Mapping[str, Any]],
        shown: bool = False,
    ) -> None:
        self._control = control
        self._memory = memory
        self._run = run
        self._outcome = outcome
        self._files = files
        self._kind = _Shown if shown else _Forked
        self._before = own_children()
        self._forked: dict[int, _Forked] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._received = b""
        self._lines: list[int] = []  # that came, for processes to be begun

    def serve(self) -> None:
        """Does what it is told until the other end of the socket is gone."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    data, lines, _, _ = socket.recv_fds(self._control, READ_BYTES, _MOST_LINES)
                    if not data:
                        return
                    self._lines += lines
                    *orders, self._received = (self._received + data).split(b"\n")
                    for order in orders:
                        self._take(json.loads(order))
                elif key.data.pidfd == key.fd:
                    self._end(key.data)
                elif key.fd in key.data.pipes and not key.data.read(key.fd):
                    self._close(key.data, key.fd)

    def close(self) -> None:
        end_whole([forked.pid for forked in self._forked.values()])
        end_children()
        for forked in self._forked.values():
            forked.read_all()

    def _take(self, message: Mapping[str, Any]) -> None:
        if "begin" in message:
            try:
                self._begin(message["begin"], message["environ"], message["row"])
            except OSError as error:  # no more processes, or files
                self._tell(
                    {
                        "ended": message["begin"],
                        "code": 1,
                        "raised": f"it cannot be started: {error}",
                    }
                )
            return
        forked = self._forked.get(message["end"])
        if forked is not None:
            end_whole([forked.pid])

    def _begin(self, number: int, environ: Mapping[str, str], row: Mapping[str, Any]) -> None:
        """Raises OSError where there are no more files or processes."""
        pipes: dict[str, tuple[int, int]] = {}
        line = self._lines.pop(0) if self._lines else None
        with contextlib.ExitStack() as undo:
            if line is not None:
                undo.callback(os.close, line)
                row = {**row, "line": line}
            for name in KEPT_BYTES:
                pipes[name] = os.pipe()
                for end in pipes[name]:
                    undo.callback(os.close, end)
            stdin = os.memfd_create("row")
            undo.callback(os.close, stdin)
            os.write(stdin, json.dumps(row).encode() + b"\n")
            os.lseek(stdin, 0, os.SEEK_SET)
            pid = os.fork()
            if pid == 0:
                try:
                    self._become(
                        stdin, {name: write for name, (_, write) in pipes.items()}, environ, row
                    )
                except BaseException as error:  # noqa: BLE001  nothing may run on as if it were the parent
                    os.write(2, f"{describe(error)}\n".encode())
                os._exit(1)
            undo.callback(os.waitpid, pid, 0)
            undo.callback(os.kill, pid, signal.SIGKILL)
            pidfd = os.pidfd_open(pid)
            undo.pop_all()
        os.close(stdin)
        if line is not None:
            os.close(line)
        with contextlib.suppress(OSError):  # the child does the same: whoever comes first
            os.setpgid(pid, pid)
        forked = self._kind(number, pid, pidfd, {read: name for name, (read, _) in pipes.items()})
        self._forked[number] = forked
        self._selector.register(forked.pidfd, selectors.EVENT_READ, forked)
        for read, write in pipes.values():
            os.close(write)
            os.set_blocking(read, False)
            self._selector.register(read, selectors.EVENT_READ, forked)

    def _end(self, forked: _Forked) -> None:
        """Ends what a process that is over has left behind, and tells how it ended."""
        self._selector.unregister(forked.pidfd)
        _, status = os.waitpid(forked.pid, 0)
        os.close(forked.pidfd)
        del self._forked[forked.number]
        end_group(forked.pid)
        end_children([*self._before, *(other.pid for other in self._forked.values())])
        forked.read_all()
        for descriptor in list(forked.pipes):
            self._close(forked, descriptor)
        code = os.waitstatus_to_exitcode(status)
        texts = {name: forked.text(name) for name in ("stdout", "stderr")}
        self._tell(
            {
                "ended": forked.number,
                "code": code,
                **texts,
                **self._outcome(code, bytes(forked.written["result"])),
            }
        )

    def _tell(self, answer: Mapping[str, Any]) -> None:
        self._control.sendall(json.dumps(answer).encode() + b"\n")

    def _close(self, forked: _Forked, descriptor: int) -> None:
        if forked.pipes.pop(descriptor, None) is not None:
            self._selector.unregister(descriptor)
            os.close(descriptor)

    def _become(
        self,
        stdin: int,
        pipes: Mapping[str, int],
        environ: Mapping[str, str],
        row: Mapping[str, Any],
    ) -> NoReturn:
        """Makes the child a process with limits of its own, and runs in it what is to be run."""
        end_with_parent(signal.SIGKILL)
        os.setpgid(0, 0)
        adopt_orphans()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        self._selector.close()
        self._control.close()
        os.dup2(stdin, 0)
        os.dup2(pipes["stdout"], 1)
        os.dup2(pipes["stderr"], 2)
        os.environ.update(environ)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # where memory runs out the trainer is not what is killed
        if self._memory is not None:
            limit_memory(self._memory)
        resource.setrlimit(resource.RLIMIT_NOFILE, self._files)
        os._exit(self._run(row, pipes["result"]))
