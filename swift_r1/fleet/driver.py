"""A launch from its first agent to its last: places roles, starts them, watches them, and ends them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from swift_r1.errors import EXIT_OK, SwiftError, UsageError, one_line
from swift_r1.fleet.backend import ClusterBackend
from swift_r1.fleet.client import AgentClient, Event
from swift_r1.fleet.flags import LaunchArguments
from swift_r1.fleet.fleet import Fleet
from swift_r1.fleet.placement import NodeSlot, NoRoom, place_roles
from swift_r1.fleet.run_file import ROLLOUT, TRAIN, RunFile
from swift_r1.fleet.servers import FleetServers
from swift_r1.fleet.tasks import SERVER_END_S, TRAIN_END_S, FleetTask, LaunchContext
from swift_r1.fleet.training import Training
from swift_r1.runtime.processes import handlers_kept

_LOOK_S = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Driver:
    """Runs a launch.

    Args:
        environ: variables of every process, the servers' key among them.
        folder: the run's, as its flags name it; `logs` is where the launch writes what its processes say.
        say: is given lines about the launch; `show` lines of the first node's trainer.
    """

    def __init__(
        self,
        run: RunFile,
        backend: ClusterBackend,
        args: LaunchArguments,
        environ: Mapping[str, str],
        folder: str,
        logs: Path,
        resume: bool,
        say: Callable[[str], None],
        show: Callable[[str], None],
    ) -> None:
        self.run_file = run
        self.logs = logs
        self._say = say
        self._show = show
        self._events: SimpleQueue[Any] = SimpleQueue()  # which a signal's handler may put into
        self.fleet = Fleet(backend, self._events, args.silence_timeout)
        self.interrupted: int | None = None
        self._looked = 0.0
        self._begun = self._ending = self._at_once = False
        launch = LaunchContext(run, self.fleet, args, environ, self.log, self.taken, self._became)
        self.servers = FleetServers(launch, self._moved)
        self.training = Training(launch, folder, resume, self.servers)

    @property
    def tasks(self) -> list[FleetTask]:
        return [*self.training.tasks, *self.servers.tasks]

    @property
    def _wants_servers(self) -> bool:
        """Says whether training has not ended: its last step, too, may need a server that has just been lost."""
        waits = self.training.lives and not self._at_once
        return self.training.code is None and (self.interrupted is None or waits)

    def log(self, task: FleetTask) -> Path:
        return self.logs / f"{task.name}.log"

    def taken(self) -> list[NodeSlot]:
        return [
            task.place for task in self.tasks if task.place is not None and task.state != "given up"
        ]

    def run(self) -> int:
        """Returns the exit code of the run.

        Raises:
            UsageError: nodes cannot be reached, or have too little for the roles.
            ServerFailed: a server does not start.
        """
        with self._signals():
            try:
                self.fleet.open()
                self._until(lambda: self.fleet.complete)
                if self.interrupted is None:
                    self._place_all()
                    self._begun = True
                    for task in self.servers.tasks:
                        self.servers.begin(task)
                    self._until(lambda: self.servers.placed and self.servers.enough)
                if self.interrupted is None:
                    self.training.begin()
                    self._until(lambda: self.training.code is not None)
                code = (
                    128 + (self.interrupted or 0)
                    if self.training.code is None
                    else self.training.code
                )
                if code != EXIT_OK and self.training.why:
                    self._say(f"not restarted: {self.training.why}")
                return code
            except SwiftError as error:
                if self.training.lives:
                    self._say(
                        f"{one_line(error)}; training ends after its step, and saves; a signal ends it at once"
                    )
                raise
            finally:
                self._end()

    def _place_all(self) -> None:
        try:
            places = place_roles(self.run_file.roles, self.fleet.rooms())
        except NoRoom as error:
            lost = [
                f"{name} could not be reached: {why}" for name, why in self.fleet.faults.items()
            ]
            raise UsageError(*lost, str(error)) from error
        for task in self.tasks:
            task.place = places[task.role.name][task.number]
        for name, why in self.fleet.faults.items():
            self._say(f"{name} could not be reached, and is not needed now: {why}")

    def _until(self, over: Callable[[], bool]) -> None:
        """Handles what happens until something is so; or a signal came, and nothing trains."""
        while not over() and (self.interrupted is None or self.training.lives):
            self._step()

    def _step(self) -> None:
        self._handle(_LOOK_S / 4)
        if time.monotonic() - self._looked < _LOOK_S:
            return
        self._looked = time.monotonic()
        self.fleet.look()
        if self._begun and not self._ending:
            if self._wants_servers:
                self.servers.look()
            self.training.look(self.interrupted)

    def _handle(self, wait_s: float) -> None:
        try:
            item = self._events.get(timeout=wait_s)
        except Empty:
            return
        if isinstance(item, int):
            self._signalled(item)
            return
        source, event = item
        if source == "nodes":
            if isinstance(event, str):
                self._say(f"which nodes there are cannot be found out now: {event}")
            else:
                self.fleet.update(event)
            return
        if self.fleet.knows(source):
            self._from_agent(source, event)

    def _from_agent(self, client: AgentClient, event: Event) -> None:
        kind = event["event"]
        if kind == "hello":
            if self.fleet.met(client, event) and self._begun:
                self._say(f"{client.node.name} is there")
        elif kind == "gone":
            self._gone(client, event["text"])
        elif kind == "answer":
            if not self._ending:
                client.answered(event)
        elif kind == "warned":
            if self.interrupted is None:
                self._say(f"{client.node.name} will be taken away soon")
                self._signalled(signal.SIGTERM)
        else:
            task = next(
                (one for one in self.tasks if one.client is client and one.process == event["id"]),
                None,
            )
            if task is not None and kind == "output":
                self._output(task, event["text"])
            elif task is not None:
                task.ended(event["code"])
                self._after(task)

    def _gone(self, client: AgentClient, text: str) -> None:
        self.fleet.gone(client, text)
        was_there = client.about is not None
        why = self.fleet.faults[client.node.name]
        own = [
            task
            for task in self.tasks
            if task.client is client and (task.lives or task.state == "placed")
        ]
        if was_there and not self._ending:
            self._say(f"{client.node.name} is gone: {why}")
        for task in own:
            task.lost(why)
        for task in own:
            self._after(task)

    def _after(self, task: FleetTask) -> None:
        if self._ending:
            return
        if task.role.name == TRAIN:
            self.training.ended(task)
        elif self._wants_servers:
            self.servers.ended(task)

    def _output(self, task: FleetTask, text: str) -> None:
        with self.log(task).open("a", encoding="utf-8") as out:
            out.write(text)
        lines = [line for line in text.splitlines() if line.strip()]
        if lines:
            task.last_line = lines[-1].strip()[:300]
        if task is self.training.tasks[0]:
            self._show(text)

    def _became(self, task: FleetTask, what: str) -> None:
        where = f" on {task.node}" if task.place is not None else ""
        self._say(f"{task.name}{where}: {what}" if task.name not in what else what)

    def _moved(self, task: FleetTask) -> None:
        """Tells training that a server has another address, or none. It reads those of rollout servers while it runs;
        of the others it is told at its start, and begins again."""
        if not self.training.lives:
            return
        if task.role.name == ROLLOUT:
            self.training.tell_servers()
        elif task.url is not None:
            self.training.restart(f"{task.name} is at {task.url} now")

    def _signalled(self, number: int) -> None:
        if self.interrupted is not None or self._ending:
            self._say("everything ends at once")
            self._at_once = True
            for task in self.tasks:
                task.end(0)
            return
        self.interrupted = signal.SIGTERM if number == signal.SIGHUP else number
        if self.training.stop(self.interrupted):
            self._say("training ends after its step, and saves; once more ends everything at once")

    def _end(self) -> None:
        """Ends what still lives, servers after training, which may need them to save; and all agents."""
        self._ending = True
        for tasks, end_s in (
            (self.training.tasks, TRAIN_END_S),
            (self.servers.tasks, SERVER_END_S),
        ):
            for task in tasks:
                task.end(0 if self._at_once else end_s)
            deadline = time.monotonic() + 2 * end_s
            while any(task.lives for task in tasks) and time.monotonic() < deadline:
                self._step()
        self.fleet.close()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        # nohup
        heard = [
            one
            for one in _SIGNALS
            if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN
        ]
        with handlers_kept(*heard):
            for number in heard:
                signal.signal(number, lambda got, _: self._events.put(int(got)))
            yield
