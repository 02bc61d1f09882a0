"""`python -m swift_r1.fleet.agent [SILENCE_S [told]]`: starts processes on a node for a driver, and ends them.

It speaks JSON lines on its standard input and output (`NodeAgent` says which). Keys and variables travel there, never
on a command line. When its input ends, when it gets a signal, or when nothing was heard for SILENCE_S seconds, it ends
all that it started, and whatever that has started, and itself. With `told` it passes SIGTERM on to the driver as an
event: so does Slurm announce the end of a job. It is two processes: the first only waits, and ends what is left where
the second was killed. Linux."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from swift_r1.errors import EXIT_USAGE
from swift_r1.launch.supervisor import is_ready
from swift_r1.runtime.hardware import free_ports, gpu_ids, usable_cpus
from swift_r1.runtime.libraries import own_version
from swift_r1.runtime.processes import adopt_orphans, end_with_parent, say
from swift_r1.workers.killing import end_children
from swift_r1.workers.process import SupervisedProcess

DEFAULT_SILENCE_S = 60.0
_LEFT_S = 5.0  # for processes to end after SIGTERM, where the agent itself was killed
_LOOK_S = 0.2
_CHUNK = 1 << 16
_MOST_UNSENT = 8 << 20  # bytes; beyond that the processes wait for their output to be read


class Child(SupervisedProcess):
    """A process that the driver asked for; `rest` is the start of a line of its output, which has ended
    where it is `silent`."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self.name = str(order["id"])
        self.end_s = float(order["end_s"])
        self.rest = b""
        self.silent = False
        super().__init__(
            order["words"],
            os.environ | order["environ"],
            ends_with_parent=True,
            cpus=order["cpus"],
            cwd=order["cwd"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        os.set_blocking(self.output, False)

    @property
    def output(self) -> int:
        assert self.stdout is not None
        return self.stdout.fileno()


@dataclass
class NodeAgent:
    """The agent of this node, and all that is under way here.

    Orders, each with `do`, and the answers, which have the order's `ask`:
        start: `id`, `words`, `environ` (beside the agent's own), `cwd`, `cpus` (a list or null), `end_s`.
        signal: `id`, `signal` (its number). end: `id`, `end_s`: SIGTERM, and SIGKILL so many seconds later.
        free_ports: `count`, `host`; answers `ports`. ready: `url`, `key`; answers `ready`.
        write: `path`, `text`; in one piece. lines: `path`, `add`, `remove`; changes the lines of a file, and leaves
        those that others have written. ping: answers nothing else.
    Events, each with `event`:
        hello: what the node is. output: `id`, `text`. ended: `id`, `code`, negative for a signal. answer: `ask`, and
        what was asked for or `error`. warned: SIGTERM came. gone: it ends, and all of this with it.
    """

    silence_s: float
    inp: int
    out: int
    children: dict[str, Child] = field(default_factory=dict)
    unsent: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)
    over: str | None = None
    warned: bool = False
    killed: bool = False  # something of what was started, by a signal

    def run(self) -> None:
        """Works for the driver until that is gone, and ends all that was started."""
        self.tell("hello", **about_node())
        heard = time.monotonic()
        while self.over is None:
            outputs = {child.output: child for child in self.children.values() if not child.silent}
            readers = [self.inp, *(outputs if len(self.unsent) < _MOST_UNSENT else ())]
            ready, writable, _ = select.select(
                readers, [self.out] if self.unsent else [], [], _LOOK_S
            )
            if self.inp in ready:
                heard = time.monotonic()
                self.listen()
            for one in set(ready) - {self.inp}:
                self.read(outputs[one])
            if writable:
                self.send()
            self.look()
            if self.warned:
                self.warned = False
                self.tell("warned")
            if time.monotonic() - heard > self.silence_s:
                self.over = f"nothing was heard for {self.silence_s:g} s"
        self.end()

    def listen(self) -> None:
        data = os.read(self.inp, _CHUNK)
        if not data:
            self.over = "the driver is gone"
            return
        self.received += data
        *lines, self.received = self.received.split(b"\n")
        for line in lines:
            order = json.loads(line)
            do: Callable[[Mapping[str, Any]], Mapping[str, Any] | None] = getattr(
                self, f"do_{order['do']}"
            )
            try:
                answer = do(order)
            except (OSError, ValueError) as error:
                answer = {"error": str(error)}
            if "ask" in order:
                self.tell("answer", ask=order["ask"], **(answer or {}))

    def do_ping(self, _order: Mapping[str, Any]) -> None: ...

    def do_start(self, order: Mapping[str, Any]) -> None:
        try:
            child = Child(order)
        except (OSError, subprocess.SubprocessError) as error:
            self.tell("output", id=order["id"], text=f"swift launch: cannot be started: {error}\n")
            self.tell("ended", id=order["id"], code=EXIT_USAGE)
            return
        self.children[child.name] = child

    def do_signal(self, order: Mapping[str, Any]) -> None:
        child = self.children.get(order["id"])
        if child:
            child.send_signal(order["signal"])

    def do_end(self, order: Mapping[str, Any]) -> None:
        child = self.children.get(order["id"])
        if child:
            child.ask_to_end(order["end_s"])

    def do_free_ports(self, order: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"ports": free_ports(order["count"], order["host"])}

    def do_lines(self, order: Mapping[str, Any]) -> None:
        path = Path(order["path"])
        before = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [line for line in before if line not in order["remove"] and line not in order["add"]]
        self.do_write(
            {"path": path, "text": "".join(f"{line}\n" for line in [*kept, *order["add"]])}
        )

    def do_write(self, order: Mapping[str, Any]) -> None:
        path = Path(order["path"])
        path.parent.mkdir(parents=True, exist_ok=True)
        # others may write here too
        part = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}")
        part.write_text(order["text"], encoding="utf-8")
        part.replace(path)

    def do_ready(self, order: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"ready": is_ready(order["url"], order["key"])}

    def read(self, child: Child) -> bool:
        """Passes on the whole lines of what a process has said; false once there is nothing more now."""
        try:
            data = os.read(child.output, _CHUNK)
        except BlockingIOError:
            return False
        child.silent = not data
        text = child.rest + data
        end = text.rfind(b"\n") + 1 if data and len(text) < 2 * _CHUNK else len(text)
        child.rest = text[end:]
        if end:
            self.tell("output", id=child.name, text=text[:end].decode(errors="replace"))
        return not child.silent

    def look(self) -> None:
        """Sees which processes have ended, and kills those that should have. Ranks whose launcher was killed save: the
        kernel has told them."""
        for child in list(self.children.values()):
            code = child.look()
            if code is not None and not child.late and self.ranks_below():
                child.deadline = min(child.deadline, time.monotonic() + child.end_s)
            elif code is not None:
                del self.children[child.name]
                end_children(self.running())
                while self.read(child):
                    pass
                if child.rest:
                    self.tell("output", id=child.name, text=child.rest.decode(errors="replace"))
                assert child.stdout is not None
                child.stdout.close()
                self.tell("ended", id=child.name, code=code)
                self.killed = self.killed or code < 0

    def running(self) -> set[int]:
        return {child.pid for child in self.children.values() if child.poll() is None}

    def ranks_below(self) -> bool:
        """Says whether ranks that torch's launcher has started live without it: they are children of this process."""
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.pid not in self.running() and "TORCHELASTIC_RUN_ID" in child.environ():
                    return True
        return False

    def tell(self, event: str, **values: Any) -> None:
        self.unsent += json.dumps({"event": event, **values}).encode() + b"\n"

    def send(self) -> None:
        """Writes as much as the way to the driver takes now."""
        try:
            del self.unsent[: os.write(self.out, self.unsent)]
        except BlockingIOError:
            return
        except OSError as error:
            self.over = f"the driver is gone ({error.strerror})"

    def end(self) -> None:
        """Ends everything, first what has the longest to end: training, whose step may need the servers. Output is
        still read, so that nobody waits for it to be, and sent as far as that goes."""
        self.tell("gone", text=str(self.over))
        for end_s in sorted({child.end_s for child in self.children.values()}, reverse=True):
            own = [child for child in self.children.values() if child.end_s == end_s]
            for child in own:
                left = child.deadline - time.monotonic()  # where it was told to end before
                child.ask_to_end(min(end_s, left))
            while any(child.name in self.children for child in own):
                for child in list(self.children.values()):
                    self.read(child)
                self.look()
                self.send()
                if len(self.unsent) > _MOST_UNSENT:
                    self.unsent.clear()
                time.sleep(_LOOK_S)
        end_children()
        if self.killed:
            remove_what_is_left()


def remove_what_is_left() -> None:
    """Removes the shared memory of servers that were killed, and had no time to empty it."""
    from swift_r1.sync.staging import remove_leftovers  # numpy is behind it

    remove_leftovers()


def about_node() -> dict[str, Any]:
    """Returns what the driver wants to know of this node: name, address, usable CPUs and GPUs (as CUDA_VISIBLE_DEVICES
    names them), interpreter, folder, version."""
    # client, its port, this host, its port
    connected = os.environ.get("SSH_CONNECTION", "").split()
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        named = "127.0.0.1"
    return {
        "host": socket.gethostname(),
        "address": connected[2] if len(connected) == 4 else named,
        "cpus": usable_cpus(),
        "gpus": gpu_ids(os.environ),
        "python": sys.executable,
        "folder": os.getcwd(),
        "version": own_version(),
        "pid": os.getpid(),
    }


def main() -> int:
    silence_s = float(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_SILENCE_S
    adopt_orphans()
    inner = os.fork()
    if inner:
        return _guard(inner)
    os.setsid()  # what kills the group of the first process, as Ray does, leaves one that ends all
    end_with_parent(signal.SIGTERM)
    adopt_orphans()
    # Nothing but the protocol may reach the driver.
    out = os.dup(1)
    os.dup2(2, 1)
    for one in (0, out):
        os.set_blocking(one, False)
    agent = NodeAgent(silence_s, 0, out)
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    # as Ray has SIGINT; what is started here would inherit it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    for number in signals:
        signal.signal(number, lambda received, _frame: _over(agent, received))
    if "told" in sys.argv[2:]:
        signal.signal(signal.SIGTERM, lambda _number, _frame: setattr(agent, "warned", True))
    agent.run()
    if agent.over != "the driver is gone":
        say(str(agent.over), "launch agent")
    return 0


def _over(agent: NodeAgent, number: int) -> None:
    agent.over = agent.over or f"ended by {signal.Signals(number).name}"


def _guard(inner: int) -> int:
    """Waits for the agent itself; where that was killed, ends what it leaves, which has got SIGTERM by then."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, partial(_pass_on, inner))
    nothing = os.open(os.devnull, os.O_RDWR)
    for one in (0, 1):
        os.dup2(nothing, one)  # the driver sees at once that the agent is gone
    _, status = os.waitpid(inner, 0)
    deadline = time.monotonic() + _LEFT_S
    while time.monotonic() < deadline and _has_children():
        time.sleep(_LOOK_S)
    end_children()
    if status:
        remove_what_is_left()
    return os.waitstatus_to_exitcode(status)


def _pass_on(inner: int, number: int, _frame: object) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(inner, number)


def _has_children() -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
