"""The nodes that train, as one: they start and end together, and then it is decided what comes of that."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from swift_r1.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PORT_TAKEN,
    EXIT_RANK_KILLED,
    EXIT_RUN_FAILED,
    EXIT_SERVER_UNREACHABLE,
    EXIT_TERMINATED,
    EXIT_USAGE,
)
from swift_r1.fleet.client import Event
from swift_r1.fleet.commands import rank_variables, server_file, train_words
from swift_r1.fleet.placement import NoRoom, find_places
from swift_r1.fleet.run_file import ROLLOUT, TRAIN
from swift_r1.fleet.servers import FleetServers
from swift_r1.fleet.tasks import TRAIN_END_S, FleetTask, LaunchContext
from swift_r1.runtime.stopping import LAUNCHED

_SETTLE_S = 60.0  # for the other nodes to end once one has failed
_KILL_S = 10.0
_BACK_S = 10.0  # for a node to come back before training goes on without it
_BY_SIGNAL = (EXIT_RANK_KILLED, EXIT_INTERRUPTED, EXIT_TERMINATED)
_CODES = {
    EXIT_USAGE: "a fault of the flags, the data or the environment does not go away",
    EXIT_RUN_FAILED: "the run itself failed, and would again",
}


class Training:
    """The nodes that train; `folder` is the run's."""

    def __init__(
        self, launch: LaunchContext, folder: str, resume: bool, servers: FleetServers
    ) -> None:
        self._launch = launch
        self._fleet = launch.fleet
        self._args = launch.args
        self._folder = folder
        self._resume = resume
        self._servers = servers
        self.role = launch.run.roles[TRAIN]
        self.tasks = [FleetTask(self.role, number) for number in range(self.role.count)]
        self.restarts = 0
        self.code: int | None = None
        self.why = ""
        self.again = False
        self._deadline: float | None = None
        self._codes: list[int] = []  # of those that ended before this ended the others
        self._ending_others = False
        self._told: set[str] = set()  # addresses of rollout servers
        self._since = 0.0
        self._said_waiting = False

    @property
    def lives(self) -> bool:
        return any(task.lives for task in self.tasks)

    def begin(self) -> None:
        """Starts all nodes at their places, where those are still there."""
        first = self.tasks[0].place
        there = {room.name for room in self._fleet.rooms()}
        assert first is not None
        lost = [task for task in self.tasks if task.node not in there]
        if lost:
            self._after_loss(lost)
            return
        for task in self.tasks:
            assert task.place is not None
            task.client = self._fleet.clients[task.place.node]
            task.state = "placed"
        address = self._fleet.address(first.node)
        client = self.tasks[0].client
        assert client is not None

        def with_port(answer: Event) -> None:
            if any(task.state != "placed" for task in self.tasks):
                return
            if "error" in answer:
                self.code = EXIT_USAGE
                self.why = f"no port of {address} on {first.node}: {answer['error']}"
                return
            [port] = answer["ports"]
            self.tell_servers()
            resume = self._resume or self.restarts > 0
            words = train_words(
                self._launch.run,
                self._servers.urls,
                self._folder,
                resume,
                server_file(self._folder),
            )
            for task in self.tasks:
                ranks = rank_variables(
                    self._launch.run, len(self.tasks), task.number, address, port
                )
                environ = {**self._launch.environ, LAUNCHED: "1", **ranks}
                task.start(words, environ, self._launch.log(task))
                self._launch.changed(task, "trains")

        client.ask("free_ports", with_port, count=1, host=address)

    def tell_servers(self) -> None:
        """Writes the addresses of the rollout servers for the nodes that train; those of others in the file stay."""
        now = self._servers.urls.get(ROLLOUT)
        if now is None:
            return
        gone = sorted(self._told.difference(now))
        first = not self._told
        self._told.update(now)
        for task in self.tasks:
            if task.client is not None and task.client.about is not None:
                # Relative to the folder in which training runs.
                base = Path(task.client.node.folder or task.client.about["folder"])
                path = str(base / server_file(self._folder))
                if first:  # the file may be an earlier launch's
                    task.client.ask("write", self._written, path=path, text="")
                task.client.ask("lines", self._written, path=path, add=now, remove=gone)

    def _written(self, answer: Event) -> None:
        if "error" in answer:
            self._launch.changed(
                self.tasks[0], f"the addresses of the servers cannot be written: {answer['error']}"
            )

    def restart(self, why: str) -> None:
        """Ends all nodes after the step that they are in; they begin again from the checkpoint."""
        self.again = True
        self.why = why
        for task in self.tasks:
            task.end(TRAIN_END_S)

    def stop(self, number: int) -> bool:
        """Passes on a signal, after which they save and end; whether there is anything to wait for."""
        for task in self.tasks:
            task.signal(number)
        return self.lives

    def ended(self, task: FleetTask) -> None:
        """Notes that one has ended, or that its node is gone."""
        if task.code != EXIT_OK:
            shown = task is self.tasks[0] or task.code is None  # what it said last
            self._launch.changed(task, task.ending if shown else f"{task.ending}: {task.last_line}")
        if task.code is None:
            for other in self.tasks:
                other.end(_KILL_S)
                if other.state == "placed":
                    other.state = "waiting"
        elif task.code != EXIT_OK and self._deadline is None:
            self._deadline = time.monotonic() + _SETTLE_S
        if task.code is None:
            self._ending_others = True
        elif not self._ending_others:
            self._codes.append(task.code)

    def look(self, interrupted: int | None) -> None:
        """Ends nodes that do not follow the others; decides when all have ended."""
        if self.code is not None or any(task.lives for task in self.tasks):
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._deadline = None
                self._ending_others = True
                for task in self.tasks:
                    task.end(_KILL_S)
            return
        self._deadline = None
        if any(task.state == "ended" for task in self.tasks):
            self._decide(interrupted)
        if self.code is None and self.again:
            self._begin_again()

    def _decide(self, interrupted: int | None) -> None:
        """Decides what comes of an end: an exit code of the launch, or that training begins again."""
        lost = [task for task in self.tasks if task.code is None]
        codes = self._codes
        asked = self.again
        self.again = False
        self._codes = []
        self._ending_others = False
        code = next((one for one in codes if one != EXIT_OK), EXIT_OK)
        for task in self.tasks:
            task.state = "waiting"
        if interrupted is not None:
            told = codes and not lost and code >= 0 and code not in _BY_SIGNAL
            self.code = code if told else 128 + interrupted
        elif lost:
            self._after_loss(lost)
        elif asked and code != EXIT_OK:
            self._again(self.why)
        elif any(one < 0 or one in _BY_SIGNAL for one in codes):
            self._again("a signal ended it")
        elif code == EXIT_PORT_TAKEN:
            self._again("its port was taken meanwhile")
        elif code == EXIT_SERVER_UNREACHABLE and self._servers.were_ready:
            self._again("its servers were lost")
        else:
            self.code = code
            self.why = _CODES.get(code, "")
        if self.code is not None:
            for task in self.tasks:
                task.state = "ended"

    def _after_loss(self, lost: Sequence[FleetTask]) -> None:
        self._again(f"{', '.join(task.node for task in lost)} is gone")

    def _again(self, why: str) -> None:
        if self.restarts >= self._args.max_restarts:
            self.code = EXIT_RUN_FAILED
            self.why = f"{why}, and it was restarted {self.restarts} times (--max_restarts)"
            return
        self.again = True
        self.why = why
        self._since = time.monotonic()

    def _begin_again(self) -> None:
        """Begins again on as many nodes as before, or in the end on fewer."""
        waited = time.monotonic() - self._since
        wanted = self.role.count
        if waited > self._args.node_timeout:
            self.code = EXIT_RUN_FAILED
            missing = "nodes came" if self._servers.enough else "servers were there"
            self.why = f"{self.why}, and no {missing} within {self._args.node_timeout:g} s (--node_timeout)"
            return
        if not self._servers.enough:
            return
        others = [
            place
            for place in self._launch.taken()
            if place not in [task.place for task in self.tasks]
        ]
        least = 1 if waited > _BACK_S else wanted
        for count in range(wanted, least - 1, -1):
            try:
                places = find_places(self.role, count, self._fleet.rooms(), others)
            except NoRoom as error:
                missing = str(error)
                continue
            self.restarts += 1
            self.tasks = self.tasks[:count] + [
                FleetTask(self.role, number) for number in range(len(self.tasks), count)
            ]
            for task, place in zip(self.tasks, places, strict=True):
                task.place = place
            self.again = self._said_waiting = False
            fewer = f" on {count} of {wanted} nodes" if count < wanted else ""
            self._launch.changed(
                self.tasks[0], f"{self.why}: training resumes from its last checkpoint{fewer}"
            )
            self.why = ""
            self.begin()
            return
        if not self._said_waiting:
            self._said_waiting = True
            self._launch.changed(self.tasks[0], f"{self.why}: training waits for nodes ({missing})")
