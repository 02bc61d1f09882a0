"""`python -m swift_r1.cli.elastic ARGS_JSON`: several trainer processes through torch's elastic launcher.

It starts one worker a rank, forwards SIGINT and SIGTERM to them, gives them time to save, and ends with the exit
code of the rank that failed first. Nothing is restarted: a run resumes from its checkpoint.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swift_r1.arguments.world import World
from swift_r1.cli.launch import WORKER_MODULE
from swift_r1.errors import (
    EXIT_INTERRUPTED,
    EXIT_PORT_TAKEN,
    EXIT_RUN_FAILED,
    EXIT_SERVER_UNREACHABLE,
    EXIT_TERMINATED,
    EXIT_USAGE,
)

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.api import ProcessFailure

SAVE_SECONDS = 300  # what a worker may take to save after SIGTERM before it is killed
MEETING_SECONDS = 900  # what the nodes may take to find each other
_DEFAULT_MASTER_PORT = 29500


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all workers of this node and returns the exit code of the run."""
    words = sys.argv[1:] if argv is None else argv
    if len(words) != 1:
        print("usage: python -m swift_r1.cli.elastic ARGS_JSON", file=sys.stderr)
        return EXIT_USAGE
    world, faults = World.from_environment(os.environ)
    if faults:
        print("\n".join(faults), file=sys.stderr)
        return EXIT_USAGE
    return run_workers(world, (sys.executable, "-m", WORKER_MODULE, words[0]))


def run_workers(world: World, command: Sequence[str]) -> int:
    """One process of `command` a rank of this node; RANK, LOCAL_RANK, WORLD_SIZE, ... are set for it.

    Returns:
        0, the exit code of the rank that failed first (5 where it was killed), or 128 + the signal that this
        process got.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _quiet_torch()
    single = world.nnodes == 1
    with tempfile.TemporaryDirectory(prefix="swift-r1-") as folder:
        config = LaunchConfig(
            min_nodes=world.nnodes,
            max_nodes=world.nnodes,
            nproc_per_node=world.nproc_per_node,
            run_id=f"swift-r1-{os.getpid() if single else 'nodes'}",
            rdzv_backend="c10d" if single else "static",
            # Port 0: the system picks a free one.
            rdzv_endpoint="127.0.0.1:0"
            if single
            else f"{world.master_addr}:{world.master_port or _DEFAULT_MASTER_PORT}",
            rdzv_configs={"timeout": MEETING_SECONDS} | ({} if single else {"rank": world.node_rank}),
            local_addr="127.0.0.1" if single else None,
            max_restarts=0,
            monitor_interval=0.2,
            shutdown_timeout=SAVE_SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            rank, code, cause = first_cause(error.failures)
            print(f"swift rlhf: rank {rank} was the first to end: {cause}", file=sys.stderr)
            return code
        except SignalException as error:
            return 128 + int(error.sigval)
        except RendezvousError as error:
            print(f"swift rlhf: the {world.nnodes} nodes did not meet: {error}", file=sys.stderr)
            return EXIT_RUN_FAILED
        finally:
            _kill_leftovers()
    return 0


def first_cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, int, str]:
    """Rank, exit code for the run, and words for the failure that caused the others.

    A rank that loses its peer fails a moment after it, often within the same second; so among the earliest the
    one whose exit code says most is taken: unreachable server before "the run failed" before a traceback. Death by
    SIGTERM says least: that is how this launcher ends the others, maybe while they are leaving by themselves.
    """

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, int]:
        _, failure = item
        if failure.exitcode == -signal.SIGTERM:
            return failure.timestamp, 3
        telling = (EXIT_USAGE, EXIT_SERVER_UNREACHABLE, EXIT_PORT_TAKEN, EXIT_INTERRUPTED, EXIT_TERMINATED)
        rarity = 0 if failure.exitcode < 0 or failure.exitcode in telling else 1
        return failure.timestamp, rarity if failure.exitcode != 1 else 2

    rank, failure = min(failures.items(), key=order)
    code = failure.exitcode
    if code >= 0:
        return rank, code, f"exit code {code}"
    ended_by = signal.Signals(-code)
    if ended_by in (signal.SIGINT, signal.SIGTERM):
        return rank, 128 + ended_by, ended_by.name
    hint = " (out of memory?)" if ended_by is signal.SIGKILL else ""
    return rank, EXIT_RUN_FAILED, f"killed by {ended_by.name}{hint}"


def _quiet_torch() -> None:
    """The launcher's own warnings repeat what our one line and the worker's message say."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _kill_leftovers() -> None:
    """Ends workers that a second signal left behind (each leads a process group of its own)."""
    me = os.getpid()
    children = Path(f"/proc/{me}/task/{me}/children")
    for child in children.read_text().split() if children.exists() else ():
        pid = int(child)
        try:
            if os.getpgid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    sys.exit(main())
