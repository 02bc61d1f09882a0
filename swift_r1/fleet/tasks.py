"""The tasks of a launch: a process of a role at a place, and what has become of it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from swift_r1.errors import EXIT_RANK_KILLED
from swift_r1.fleet.client import AgentClient
from swift_r1.fleet.commands import device_variables
from swift_r1.fleet.flags import LaunchArguments
from swift_r1.fleet.fleet import Fleet
from swift_r1.fleet.placement import NodeSlot
from swift_r1.fleet.run_file import TRAIN, Role, RunFile

State = Literal["waiting", "placed", "starting", "ready", "running", "ended", "given up"]
"""`placed` waits for a port; `starting`: a server does not serve yet; `ready`: it does; `running`: it trains."""
SERVER_END_S = 15.0  # for a server to end after SIGTERM
# for training to end and save after SIGTERM, where nobody waits for it any more
TRAIN_END_S = 180.0


@dataclass(eq=False)
class FleetTask:
    """One node that trains, or one replica of a server.

    Attributes:
        url, port: of a server, at its place.
        attempt: how often it has been started. started: when it was last (`time.monotonic`).
        failures: how often in a row it has ended without being ready.
        ever_ready: whether it has been, since the launch began.
        code: what it ended with; None while it runs, and where its node is gone.
        last_line: of what it said.
    """

    role: Role
    number: int
    state: State = "waiting"
    place: NodeSlot | None = None
    client: AgentClient | None = None
    url: str | None = None
    port: int | None = None
    attempt: int = 0
    started: float = 0.0
    failures: int = 0
    ever_ready: bool = False
    code: int | None = None
    last_line: str = "it said nothing"
    why: str = ""

    @property
    def name(self) -> str:
        return f"{self.role.name}-{self.number}"

    @property
    def process(self) -> str:
        """Returns the name by which the agent knows it."""
        return f"{self.name}.{self.attempt}"

    @property
    def lives(self) -> bool:
        return self.state in ("starting", "ready", "running")

    @property
    def node(self) -> str:
        return self.place.node if self.place else ""

    def start(self, words: list[str], environ: Mapping[str, str], log: Path) -> None:
        """Gives the order to its agent; `words` follow the interpreter's name. It sees its GPUs alone."""
        assert self.client is not None and self.client.about is not None and self.place is not None
        node = self.client.node
        self.attempt = self.attempt + 1
        self.started = time.monotonic()
        self.code = None
        self.state = "running" if self.role.name == TRAIN else "starting"
        devices = device_variables(self.place, bool(self.client.about["gpus"]))
        with log.open("a", encoding="utf-8") as out:
            out.write(f"swift launch: start {self.attempt} of {self.name}, on {node.name}\n")
        self.client.tell(
            "start",
            id=self.process,
            words=[node.python or self.client.about["python"], *words],
            environ={"PYTHONUNBUFFERED": "1", **environ, **devices},
            cwd=node.folder or self.client.about["folder"],
            cpus=self.place.cpus,
            end_s=TRAIN_END_S if self.role.name == TRAIN else SERVER_END_S,
        )

    def signal(self, number: int) -> None:
        if self.client is not None and self.lives:
            self.client.tell("signal", id=self.process, signal=number)

    def end(self, end_s: float) -> None:
        """Sends SIGTERM, and SIGKILL `end_s` seconds later."""
        if self.client is not None and self.lives:
            self.client.tell("end", id=self.process, end_s=end_s)

    def ended(self, code: int) -> None:
        self.state = "ended"
        self.code = code

    def lost(self, why: str) -> None:
        """Notes that its node is gone, and it with that."""
        self.state = "ended"
        self.code = None
        self.client = None
        self.why = why

    @property
    def ending(self) -> str:
        """Says how it ended, in words."""
        if self.code is None:
            return f"{self.name} is lost with {self.node} ({self.why})"
        how = (
            f"was killed by {signal.Signals(-self.code).name}"
            if self.code < 0
            else f"ended with {self.code}"
        )
        if self.code == EXIT_RANK_KILLED:
            how = "has ended, since a signal killed one of its ranks"
        return f"{self.name} on {self.node} {how}"


@dataclass(frozen=True)
class LaunchContext:
    """What the servers and the training of a launch have in common.

    Attributes:
        environ: variables of every process, the servers' key among them.
        log: returns where a task's output goes.
        taken: returns the places of all tasks.
        changed: is called with a task and words about what became of it.
    """

    run: RunFile
    fleet: Fleet
    args: LaunchArguments
    environ: Mapping[str, str]
    log: Callable[[FleetTask], Path]
    taken: Callable[[], Sequence[NodeSlot]]
    changed: Callable[[FleetTask, str], None]
