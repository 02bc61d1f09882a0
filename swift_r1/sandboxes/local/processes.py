"""The processes of a sandbox: how much they take together, and their end.

No cgroup is needed: they are found in the /proc of their own namespace, which none of them can leave.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_INIT = 1
_KILL_SECONDS = 10.0
_SHARED_SEGMENTS = "sysvipc/shm"
_SOCKETS = f"{_INIT}/net/sockstat"
_KERNELS = ("VmPTE:", "VmSwap:")
# what the kernel holds for one at most
_SOCKET_BYTES = 256 << 10
_PIPE_BYTES = 64 << 10


class Identity(NamedTuple):
    """A process, and not one that later gets its number: when it was started, in ticks of the machine's clock."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class Process:
    """A line of /proc.

    Attributes:
        running: whether it is no zombie.
        seconds: of processor time, with that of its children that it has waited for.
        resident: bytes in memory, with what it shares.
    """

    identity: Identity
    parent: int
    name: str
    running: bool
    seconds: float
    resident: int
    threads: int


class Processes:
    """All processes of a sandbox but its first.

    Args:
        proc: descriptor of their /proc.
    """

    def __init__(self, proc: int) -> None:
        self._proc = proc

    def all(self) -> list[Process]:
        return [one for one in self._found() if one.identity.pid != _INIT]

    def seconds(self) -> float:
        """Returns the processor time of those that run, of all that they waited for, and of the supervisor, which reads
        what they print, with its own children."""
        supervisor = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        ended = sum(sum(resource.getrusage(whose)[:2]) for whose in supervisor)
        return ended + sum(one.seconds for one in self._found())

    def memory(self, processes: Iterable[Process]) -> int:
        """Returns the bytes of memory that only these processes have, counting once what they share, with their page
        tables, and with what their sockets and pipes may hold."""
        pids = [one.identity.pid for one in processes]
        pipes = {link for pid in pids for link in self._links(pid) if link.startswith("pipe:")}
        return sum(map(self._share, pids)) + len(pipes) * _PIPE_BYTES + self._of_the_kernel(pids)

    def might_have(self, processes: Iterable[Process]) -> int:
        """Returns an upper bound of `memory` that is found faster: it counts what is shared for each."""
        processes = list(processes)
        resident = sum(one.resident for one in processes)
        most = self.open_files(processes) * _PIPE_BYTES
        return resident + most + self._of_the_kernel([one.identity.pid for one in processes])

    def open_files(self, processes: Iterable[Process]) -> int:
        """Returns how many descriptors they have: each may hold memory of the kernel."""
        count = 0
        for one in processes:
            with contextlib.suppress(OSError):
                folder = f"{one.identity.pid}/fd"
                # since Linux 6.2; before, it is 0
                count += os.stat(folder, dir_fd=self._proc).st_size or len(self._list(folder))
        return count

    def kill(self, identities: Collection[Identity], number: int = signal.SIGKILL) -> None:
        for identity in identities:
            with contextlib.suppress(OSError):  # it has ended
                folder = os.open(
                    str(identity.pid), os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._proc
                )
                try:
                    signal.pidfd_send_signal(folder, number)
                finally:
                    os.close(folder)

    def end_since(self, before: Collection[Identity]) -> None:
        """Kills all that were started since there were only `before`, except by one of those. They are stopped first,
        so that none of them starts another meanwhile."""
        deadline = time.monotonic() + _KILL_SECONDS
        stopped: set[Identity] = set()
        later = self._started_since(before)
        while later and time.monotonic() < deadline:
            fresh = later - stopped
            if fresh:
                self.kill(fresh, signal.SIGSTOP)
                stopped |= fresh
            else:
                self.kill(later)
            later = self._started_since(before)

    def _started_since(self, before: Collection[Identity]) -> set[Identity]:
        found = {one.identity.pid: one for one in self.all()}
        later = set()
        for one in found.values():
            if not one.running or one.identity in before:
                continue
            above: Process | None = one
            while above is not None and above.identity not in before:
                above = found.get(above.parent)
            if above is None:
                later.add(one.identity)
        return later

    def _found(self) -> list[Process]:
        found = []
        for name in os.listdir(self._proc):
            if name.isdigit():
                with contextlib.suppress(OSError):  # it has ended
                    found.append(_process(self._text(f"{name}/stat")))
        return found

    def _share(self, pid: int) -> int:
        wanted = ("Pss_Anon:", "Pss_Shmem:")
        with contextlib.suppress(OSError):  # it has ended
            words = [line.split() for line in self._text(f"{pid}/smaps_rollup").splitlines()]
            return sum(int(line[1]) << 10 for line in words if line[0] in wanted)
        return 0

    def _of_the_kernel(self, pids: Iterable[int]) -> int:
        """Returns the bytes of page tables, of what was swapped out, of System V's shared memory, which needs no process,
        and of what sockets may hold, also those that no process has open any more."""
        total = 0
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended
                words = [line.split() for line in self._text(f"{pid}/status").splitlines()]
                total += sum(int(line[1]) << 10 for line in words if line[0] in _KERNELS)
        with contextlib.suppress(FileNotFoundError):  # a kernel without it
            names, *lines = self._text(_SHARED_SEGMENTS).splitlines()
            columns = [names.split().index(name) for name in ("rss", "swap")]
            total += sum(int(line.split()[column]) for line in lines for column in columns)
        used = self._text(_SOCKETS).split()  # `sockets: used 3`, and then those of each protocol
        return total + int(used[2]) * _SOCKET_BYTES

    def _links(self, pid: int) -> list[str]:
        """Returns what the descriptors of a process stand for."""
        found = []
        with contextlib.suppress(OSError):  # it has ended
            for number in self._list(f"{pid}/fd"):
                with contextlib.suppress(OSError):  # it is closed
                    found.append(os.readlink(f"{pid}/fd/{number}", dir_fd=self._proc))
        return found

    def _list(self, folder: str) -> list[str]:
        number = os.open(folder, os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._proc)
        try:
            return os.listdir(number)
        finally:
            os.close(number)

    def _text(self, path: str) -> str:
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        with open(number, encoding="utf-8", errors="replace") as file:
            return file.read()


def _process(stat: str) -> Process:
    """Reads proc(5)'s `stat`. The name may hold anything, also blanks and brackets."""
    first, _, rest = stat.rpartition(")")
    pid, _, name = first.partition(" (")
    words = rest.split()
    return Process(
        Identity(int(pid), int(words[19])),
        parent=int(words[1]),
        name=name,
        running=words[0] not in "ZX",
        seconds=sum(int(word) for word in words[11:15]) / _TICKS,
        resident=int(words[21]) * _PAGE,
        threads=int(words[17]),
    )
