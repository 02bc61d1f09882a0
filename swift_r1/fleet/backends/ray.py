"""`--on ray`: a placement group holds what the roles need, and an actor in each of its bundles runs an agent. Ray only
places and watches, and passes the agents' lines; completions and weights take their own way."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swift_r1.errors import UsageError
from swift_r1.fleet.backend import AgentPipe, Node, ProcessPipe, agent_words
from swift_r1.fleet.backends.local import LocalClusterBackend
from swift_r1.fleet.run_file import TRAIN, Role, RunFile, hosts_faults, read_options
from swift_r1.runtime.processes import handlers_kept, say

DEFAULT_WAIT_S = 600
_SAY_S = 30.0
_ANSWER_S = 10.0  # for the cluster's port
_CALL_S = 60.0  # for a line to be passed on, and for an actor to start
_END_S = 5.0
_CHUNK = 1 << 16
# of Ray's workers, 15 where it is not set: whatever they start would have it too
_NICENESS = "RAY_worker_niceness"
_OPTIONS: dict[str, type] = {"address": str, "wait": int, "strategy": str, "python": str}
_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


class AgentActor(ProcessPipe):
    """Runs an agent from a process of Ray's, with the GPUs of its bundle, and on these of the node's cores."""

    def __init__(self, words: Sequence[str], cores: range | None) -> None:
        own = sorted(os.sched_getaffinity(0))
        if cores is not None and len(own) >= cores.stop:
            os.sched_setaffinity(0, own[cores.start : cores.stop])
        # Ray sets OMP_NUM_THREADS to the actor's CPUs for its own tasks.
        environ = {
            name: value
            for name, value in os.environ.items()
            if name not in ("OMP_NUM_THREADS", _NICENESS)
        }
        super().__init__([sys.executable, *words], environ)

    def receive(self) -> bytes:
        """Returns what the agent has said, in pieces that need not be lines; empty once it has ended."""
        assert self._process.stdout is not None
        return os.read(self._process.stdout.fileno(), _CHUNK)


class RayPipe:
    """An agent behind an actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._rest = bytearray()
        self._last = ""
        self._closed = False

    def send(self, line: bytes) -> None:
        import ray

        with _as_os_errors():
            ray.get(self._actor.send.remote(line), timeout=_CALL_S)

    def receive(self) -> bytes:
        import ray

        while b"\n" not in self._rest:
            try:
                data = ray.get(self._actor.receive.remote())
            except ray.exceptions.RayError as error:
                self._last = self._last or _first_line(error)
                data = b""
            if not data:
                return b""
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return bytes(line + b"\n")

    def close(self) -> None:
        import ray

        if self._closed:
            return
        self._closed = True
        try:
            ray.get(self._actor.close.remote(), timeout=_END_S)
            self._last = ray.get(self._actor.last_words.remote(), timeout=_END_S)
        except ray.exceptions.RayError as error:
            self._last = self._last or _first_line(error)
        ray.kill(self._actor)

    def last_words(self) -> str:
        return self._last


class RayBackend:
    """Each bundle of the placement group is a node: where it lies now."""

    def __init__(
        self,
        group: Any,
        bundles: Sequence[Role],
        python: str,
        silence_s: float,
    ) -> None:
        self._group = group
        self._bundles = bundles
        self._python = python
        self._silence_s = silence_s

    def nodes(self) -> Sequence[Node]:
        import ray

        with _as_os_errors():
            alive = {
                one["NodeID"]: one["NodeManagerAddress"] for one in ray.nodes() if one["Alive"]
            }
        folder = str(Path.cwd())
        return [
            Node(
                f"{place[:6]}/{number}",
                alive[place],
                one.gpus,
                None,
                self._python,
                folder,
                (one.name,),
            )
            for number, (one, place) in enumerate(zip(self._bundles, self._places(), strict=True))
            if place in alive
        ]

    def _places(self) -> list[str]:
        """Returns the Ray node of each bundle; empty where it has none now."""
        from ray.util import placement_group_table

        with _as_os_errors():
            found = placement_group_table(self._group)["bundles_to_node_id"]
        return [found.get(number, "") for number in range(len(self._bundles))]

    def connect(self, node: Node) -> AgentPipe:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        number = int(node.name.rpartition("/")[2])
        bundle = self._bundles[number]
        cores = None
        if bundle.cpus:  # Ray counts cores, and binds nothing to them
            places = self._places()
            before = [
                _cores(one)
                for one, place in zip(self._bundles[:number], places, strict=False)
                if place == places[number]
            ]
            cores = range(sum(before), sum(before) + bundle.cpus)
        made = ray.remote(AgentActor).options(
            num_cpus=_cores(bundle),
            num_gpus=bundle.gpus,
            max_concurrency=3,  # send, receive and close
            runtime_env={"env_vars": {_NICENESS: "0"}},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=number
            ),
        )
        return RayPipe(made.remote(agent_words(self._silence_s), cores))

    def command(self, node: Node) -> Sequence[str]:
        return [sys.executable, *agent_words(self._silence_s)]


def bundles_of(run: RunFile) -> list[Role]:
    """Returns the needs of each node that trains, and of each replica."""
    return [role for role in run.roles.values() for _ in range(role.count)]


def _cores(role: Role) -> int:
    """Returns a core for each process where the file does not say how many: Ray places nothing that needs none."""
    return role.cpus or (role.processes if role.name == TRAIN else max(1, role.gpus))


def open_backend(run: RunFile, silence_s: float) -> RayBackend:
    options = _options(run)
    _connect(options.get("address", "auto"))
    bundles = bundles_of(run)
    group = _placed(
        bundles, options.get("strategy", _STRATEGIES[0]), options.get("wait", DEFAULT_WAIT_S)
    )
    return RayBackend(group, bundles, options.get("python", sys.executable), silence_s)


def planned(run: RunFile, silence_s: float) -> LocalClusterBackend:
    """Returns the bundles, on whichever nodes Ray will place them."""
    python = _options(run).get("python", sys.executable)
    folder = str(Path.cwd())
    nodes = [
        Node(f"bundle-{number}", None, one.gpus, _cores(one), python, folder, (one.name,))
        for number, one in enumerate(bundles_of(run))
    ]
    return LocalClusterBackend(nodes, silence_s)


def _options(run: RunFile) -> dict[str, Any]:
    options = read_options(run, "ray", _OPTIONS)
    faults = hosts_faults(run, "Ray chooses the nodes: leave it out")
    if faults:
        raise UsageError(*faults)
    strategy = options.get("strategy", _STRATEGIES[0])
    if strategy not in _STRATEGIES:
        raise UsageError(
            f"{run.path}: ray: strategy must be one of {', '.join(_STRATEGIES)}, not {strategy!r}"
        )
    return options


def _connect(address: str) -> None:
    try:
        import ray
    except ImportError as error:
        raise UsageError(
            "Ray is not installed: pip install 'swift-r1[ray]', the cluster's own version"
        ) from error
    given = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    if ":" in given and "://" not in given:
        host, _, port = given.rpartition(":")
        try:  # Ray itself tries for minutes
            socket.create_connection((host, int(port)), _ANSWER_S).close()
        except (OSError, ValueError) as error:
            raise UsageError(f"no Ray cluster at {given}: {error}") from error
    try:
        with handlers_kept(signal.SIGINT, signal.SIGTERM):  # Ray has its own for SIGTERM
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UsageError(f"no Ray cluster at {address!r}: {_first_line(error)}") from error
    # No option keeps Ray from printing the last lines of a daemon's log, its state, when that dies.
    vars(ray._private.worker)["print_to_stdstream"] = lambda *_, **__: None


def _placed(bundles: Sequence[Role], strategy: str, wait_s: int) -> Any:
    """Returns a placement group of these bundles, once Ray has placed it. Raises UsageError: not in time."""
    import ray

    wanted = [{"CPU": _cores(one)} | ({"GPU": one.gpus} if one.gpus else {}) for one in bundles]
    group = ray.util.placement_group(wanted, strategy=strategy, name=f"swift-{os.getpid()}")
    deadline = time.monotonic() + wait_s
    while not group.wait(min(_SAY_S, max(0.1, deadline - time.monotonic()))):
        free = ray.available_resources()
        all_ = ray.cluster_resources()
        needed = {name: sum(one.get(name, 0) for one in wanted) for name in ("CPU", "GPU")}
        state = ", ".join(
            f"{needed[name]:g} {name}s needed, {free.get(name, 0):g} of {all_.get(name, 0):g} free"
            for name in needed
            if needed[name]
        )
        if time.monotonic() > deadline:
            ray.util.remove_placement_group(group)
            raise UsageError(f"Ray has not placed the roles within {wait_s} s (ray: wait): {state}")
        say(f"waiting for Ray to place the roles: {state}", "launch")
    return group


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raises what Ray raises as a backend does."""
    import ray

    try:
        yield
    except ray.exceptions.RayError as error:
        raise OSError(f"Ray: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )[:300]
