"""`python -m swift_r1.launch.elastic ARGS_JSON`: several trainer processes through torch's elastic launcher.

It starts one worker per rank, forwards SIGINT and SIGTERM to them, waits while they save, and ends with the exit code
of the rank that failed first, on every node. Nothing is restarted: a run resumes from its checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from swift_r1.errors import (
    EXIT_INTERRUPTED,
    EXIT_LOST_PEER,
    EXIT_PORT_TAKEN,
    EXIT_RANK_KILLED,
    EXIT_RUN_FAILED,
    EXIT_SERVER_UNREACHABLE,
    EXIT_TERMINATED,
    EXIT_USAGE,
    SwiftError,
)
from swift_r1.flags.world import World
from swift_r1.launch.environment import WORKER_MODULE, card_here
from swift_r1.launch.nodes import DEFAULT_MASTER_PORT, MEETING_SECONDS, Nodes, RankEnd
from swift_r1.runtime.processes import handlers_kept, leave, module_words, say, stop_at_once
from swift_r1.runtime.stopping import LAUNCHED

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_LONGEST_END_S = 24 * 3600  # that ranks with a watchdog of their own may take
_NO_SIGNALS = "SIGURG"  # torch's launcher takes at least one; nobody sends this one
_KILLED_BY = "killed by "
_KILLED = f"{_KILLED_BY}SIGKILL (likely out of memory)"
_SAME_MOMENT = 5  # seconds after the first failure in which a rank may die of the same cause


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all workers of this node and returns the exit code of the run."""
    words = sys.argv[1:] if argv is None else argv
    if len(words) != 1:
        print("usage: python -m swift_r1.launch.elastic ARGS_JSON", file=sys.stderr)
        return EXIT_USAGE
    stop_at_once()
    world, faults = World.from_environment(os.environ)
    if faults:
        print("\n".join(faults), file=sys.stderr)
        return EXIT_USAGE
    content = json.loads(Path(words[0]).read_text(encoding="utf-8"))

    def memory_advice() -> str:
        from swift_r1.training.memory import advice_for

        return advice_for(content, world, card_here(os.environ, world.nproc_per_node))

    try:
        command = (sys.executable, *module_words(WORKER_MODULE, words[0]))
        return run_workers(
            world,
            command,
            memory_advice,
            content["args"]["shutdown_timeout"],
            Path(content["run_dir"]) / "summary.json",
        )
    except SwiftError as error:
        say(str(error))
        return error.exit_code


def run_workers(
    world: World,
    command: Sequence[str],
    memory_advice: Callable[[], str] | None = None,
    shutdown_timeout: int = 0,
    summary: Path | None = None,
) -> int:
    """Starts one process of `command` per rank of this node; RANK, LOCAL_RANK, WORLD_SIZE, ... are set for it.

    When a rank fails the others get SIGTERM, and SIGKILL 30 seconds later. After a signal to this process they have
    `shutdown_timeout` seconds, or, where that is 0, as long as they take: each has its watchdog. A second signal kills
    them, except under `swift launch`, since what ends a whole node may signal both it and this process.

    Args:
        memory_advice: what helps against running out of memory; called where a rank was killed.
        summary: the file that rank 0 writes at the end of the run; a rank that a signal kills after that does not fail
            the run.

    Returns:
        0, the exit code of the rank that failed first, on whichever node (5 where it was killed), or 128 + the signal
        that this process got.

    Raises:
        PortTaken, RunFailed: the nodes cannot meet.
    """
    before = _state(summary)

    def finished() -> int | None:
        """Returns the run's exit code, as rank 0 has written it meanwhile."""
        if summary is None or _state(summary) in (None, before):
            return None
        return int(json.loads(summary.read_text(encoding="utf-8"))["exit_code"])

    with Nodes(world) if world.nnodes > 1 else nullcontext() as nodes:
        cause = _run_node(world, command, shutdown_timeout, finished)
        if isinstance(cause, RankEnd):
            return _tell(cause if nodes is None else nodes.settle(cause), world, memory_advice)
        return cause


def _tell(cause: RankEnd, world: World, memory_advice: Callable[[], str] | None) -> int:
    say(cause.line(world.nnodes > 1))
    if _KILLED in cause.text and memory_advice is not None:
        say(memory_advice())
    if cause.text.startswith(_KILLED_BY) and LAUNCHED in os.environ:
        return EXIT_RANK_KILLED
    return cause.code


def _state(file: Path | None) -> tuple[int, int] | None:
    """Returns what changes when a file is written again; None where there is none."""
    if file is None or not file.exists():
        return None
    found = file.stat()
    return found.st_ino, found.st_mtime_ns


def _run_node(
    world: World,
    command: Sequence[str],
    shutdown_timeout: int,
    finished: Callable[[], int | None],
) -> int | RankEnd:
    """Runs this node's workers to their end: an exit code, or why they failed."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from swift_r1.launch import loopback

    loopback.register()
    for name in list(logging.root.manager.loggerDict):
        # The launcher's own warnings repeat what our one line and the worker's message say.
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    single = world.nnodes == 1
    if single:  # else gloo listens on the address of this machine's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    config = LaunchConfig(
        min_nodes=world.nnodes,
        max_nodes=world.nnodes,
        nproc_per_node=world.nproc_per_node,
        run_id=f"swift-r1-{os.getpid() if single else 'nodes'}",
        rdzv_backend=loopback.BACKEND if single else "static",
        rdzv_endpoint="127.0.0.1"
        if single
        else f"{world.master_addr}:{world.master_port or DEFAULT_MASTER_PORT}",
        rdzv_configs={"timeout": MEETING_SECONDS} | ({} if single else {"rank": world.node_rank}),
        local_addr="127.0.0.1" if single else None,
        max_restarts=0,
        monitor_interval=0.2,
        shutdown_timeout=shutdown_timeout or _LONGEST_END_S,
        signals_to_handle=_NO_SIGNALS,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    # The supervisor of engines beside the ranks was started before; it ends once this process has ended.
    spared = _children()
    stopping = False

    def on_signal(number: int, _frame: object) -> None:
        nonlocal stopping
        if stopping and LAUNCHED not in os.environ:
            _kill_children(spared)
        if stopping:
            return
        stopping = True
        received = signal.Signals(number)
        limit = (
            f"at most {shutdown_timeout} s (--shutdown_timeout)"
            if shutdown_timeout
            else "as long as they make progress"
        )
        say(f"{received.name}: waiting for the ranks to end, {limit}; once more ends them at once")
        raise SignalException(received.name, received)

    try:
        with handlers_kept(signal.SIGINT, signal.SIGTERM):
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, on_signal)
            elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        first = world.node_rank * world.nproc_per_node
        failures = {rank - first: failure for rank, failure in error.failures.items()}
        local, code, text = first_cause(failures)
        ended = finished() if all(one.exitcode < 0 for one in failures.values()) else None
        if ended is not None:
            say(f"rank {first + local} was {text} after the run was done, which does not fail it")
            return ended
        lost_peer = code == EXIT_LOST_PEER
        return RankEnd(
            world.node_rank, first + local, EXIT_RUN_FAILED if lost_peer else code, text, lost_peer
        )
    except SignalException as error:
        return 128 + int(error.sigval)
    except RendezvousError as error:
        text = f"the {world.nnodes} nodes did not meet: {error}"
        return RankEnd(world.node_rank, None, EXIT_RUN_FAILED, text)
    return 0


def first_cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, int, str]:
    """Returns rank, exit code for the run (or `EXIT_LOST_PEER`), and words for the failure that caused the others.

    A rank that loses its peer says so by its exit code, but it may be seen first. Death by SIGTERM says least, since
    that is how this launcher ends the others; so does SIGKILL some seconds after the first failure, for the same
    reason. Of the rest the earliest counts, and among those of the same second the one whose code says most:
    unreachable server before "the run failed" before a traceback.
    """
    earliest = min(failure.timestamp for failure in failures.values())
    telling = (
        EXIT_USAGE,
        EXIT_SERVER_UNREACHABLE,
        EXIT_PORT_TAKEN,
        EXIT_INTERRUPTED,
        EXIT_TERMINATED,
    )

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, int, int]:
        _, failure = item
        code = failure.exitcode
        if code == -signal.SIGTERM or (code < 0 and failure.timestamp > earliest + _SAME_MOMENT):
            return 2, failure.timestamp, 0
        if code == EXIT_LOST_PEER:
            return 1, failure.timestamp, 0
        return 0, failure.timestamp, 0 if code < 0 or code in telling else 2 if code == 1 else 1

    rank, failure = min(failures.items(), key=order)
    code = failure.exitcode
    if code == EXIT_LOST_PEER:
        return rank, code, "it lost another rank, or waited --ddp_timeout for one"
    if code >= 0:
        return rank, code, f"exit code {code}"
    ended_by = signal.Signals(-code)
    if ended_by in (signal.SIGINT, signal.SIGTERM):
        return rank, 128 + ended_by, ended_by.name
    return (
        rank,
        EXIT_RUN_FAILED,
        _KILLED if ended_by is signal.SIGKILL else f"{_KILLED_BY}{ended_by.name}",
    )


def _children() -> set[int]:
    """Process numbers of this process's children, from before an `exec` too."""
    return {child.pid for child in psutil.Process().children()}


def _kill_children(spared: set[int]) -> None:
    """Ends this node's workers at once; each leads a process group of its own."""
    for pid in _children() - spared:
        with suppress(ProcessLookupError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    leave(main())
