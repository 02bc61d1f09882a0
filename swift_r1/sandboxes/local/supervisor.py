"""The life of a sandbox, seen from beside it: `sandbox.py` starts the first process here, and all others are its forks.

1. The first leaves the machine's namespaces; what it has forked ends with it, and it with the process that started it.
2. It forks one for each image, which goes into a rootfs with it (`rootfs.py`).
3. That one forks a supervisor for each sandbox. It stays outside of the sandbox's root and processes, where no command
   can see it; it forks process 1 of the sandbox, which adopts and collects, and each command.

No untrusted program ever runs in 1 to 3, and none of them holds anything of the trainer's but its own line.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import resource
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from swift_r1.sandboxes.local import frames, rootfs
from swift_r1.sandboxes.local.command import Ways, become, run_shell, write_file
from swift_r1.sandboxes.local.processes import Identity, Processes
from swift_r1.sandboxes.output import HeadAndTail
from swift_r1.workers.sandbox import entry, kernel
from swift_r1.workers.sandbox.calls import call_filter, command_filter

PROXY_PORT = 3128  # of the sandbox's loopback
_PROXY_WAITING = 128
_READ_BYTES = 1 << 16
_READS_AT_END = 16  # of what a pipe may hold: others in the background may fill it meanwhile
_MOST_OPEN_FILES = 4096  # of a sandbox: a socket may hold 200 KiB of the kernel's memory
# What a processor can take of new memory in a second, and how seldom or often that is looked at.
_BYTES_PER_SECOND = 4 << 30
_LOOK_SECONDS = (0.01, 0.25)
_MANY = 65536
_USERS = f"0 0 {_MANY}\n"
_ROOT_ALONE = "0 0 1\n"


def main(control: socket.socket) -> None:
    """Goes into namespaces, says READY, and then makes a rootfs for each frame with an image and a line, until nobody
    holds the other end of `control`."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out the trainer is not what is killed
    try:
        kernel.show_command(b"swift-r1-sandbox")
        many = entry.enter(control) == entry.WANTED_USERS
        if many:
            os.setgroups([])
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
            kernel.end_with_parent()  # another user has no such wish
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except OSError as error:
        control.sendall(entry.FAILED + str(error).encode())
        os._exit(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    gc.freeze()
    control.sendall(entry.READY)
    numbers = os.memfd_create("numbers") if many else None

    def live(frame: frames.Frame, line: socket.socket) -> NoReturn:
        _live_in_rootfs(frame, line, numbers)

    _fork_for_each(control, live)


def _fork_for_each(
    control: socket.socket, live: Callable[[frames.Frame, socket.socket], NoReturn]
) -> NoReturn:
    """Forks for each frame, which brings the other's own line, until nobody holds the other end of `control`."""
    control.settimeout(None)
    frame = frames.receive(control)
    while frame is not None:
        child = os.fork()
        if child == 0:
            control.close()
            line = socket.socket(fileno=frame.files[0])
            try:
                live(frame, line)
            except (OSError, ValueError) as error:
                _tell_failed(line, error)
            finally:
                os._exit(1)
        for number in frame.files:
            os.close(number)
        frame = frames.receive(control)
    os._exit(0)


def _live_in_rootfs(frame: frames.Frame, line: socket.socket, numbers: int | None) -> NoReturn:
    tree = frame.files[1] if len(frame.files) > 1 else None
    shown = rootfs.make_rootfs(frame.header["image"], tree)
    filters = (call_filter(), command_filter())
    frames.send(line, {})

    def live(frame: frames.Frame, line: socket.socket) -> NoReturn:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        Supervisor(line, _Sandbox(shown, numbers, *filters, **frame.header)).live()

    _fork_for_each(line, live)


def _tell_failed(line: socket.socket, error: Exception) -> None:
    with contextlib.suppress(OSError):  # nobody listens
        frames.send(line, {"error": str(error)})


@dataclass(frozen=True, slots=True)
class _Sandbox:
    """What a sandbox is made with.

    Attributes:
        numbers: a file, the same for all, of which each supervisor has locked a byte; None: there is one user alone.
    """

    shown: tuple[str, ...]
    numbers: int | None
    first_calls: bytes
    calls: bytes
    cpus: int | None
    cpu_seconds: float
    memory_bytes: int
    processes: int
    disk_bytes: int
    output_bytes: int
    seconds: float
    proxy: bool
    workdir: str
    env: dict[str, str]


@dataclass(eq=False)
class _Command:
    """One that runs; `before` are the processes that were there before it."""

    pid: int
    ended: int
    output: int
    deadline: float
    before: frozenset[Identity]
    printed: HeadAndTail
    late: bool = False


class Supervisor:
    """A sandbox's supervisor, in a process of its own.

    Args:
        line: where it is asked and answers; its end is the sandbox's.
    """

    def __init__(self, line: socket.socket, sandbox: _Sandbox) -> None:
        line.settimeout(None)
        self._line = line
        self._sandbox = sandbox
        self._over = ""
        self._notes: list[str] = []
        self._command: _Command | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(line, selectors.EVENT_READ, self._be_asked)
        self._deadline = time.monotonic() + sandbox.seconds
        self._next_look = 0.0
        if sandbox.cpus is not None:
            mine = sorted(os.sched_getaffinity(0))
            first = os.getpid() % len(mine)
            os.sched_setaffinity(0, [*mine, *mine][first : first + sandbox.cpus])
        self._number = None if sandbox.numbers is None else _own_number(sandbox.numbers)
        kernel.unshare(kernel.NEW_MOUNTS | kernel.NEW_NET | kernel.NEW_IPC | kernel.NEW_NAMES)
        kernel.raise_loopback()
        socket.sethostname("sandbox")
        files: list[int] = []
        self._proxy: socket.socket | None = None
        if sandbox.proxy:
            self._proxy = socket.create_server(("127.0.0.1", PROXY_PORT), backlog=_PROXY_WAITING)
            files.append(self._proxy.fileno())
        self._begin()
        frames.send(line, {}, files=files)

    def live(self) -> NoReturn:
        """Answers until nobody holds the other end of the line."""
        while True:
            for key, _ in self._selector.select(self._patience()):
                key.data()
            self._look()

    def _begin(self) -> None:
        """Makes the root, and process 1 in it. Raises OSError, ValueError."""
        rootfs.open_root(self._sandbox.disk_bytes, self._sandbox.shown)
        kernel.unshare(kernel.NEW_PIDS)
        mine, theirs = socket.socketpair()
        with mine, theirs:
            self._init = os.fork()
            if self._init == 0:
                mine.close()
                _be_first(theirs, self._sandbox, self._number)
            theirs.close()
            said, files, _, _ = socket.recv_fds(mine, 1 << 10, 3)
            if len(files) != 3:
                raise OSError(said.decode(errors="replace") or "process 1 ended")
            self._spaces = proc, mounts, users = files
            whose = _ROOT_ALONE if self._number is None else _USERS
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{self._init}/{name}").write_text(whose)
            mine.sendall(b".")
            if mine.recv(1) != b".":
                raise OSError("process 1 ended")
        self._processes = Processes(proc)
        self._init_ended = os.pidfd_open(self._init)
        self._selector.register(
            self._init_ended, selectors.EVENT_READ, lambda: self._end("its first process ended")
        )
        self._ways = Ways(
            mounts,
            users,
            self._sandbox.calls,
            max(1, round(self._sandbox.cpu_seconds)),
            self._sandbox.memory_bytes,
            self._sandbox.disk_bytes,
            self._sandbox.processes + 1,
            self._sandbox.workdir,
            self._sandbox.env,
        )

    def _end(self, why: str) -> None:
        """Ends all processes of the sandbox, and answers from now on that it is over."""
        if self._over:
            return
        self._over = why
        self._selector.unregister(self._init_ended)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._init_ended, signal.SIGKILL)
        if self._command is not None:  # it is waited for by this process alone
            self._finish(self._command)
        os.waitpid(self._init, 0)  # when it is gone so are all others
        for number in (self._init_ended, *self._spaces):
            os.close(number)

    def _be_asked(self) -> None:
        frame = frames.receive(self._line)
        if frame is None:
            self._end("closed")
            os._exit(0)
        try:
            if self._over:
                frames.send(self._line, {"over": self._over})
                return
            match frame.header["do"]:
                case "exec":
                    action = partial(run_shell, frame.body.decode(), self._sandbox.env)
                    self._start(action, frame.header["seconds"])
                case "write":
                    path, mode = frame.header["path"], frame.header["mode"]
                    action = partial(write_file, path, frame.body, mode)
                    self._start(action, frame.header["seconds"])
        except (OSError, ValueError) as error:
            frames.send(self._line, {"error": str(error)})

    def _start(self, action: Callable[[], None], seconds: float) -> None:
        read, write = os.pipe()
        before = frozenset(one.identity for one in self._processes.all())
        try:
            pid = os.fork()
        except OSError:
            os.close(read)
            os.close(write)
            raise
        if pid == 0:
            become(self._ways, write, action)
        os.close(write)
        os.set_blocking(read, False)
        command = _Command(
            pid,
            os.pidfd_open(pid),
            read,
            time.monotonic() + seconds,
            before,
            HeadAndTail(self._sandbox.output_bytes),
        )
        self._command = command
        self._next_look = 0.0
        self._selector.register(command.ended, selectors.EVENT_READ, partial(self._finish, command))
        self._selector.register(read, selectors.EVENT_READ, partial(self._read, command))

    def _read(self, command: _Command) -> None:
        """Takes some of what is printed. What processes in the background print after their command's end is read and
        dropped: they are not to wait, nor to end for it."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(command.output, _READ_BYTES)
            if not data:
                self._selector.unregister(command.output)
                os.close(command.output)
                command.output = -1
            elif command is self._command:
                command.printed.take(data)

    def _finish(self, command: _Command) -> None:
        self._selector.unregister(command.ended)
        os.close(command.ended)
        status = os.waitpid(command.pid, 0)[1]
        with contextlib.suppress(BlockingIOError):
            for _ in range(_READS_AT_END if command.output >= 0 else 0):
                command.printed.take(os.read(command.output, _READ_BYTES))
        self._command = None
        notes = "".join(f"[sandbox: {note}]\n" for note in self._notes)
        self._notes.clear()
        header: dict[str, Any] = {
            "code": None if command.late else os.waitstatus_to_exitcode(status),
            "truncated": bool(command.printed.cut),
            "notes": notes,
        }
        if self._over:
            header["over"] = self._over
        frames.send(self._line, header, command.printed.whole())

    def _patience(self) -> float | None:
        """Returns the seconds until something is to be looked at."""
        if self._over:
            return None
        times = [self._deadline]
        if self._command is not None and not self._command.late:
            times.append(self._command.deadline)
        if self._next_look:
            times.append(self._next_look)
        return max(0.0, min(times) - time.monotonic())

    def _look(self) -> None:
        """Ends what is over a limit."""
        if self._over:
            return
        now = time.monotonic()
        if now >= self._deadline:
            self._end(f"its {self._sandbox.seconds:g} seconds are over")
            return
        command = self._command
        if command is not None and now >= command.deadline and not command.late:
            command.late = True
            self._processes.end_since(command.before)
        if now >= self._next_look:
            self._look_at_processes()

    def _look_at_processes(self) -> None:
        """Kills the largest process while all together have too much memory; ends the sandbox that has used its
        processor time. Looks again before the memory that is left can be filled."""
        limits = self._sandbox
        processes = [one for one in self._processes.all() if one.running]
        if self._processes.seconds() > limits.cpu_seconds:
            self._end(f"its {limits.cpu_seconds:g} seconds of processor time are used")
            return
        taken = self._processes.might_have(processes)
        if taken > limits.memory_bytes:
            taken = self._processes.memory(processes)
        files = self._processes.open_files(processes)
        if taken > limits.memory_bytes or files > _MOST_OPEN_FILES:
            over = f"{limits.memory_bytes >> 20} MiB of memory"
            self._kill_largest(over if taken > limits.memory_bytes else f"{files} open files")
        # where the kernel does not count them: elsewhere those of the supervisor's own commands alone can be over it
        if sum(one.threads for one in processes) > 2 * limits.processes:
            self._end(f"it had more than {limits.processes} processes")
            return
        rate = _BYTES_PER_SECOND * len(os.sched_getaffinity(0))
        least, most = _LOOK_SECONDS
        wait = min(most, max(least, (limits.memory_bytes - taken) / rate))
        self._next_look = time.monotonic() + wait if processes else 0.0

    def _kill_largest(self, over: str) -> None:
        processes = [one for one in self._processes.all() if one.running]
        if not processes:  # what is left belongs to none
            self._end(f"it holds more than {over}")
            return
        largest = max(processes, key=lambda one: one.resident)
        self._processes.kill([largest.identity])
        self._notes.append(f"more than {over}: {largest.name} was killed")


def _own_number(numbers: int) -> int:
    """Returns a number above 0 that no other supervisor has while this one lives. Raises OSError: there is none left."""
    for offset in range(_MANY - 1):
        number = 1 + (os.getpid() + offset) % (_MANY - 1)
        with contextlib.suppress(BlockingIOError, PermissionError):  # another has it
            fcntl.lockf(numbers, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
            return number
    raise OSError(errno.EAGAIN, "there are too many sandboxes")


def _be_first(line: socket.socket, sandbox: _Sandbox, number: int | None) -> NoReturn:
    """Becomes process 1 of a sandbox: it goes into its root, gives the supervisor its namespaces, and collects orphans.

    Args:
        number: of the user that it has outside of the sandbox's namespace of users. The kernel counts the processes of
            all users of such a namespace for whoever has made it.
    """
    try:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        proc = rootfs.enter_root()
        if number is not None:
            most = sandbox.processes + 1
            resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
            os.setresuid(number, number, number)
        kernel.unshare(kernel.NEW_USERS)
        kernel.set_dumpable(True)  # the supervisor may write the maps
        spaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in ("mnt", "user")]
        socket.send_fds(line, [b"."], [proc, *spaces])
        line.recv(1)
        os.setresuid(0, 0, 0)
        kernel.set_dumpable(False)
        kernel.drop_privileges(None)
        kernel.end_with_parent()
        kernel.filter_calls(sandbox.first_calls)
        line.sendall(b".")
        os.closerange(0, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    except OSError as error:
        with contextlib.suppress(OSError):
            line.sendall(str(error).encode())
        os._exit(1)
    while True:
        signal.sigwait([signal.SIGCHLD])
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
