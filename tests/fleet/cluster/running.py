"""`swift launch` on a cluster of the tests: its file, its process, and what its runs have left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.conftest import REPO, until
from tests.e2e.live_run import steps_of, what_was_learned
from tests.fleet.conftest import RLHF as RUN

TINY = f"""#!/bin/sh
# In Python's place: `swift rollout` with the engine of tests/tiny_server.py.
if [ "$3" = rollout ]; then shift 3; exec {sys.executable} -m tests.fleet.tiny_rollout "$@"; fi
exec {sys.executable} "$@"
"""
PLAIN = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
STUB = f'#!/bin/sh\nexec {sys.executable} {REPO}/tests/fleet/stub.py "$@"\n'
RLHF = RUN | {
    "external_plugins": [
        RUN["external_plugins"],
        str(REPO / "tests" / "fleet" / "cluster" / "slow_plugin.py"),
    ],
    "reward_funcs": "slow_digits",
    "learning_rate": 0.01,
    "torch_dtype": "float32",
    "add_version": False,
}


class Launch:
    """One, in a folder of its own.

    Args:
        enter: words before those of the command, to be on a host.
        environ: variables beside this process's own.
    """

    def __init__(
        self, folder: Path, engine: str, enter: Sequence[str] = (), **environ: str
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.engine, self.enter, self.log = (
            folder,
            engine,
            list(enter),
            folder / "launch.log",
        )
        self.environ = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"} | environ
        self.process: subprocess.Popen[bytes] | None = None
        self.words: list[str] = []

    def write(
        self,
        roles: Mapping[str, Any],
        model: Path | str = "m",
        python: str = TINY,
        **sections: Mapping[str, Any],
    ) -> None:
        """The file; `python` is what runs in the interpreter's place on the nodes."""
        interpreter = self.folder / "python"
        interpreter.write_text(python)
        interpreter.chmod(0o755)
        own = {"python": str(interpreter)} | dict(sections.pop(self.engine, {}))
        # the same sums everywhere, to the last bit
        sections = {"environ": {"OMP_NUM_THREADS": "1"}} | sections
        content = {
            "rlhf": RLHF | {"model": str(model)} | dict(sections.pop("rlhf", {})),
            "roles": dict(roles),
        }
        (self.folder / "run.yaml").write_text(
            yaml.safe_dump(content | sections | {self.engine: own})
        )

    def command(self, *words: str) -> list[str]:
        return [
            *self.enter,
            sys.executable,
            "-m",
            "swift_r1",
            "launch",
            "run.yaml",
            "--on",
            self.engine,
            *words,
        ]

    def once(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A launch that is expected to end at once."""
        return subprocess.run(
            self.command(*words),
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def start(self, *words: str) -> Launch:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.command(*words),
                cwd=self.folder,
                env=self.environ,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def says(self, text: str, within_s: float = 120.0) -> None:
        """Waits for it."""

        def found() -> bool:
            assert self.process is not None
            if text in self.said:
                return True
            assert self.process.poll() is None, self.said
            return False

        until(found, within_s)

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, within_s: float = 240.0) -> int:
        assert self.process is not None
        return self.process.wait(within_s)

    def stop(self) -> None:
        if self.process is None:
            return
        for _ in range(2):
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(30)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        print(self.said)
        for log in sorted(self.folder.glob("out/launch/*.log")):
            print(f"== {log.name}\n{log.read_text(errors='replace')[-2000:]}")

    @property
    def steps(self) -> list[int]:
        """The steps that the run has logged, in their order."""
        path = self.folder / "out" / "logging.jsonl"
        return [one["step"] for one in steps_of(path.parent)] if path.exists() else []

    @property
    def learned(self) -> list[list[Any]]:
        return what_was_learned(self.folder / "out")


def processes_in(folder: Path) -> list[psutil.Process]:
    """All processes of this machine, in whichever namespace, whose current folder is this one or below it."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if one.status() != psutil.STATUS_ZOMBIE and Path(
                os.readlink(f"/proc/{one.pid}/cwd")
            ).is_relative_to(folder):
                found.append(one)
    return found
