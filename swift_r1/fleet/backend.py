"""The driver's view of a backend: which nodes there are, and a pipe to an agent on one of them."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from swift_r1.runtime.processes import module_words
from swift_r1.workers.process import SupervisedProcess

AGENT_MODULE = "swift_r1.fleet.agent"
# for the process of a pipe to end after its input has; an agent first ends what it has started
_END_S = 45.0


@dataclass(frozen=True)
class Node:
    """A machine that may run roles.

    Attributes:
        name: of this node alone; the same one as long as it is the same node.
        address: at which other nodes reach it; None: what its agent says.
        gpus: that roles may use; None: as many as its agent finds. `cpus` alike.
        python: the interpreter there that has this package; None: the agent's own.
        folder: where commands run, relative paths of the flags begin, and logs are; None: where the agent runs.
        roles: the only ones that it is for; empty: all.
    """

    name: str
    address: str | None = None
    gpus: int | None = None
    cpus: int | None = None
    python: str | None = None
    folder: str | None = None
    roles: tuple[str, ...] = ()


def agent_words(silence_s: float) -> list[str]:
    """Returns what follows the interpreter's name in the command of an agent that hears its driver at least so
    often."""
    return module_words(AGENT_MODULE, f"{silence_s:g}")


class AgentPipe(Protocol):
    """The lines to and from one agent. When it is closed, or this process ends, the agent ends all that it started."""

    def send(self, line: bytes) -> None:
        """Writes a line, with its end. Raises OSError: the agent, or the way to it, is gone."""

    def receive(self) -> bytes:
        """Waits for the agent's next line; `b""` once it or the way to it has ended. Called from one thread."""

    def close(self) -> None:
        """Ends the agent's input, and a while later what carries it. May be called twice, and from any thread."""

    def last_words(self) -> str:
        """Returns what the way to the agent said last, such as ssh's own error; after `receive` gave `b""`."""


class ClusterBackend(Protocol):
    """Nodes, and the way to them."""

    def nodes(self) -> Sequence[Node]:
        """Returns the nodes that there are now; called again and again, since nodes may come and go.

        Raises:
            UsageError: they cannot be found out, at the start.
        """

    def connect(self, node: Node) -> AgentPipe:
        """Starts an agent on the node. Raises OSError: it cannot be started."""

    def command(self, node: Node) -> Sequence[str]:
        """Returns the words that `connect` starts, for `--dry-run`."""


class ProcessPipe:
    """An agent behind the standard input and output of a process of this machine (the agent itself, ssh, srun)."""

    def __init__(self, words: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        pipe = subprocess.PIPE
        self._process = SupervisedProcess(
            words, environ, keeps_errors=True, stdin=pipe, stdout=pipe
        )

    def send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def receive(self) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # what was not yet written has no reader any more
            self._process.stdin.close()
        self._process.finish(_END_S)

    def last_words(self) -> str:
        return self._process.last_line()
