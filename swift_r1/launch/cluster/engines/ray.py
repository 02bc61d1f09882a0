"""`--on ray`: a placement group holds what the roles need, and an actor in each of its bundles runs an agent. Ray places
and watches, and passes the agents' lines; completions and weights take their own way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_r1.errors import UsageError
from swift_r1.launch.cluster.engine import AgentPipe, Node, agent_words
from swift_r1.launch.cluster.options import read_options
from swift_r1.launch.cluster.run_file import TRAIN, RunFile
from swift_r1.runtime.processes import last_line, say

DEFAULT_WAIT_S = 600
_SAY_S = 30.0
_CALL_S = 60.0  # for a line to be passed on, and for an actor to start
_END_S = 5.0
_CHUNK = 1 << 16
_OPTIONS: dict[str, type] = {"address": str, "wait": int, "strategy": str}
_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


class AgentActor:
    """Runs an agent in a process of Ray's, with the GPUs of its bundle."""

    def __init__(self, words: Sequence[str]) -> None:
        with tempfile.NamedTemporaryFile(prefix="swift-launch-", delete=False) as said:
            self._said = Path(said.name)
            # Ray sets this to the actor's CPUs for its own tasks.
            environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
            self._process = subprocess.Popen(
                [sys.executable, *words], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said
            )

    def send(self, lines: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(lines)
        self._process.stdin.flush()

    def receive(self) -> bytes:
        """What the agent has said, in pieces that need not be lines; empty once it has ended."""
        assert self._process.stdout is not None
        return os.read(self._process.stdout.fileno(), _CHUNK)

    def close(self) -> str:
        """Ends the agent's input, waits for its end, and returns its last words."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        last = last_line(self._said)
        self._said.unlink(missing_ok=True)
        return last


class RayPipe:
    """An agent behind an actor."""

    def __init__(self, actor: Any) -> None:
        self._actor, self._rest, self._last, self._closed = actor, bytearray(), "", False

    def send(self, line: bytes) -> None:
        import ray

        try:
            ray.get(self._actor.send.remote(line), timeout=_CALL_S)
        except ray.exceptions.RayError as error:
            raise OSError(f"the agent's actor: {_first_line(error)}") from error

    def receive(self) -> bytes:
        import ray

        while (end := self._rest.find(b"\n") + 1) == 0:
            try:
                data = ray.get(self._actor.receive.remote())
            except ray.exceptions.RayError as error:
                self._last = self._last or _first_line(error)
                data = b""
            if not data:
                return b""
            self._rest += data
        line = bytes(self._rest[:end])
        del self._rest[:end]
        return line

    def close(self) -> None:
        import ray

        if self._closed:
            return
        self._closed = True
        try:
            self._last = ray.get(self._actor.close.remote(), timeout=_END_S) or self._last
        except ray.exceptions.RayError as error:
            self._last = self._last or _first_line(error)
        ray.kill(self._actor)

    def last_words(self) -> str:
        return self._last


class RayEngine:
    """Each bundle of the placement group is a node: where it lies now."""

    def __init__(self, group: Any, bundles: Sequence[Mapping[str, int]], silence_s: float) -> None:
        self._group, self._bundles, self._silence_s = group, bundles, silence_s

    def nodes(self) -> Sequence[Node]:
        import ray
        from ray.util import placement_group_table

        alive = {one["NodeID"]: one["NodeManagerAddress"] for one in ray.nodes() if one["Alive"]}
        places = placement_group_table(self._group)["bundles_to_node_id"]
        return [
            Node(
                f"{place[:6]}/{number}",
                alive[place],
                bundle.get("GPU", 0),
                bundle.get("CPU"),
                sys.executable,
                str(Path.cwd()),
            )
            for number, bundle in enumerate(self._bundles)
            if (place := places.get(number)) in alive
        ]

    def connect(self, node: Node) -> AgentPipe:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        number = int(node.name.rpartition("/")[2])
        bundle = self._bundles[number]
        made = ray.remote(AgentActor).options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            max_concurrency=3,  # send, receive and close
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number),
        )
        actor = made.remote(agent_words(self._silence_s))
        return RayPipe(actor)

    def command(self, node: Node) -> Sequence[str]:
        return [sys.executable, *agent_words(self._silence_s)]


def bundles_of(run: RunFile) -> list[dict[str, int]]:
    """What each node that trains and each replica needs, those that need most first."""
    found = []
    for role in run.roles.values():
        cpus = role.cpus or (role.processes if role.name == TRAIN else max(1, role.gpus))
        found += [{"CPU": cpus} | ({"GPU": role.gpus} if role.gpus else {})] * role.count
    return sorted(found, key=lambda one: (-one.get("GPU", 0), -one["CPU"]))


def open_engine(run: RunFile, silence_s: float) -> RayEngine:
    options = read_options(run, "ray", _OPTIONS)
    strategy = options.get("strategy", "PACK")
    if strategy not in _STRATEGIES:
        raise UsageError(f"{run.path}: ray: strategy must be one of {', '.join(_STRATEGIES)}, not {strategy!r}")
    _connect(options.get("address", "auto"))
    bundles = bundles_of(run)
    return RayEngine(_placed(bundles, strategy, options.get("wait", DEFAULT_WAIT_S)), bundles, silence_s)


def _connect(address: str) -> None:
    try:
        import ray
    except ImportError as error:
        raise UsageError("Ray is not installed: pip install 'swift-r1[ray]', the cluster's own version") from error
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UsageError(f"no Ray cluster at {address!r}: {_first_line(error)}") from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)  # Ray has its own for SIGTERM


def _placed(bundles: Sequence[Mapping[str, int]], strategy: str, wait_s: int) -> Any:
    """A placement group of these bundles, once Ray has placed it. Raises UsageError: not in time."""
    import ray

    group = ray.util.placement_group([dict(one) for one in bundles], strategy=strategy, name=f"swift-{os.getpid()}")
    deadline = time.monotonic() + wait_s
    while not group.wait(min(_SAY_S, max(0.1, deadline - time.monotonic()))):
        free, all_ = ray.available_resources(), ray.cluster_resources()
        needed = {name: sum(one.get(name, 0) for one in bundles) for name in ("CPU", "GPU")}
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


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
