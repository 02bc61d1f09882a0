"""`python -m swift_r1.launch.supervisor`: the engines of a run with `--vllm_mode colocate`, which end with it. Linux.

It reads one JSON object from its standard input: `{"run": process id, "engines": [...]}`, the latter with the fields
`words`, `environ`, `log` and `url`. It starts each engine, restarts one that ends by itself, and ends them all with
whatever they have started as soon as the run's process, its parent, has ended, even by SIGKILL. If the supervisor
itself is killed, the kernel sends each engine SIGTERM.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from swift_r1.runtime.processes import adopt_orphans
from swift_r1.runtime.visible import log_visibly
from swift_r1.workers.killing import end_children
from swift_r1.workers.process import SupervisedProcess

logger = logging.getLogger("swift_r1.launch.supervisor")

MOST_RESTARTS = 5  # of one engine in a row, each before it was ready
_LOOK_S = 0.3
_READY_S = 2.0  # for a server to answer
_END_S = 10.0  # for engines to end by SIGTERM


@dataclass(eq=False, slots=True)
class EngineProcess:
    """One engine server: its command, and the state of its process.

    Attributes:
        log: file that its output is appended to.
        url: of the server; `/ready` there says whether it serves.
        ready: whether it has served since its last start.
    """

    words: Sequence[str]
    environ: Mapping[str, str]
    log: str
    url: str
    process: SupervisedProcess | None = None
    ready: bool = False
    restarts: int = 0
    ever_ready: bool = False

    def start(self) -> None:
        self.process = SupervisedProcess(
            self.words, self.environ, Path(self.log), ends_with_parent=True
        )
        self.ready = False

    def look(self) -> None:
        """Asks whether it serves."""
        if not self.ready and is_ready(self.url, self.environ.get("SWIFT_API_KEY", "")):
            self.ready = True
            self.ever_ready = True
            self.restarts = 0


def is_ready(url: str, key: str) -> bool:
    """Asks a server whether it serves."""
    place = urlsplit(url)
    connection = HTTPConnection(str(place.hostname), place.port, timeout=_READY_S)
    with contextlib.closing(connection), contextlib.suppress(OSError, HTTPException):
        connection.request("GET", "/ready", headers={"Authorization": f"Bearer {key}"})
        return connection.getresponse().status == 200
    return False


def main() -> int:
    log_visibly(logging.INFO, "swift rlhf: %(message)s")
    order = json.load(sys.stdin)
    adopt_orphans()  # to find what a killed engine leaves behind
    engines = [EngineProcess(**one) for one in order["engines"]]
    for one in (signal.SIGINT, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(0))
    try:
        fault = watch(order["run"], engines)
        if fault:
            logger.error("%s", fault)
        return 1 if fault else 0
    finally:
        end(engines)


def watch(run: int, engines: Sequence[EngineProcess]) -> str | None:
    """Starts the engines and watches them until the run, this process's parent, has ended; restarts one that ends.
    Returns why one does not start, or ends again and again."""
    while os.getppid() == run:
        for engine in engines:
            process = engine.process
            code = None if process is None else process.poll()
            if process is not None and code is not None:
                end_children(_running(engines))
                engine.restarts += 1
                if not engine.ever_ready or engine.restarts > MOST_RESTARTS:
                    cause = f"{process.last_line()} ({engine.log})"
                    return f"the engine beside the trainer ended with {code}: {cause}"
                logger.warning(
                    "the engine beside the trainer ended with %d (its log: %s): restarted",
                    code,
                    engine.log,
                )
            if process is None or code is not None:
                engine.start()
            engine.look()
        time.sleep(_LOOK_S)
    return None


def end(engines: Sequence[EngineProcess]) -> None:
    """Ends all engines, and whatever they have started."""
    alive = [engine.process for engine in engines if engine.process is not None]
    for process in alive:
        process.ask_to_end(_END_S)
    for process in alive:
        process.finish(process.deadline - time.monotonic())
    end_children()


def _running(engines: Sequence[EngineProcess]) -> set[int]:
    return {
        engine.process.pid
        for engine in engines
        if engine.process is not None and engine.process.poll() is None
    }


if __name__ == "__main__":
    sys.exit(main())
