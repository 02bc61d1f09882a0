"""A `swift rlhf` of the digits task that is followed step by step, disturbed on the way, and looked behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests import forks
from tests.conftest import living

PLUGIN = Path(__file__).parent / "digits_plugin.py"
GROUP = 4
STEPS = int(os.environ.get("SWIFT_R1_STEPS", "500"))
"""Of a soak."""
SOAK_S = 60 + 12 * STEPS
"""What a soak may take."""


def never(_step: int) -> None: ...


def words_of(model: Path, folder: Path, /, **more: Any) -> list[str]:
    """Flags of a run of 16 completions a step that leaves everything in `folder`, with rewards called in the trainer;
    `more` are flags that differ; one that is [] is left out."""
    values = {
        "rlhf_type": "grpo",
        "model": model,
        "external_plugins": PLUGIN,
        "dataset": "counting#200",
        "reward_funcs": "digits",
        "reward_isolation": "inline",
        "num_generations": GROUP,
        "per_device_train_batch_size": 16,
        "max_completion_length": 12,
        "gradient_checkpointing": "false",
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": "none",
        "output_dir": folder,
        "add_version": "false",
    } | more
    return [word for name, value in values.items() if value != [] for word in flag(name, value)]


def flag(name: str, value: Any) -> list[str]:
    """Returns the words of a flag with one value or a list of them."""
    items = value if isinstance(value, list) else [value]
    return [f"--{name}", *(json.dumps(one) if isinstance(one, dict) else str(one) for one in items)]


class LiveRun:
    """A run in a session of its own, with a folder for temporary files of its own where `temporary` names one.

    Args:
        cold: with its imports and the real launcher, where the test is about processes and signals.

    Attributes:
        said: what it has printed to stderr so far.
    """

    def __init__(
        self,
        words: list[str],
        processes: int = 1,
        temporary: Path | None = None,
        cold: bool = False,
    ) -> None:
        environ = {"NPROC_PER_NODE": str(processes), "OMP_NUM_THREADS": "1"}
        if temporary is not None:
            environ["TMPDIR"] = str(temporary)
        words = ["-m", "swift_r1", "rlhf", *words]
        self.process: subprocess.Popen[str] | forks.ForkedProcess
        if cold:
            self.process = subprocess.Popen(
                [sys.executable, *words],
                env=os.environ | environ,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        else:
            self.process = forks.start(
                words, environ=environ, stdout=forks.DEVNULL, stderr=forks.PIPE
            )
        self.said = ""
        self.traces = Traces(self.process.pid)

    def follow(self, at_step: Callable[[int], None] = never, within_s: float = 600) -> int:
        """To its end; calls `at_step` after each step and returns the exit code. One that takes longer is killed."""
        watchdog = threading.Timer(within_s, self.process.kill)
        watchdog.start()
        assert self.process.stderr is not None
        try:
            for line in self.process.stderr:
                self.said += line
                if found := re.match(r"step (\d+)/", line):
                    at_step(int(found[1]))
            return self.process.wait(60)
        finally:
            watchdog.cancel()

    def close(self) -> None:
        """Whatever is left of it."""
        self.traces.look()
        self.process.kill()
        self.process.wait(60)
        for one in living(self.traces.processes):
            one.send_signal(signal.SIGCONT)
            one.kill()


def train_to_the_end(
    words: list[str],
    at_step: Callable[[int], None] = never,
    processes: int = 1,
    within_s: float = 600,
) -> str:
    """A run that ends well, unless `at_step` raises; returns what it said."""
    run = LiveRun(words, processes)
    try:
        code = run.follow(at_step, within_s)
        assert code == 0, (code, run.said[-6000:])
    finally:
        run.close()
        print(run.said)
    return run.said


class Traces:
    """What a process and all below it leave on the machine: processes, ports, files in shared memory.

    `look` is to be called while they live: what was seen is what can be left.

    Attributes:
        untracked: the tracker of shared memory among them was killed. What a process that is killed later has there is
            then nobody's to remove: two faults at once.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.processes: set[psutil.Process] = set()
        self.ports: set[int] = set()
        self.shared: set[str] = set()
        self.untracked = False

    def look(self) -> list[psutil.Process]:
        """The processes that live now."""
        with contextlib.suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.pid)
            self.processes |= {first, *first.children(recursive=True)}
        for one in list(self.processes):
            with contextlib.suppress(psutil.Error):  # it has ended
                self.processes |= set(one.children(recursive=True))
            with contextlib.suppress(psutil.Error, OSError):
                self.ports |= {
                    link.laddr.port
                    for link in one.net_connections("inet")
                    if link.status == "LISTEN"
                }
                maps = Path(f"/proc/{one.pid}/maps").read_text()
                files = [os.readlink(link) for link in Path(f"/proc/{one.pid}/fd").iterdir()]
                self.shared |= set(re.findall(r"/dev/shm/\S+", maps)) | {
                    f for f in files if f.startswith("/dev/shm/")
                }
        return living(self.processes)

    def left(self, within_s: float = 20.0) -> list[str]:
        """What is still there `within_s` seconds after the end, in words."""
        deadline = time.monotonic() + within_s
        while (found := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _left(self) -> list[str]:
        alive = [f"process {one.pid}: {' '.join(_words(one))[:150]}" for one in self.look()]
        shared = set() if self.untracked else self.shared
        files = [f"shared memory {name}" for name in sorted(shared) if os.path.exists(name)]
        return alive + files + [f"port {port}" for port in sorted(self.ports) if _listens(port)]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _listens(port: int) -> bool:
    """Whether a process that the tests have started listens there: others of this machine may have taken it since."""
    links = [
        link
        for link in psutil.net_connections("inet")
        if link.status == "LISTEN" and link.laddr.port == port
    ]
    return any(link.pid is None or _is_ours(link.pid) for link in links)


def _is_ours(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).environ().get("SWIFT_R1_TESTS") == os.environ["SWIFT_R1_TESTS"]
    return False


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def what_was_learned(folder: Path) -> list[list[Any]]:
    """Of each completion, in order, what an undisturbed run has equal."""
    kept = ("step", "prompt_id", "completion", "reward", "advantage")
    return [[row[key] for key in kept] for row in rows_of(folder)]


def check_every_prompt_once(folder: Path, rounds: int, prompts: int = 4) -> None:
    """Ids are run/round/place."""
    places = Counter(tuple(row["request_id"].split("/")[1:]) for row in rows_of(folder))
    assert places == {
        (str(one), str(place)): GROUP for one in range(rounds) for place in range(prompts)
    }
