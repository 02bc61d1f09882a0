"""The servers of a launch: each is started, watched until it serves, and brought back when it is lost."""

from __future__ import annotations

import time
from collections.abc import Callable

from swift_r1.errors import EXIT_PORT_TAKEN, EXIT_RUN_FAILED, EXIT_USAGE, RunFailed
from swift_r1.flags.rollout import url_of
from swift_r1.fleet.client import Event
from swift_r1.fleet.commands import server_words
from swift_r1.fleet.placement import NoRoom, find_places
from swift_r1.fleet.run_file import JUDGE, TRAIN
from swift_r1.fleet.tasks import FleetTask, LaunchContext


class ServerFailed(RunFailed):
    """A server that the launch cannot go on without."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code if code in (EXIT_USAGE, EXIT_PORT_TAKEN) else EXIT_RUN_FAILED


class FleetServers:
    """All replicas of all roles but training.

    Args:
        moved: called when a server has another address than before, or none.
    """

    def __init__(self, launch: LaunchContext, moved: Callable[[FleetTask], None]) -> None:
        self._launch = launch
        self._fleet = launch.fleet
        self._moved = moved
        self._without: dict[str, float] = {}  # since when a server has no place, by its name
        roles = [role for name, role in launch.run.roles.items() if name != TRAIN]
        self.tasks = [FleetTask(role, number) for role in roles for number in range(role.count)]

    @property
    def urls(self) -> dict[str, list[str]]:
        """Returns the addresses of each role's servers that have a place."""
        found: dict[str, list[str]] = {task.role.name: [] for task in self.tasks}
        for task in self.tasks:
            if task.url is not None and task.lives:
                found[task.role.name].append(task.url)
        return found

    @property
    def placed(self) -> bool:
        """Says whether each server has an address, or none now: it was given up, or waits for a place."""
        return all(
            task.url is not None or task.state in ("given up", "waiting") for task in self.tasks
        )

    @property
    def enough(self) -> bool:
        """Says whether training may begin: each role has a server. Training itself waits for all but the judge."""
        judges = [task for task in self.tasks if task.role.name == JUDGE]
        return all(self.urls.values()) and all(task.state == "ready" for task in judges)

    @property
    def were_ready(self) -> bool:
        """Says whether there are servers, and each has served."""
        return bool(self.tasks) and all(task.ever_ready for task in self.tasks)

    def begin(self, task: FleetTask) -> None:
        """Starts a server at its place, at the port that it had there before."""
        assert task.place is not None
        task.client = self._fleet.clients[task.place.node]
        task.state = "placed"
        if task.url is not None:
            self._start(task)
            return
        address = self._fleet.address(task.place.node)
        client = task.client

        def with_port(answer: Event) -> None:
            if task.client is not client or task.state != "placed":
                return
            if "error" in answer:
                raise ServerFailed(
                    f"{task.name} on {task.node}: no port of {address}: {answer['error']}",
                    EXIT_USAGE,
                )
            [task.port] = answer["ports"]
            task.url = url_of(address, task.port)
            self._start(task)
            self._moved(task)

        client.ask("free_ports", with_port, count=1, host=address)

    def _start(self, task: FleetTask) -> None:
        assert task.place is not None and task.port is not None
        words = server_words(
            self._launch.run, task.role.name, self._fleet.address(task.place.node), task.port
        )
        task.start(words, self._launch.environ, self._launch.log(task))
        self._launch.changed(task, f"started at {task.url}")

    def look(self) -> None:
        """Asks who serves, and finds places for those that have none. Raises ServerFailed: the judge never did in
        `--vllm_server_timeout` seconds, or a role has had no server for `--node_timeout`."""
        limit_s = self._launch.run.args.vllm_server_timeout
        for task in self.tasks:
            if (
                task.role.name == JUDGE
                and task.state == "starting"
                and time.monotonic() - task.started > limit_s
            ):
                why = (
                    f"did not serve within {limit_s:g} s (--vllm_server_timeout): {task.last_line}"
                )
                raise self._failed(task, f"{task.name} on {task.node} {why}")
            if task.state == "starting" and task.url is not None and task.client is not None:
                attempt = task.attempt
                key = self._launch.environ["SWIFT_API_KEY"]

                def answered(answer: Event, task: FleetTask = task, attempt: int = attempt) -> None:
                    if answer.get("ready") and task.attempt == attempt and task.state == "starting":
                        task.state = "ready"
                        task.ever_ready = True
                        task.failures = 0
                        self._launch.changed(task, "serves")

                task.client.ask("ready", answered, url=task.url, key=key)
            elif task.state == "waiting":
                self._place(task)

    def _failed(self, task: FleetTask, why: str) -> ServerFailed:
        return ServerFailed(f"{why} ({self._launch.log(task)})", task.code or 0)

    def _place(self, task: FleetTask) -> None:
        try:
            [task.place] = find_places(task.role, 1, self._fleet.rooms(), self._launch.taken())
        except NoRoom as error:
            if task.name not in self._without:
                self._without[task.name] = time.monotonic()
                self._launch.changed(task, f"waits for a place: {error}")
            waited = time.monotonic() - self._without[task.name]
            if waited > self._launch.args.node_timeout and not self.urls[task.role.name]:
                limit = f"{self._launch.args.node_timeout:g} s (--node_timeout)"
                raise ServerFailed(
                    f"{task.name} has had no place for {limit}: {error}", EXIT_RUN_FAILED
                ) from error
            return
        self._without.pop(task.name, None)
        self.begin(task)

    def ended(self, task: FleetTask) -> None:
        """Brings one back that has ended, or whose node is gone. Raises ServerFailed: it has never been ready, or the
        last one of its role is given up."""
        was = task.ending
        lost = task.code is None
        moves = task.code in (None, EXIT_PORT_TAKEN)
        if not lost and not task.ever_ready and not moves:
            raise self._failed(task, f"{was} before it was ready: {task.last_line}")
        task.failures += not lost
        if task.failures > self._launch.args.max_restarts:
            task.state = "given up"
            task.url = None
            why = f"{was}: given up after {task.failures} ends in a row: {task.last_line}"
            if all(one.state == "given up" for one in self.tasks if one.role is task.role):
                raise self._failed(task, why)
            self._launch.changed(task, why)
            self._moved(task)
            return
        self._launch.changed(task, f"{was}: it comes back")
        if moves:
            task.url = None
            task.port = None
            task.place = None
            task.state = "waiting"
            self._moved(task)
        else:
            self.begin(task)
