"""`swift launch` as a user runs it, with programs in the place of its servers and trainers, or with real ones."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests import forks
from tests.conftest import REPO, living, until, wait_until_gone

STUB = REPO / "tests" / "fleet" / "stub.py"
RLHF = {
    "rlhf_type": "grpo",
    "external_plugins": str(REPO / "tests" / "e2e" / "digits_plugin.py"),
    "dataset": "counting#200",
    "reward_funcs": "digits",
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 12,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "report_to": "none",
    "output_dir": "out",
}


class Launch:
    """A running `swift launch` in a folder; forked, where it is not entered otherwise or has `streams` of its own."""

    def __init__(
        self, folder: Path, words: list[str], enter: Sequence[str] = (), **streams: Any
    ) -> None:
        self.folder, self.log = folder, folder / "launch.log"
        words = ["-m", "swift_r1", "launch", "run.yaml", *words]
        self.process: subprocess.Popen[bytes] | forks.ForkedProcess
        with self.log.open("ab") as out:
            if not enter and not streams:
                self.process = forks.start(words, cwd=folder, stdout=out, stderr=forks.STDOUT)
            else:
                own = {"stdout": out, "stderr": subprocess.STDOUT, "start_new_session": True}
                self.process = subprocess.Popen(
                    [*enter, sys.executable, *words],
                    cwd=folder,
                    env=os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
                    **(own | streams),
                )
        self.seen: dict[int, psutil.Process] = {}

    @property
    def said(self) -> str:
        return self.log.read_text()

    def below(self) -> list[psutil.Process]:
        """All that it has started and that lives; those that are seen once are remembered."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.seen |= {
                one.pid: one for one in psutil.Process(self.process.pid).children(recursive=True)
            }
        return living(self.seen.values())

    def agents(self) -> list[psutil.Process]:
        """The first processes of the agents."""
        own = psutil.Process(self.process.pid).children()
        return [one for one in own if "swift_r1.fleet.agent" in one.cmdline()]

    def agent(self, started: Mapping[str, Any]) -> psutil.Process:
        """The first process of the agent that started a stub."""
        return next(one for one in psutil.Process(started["pid"]).parents() if one in self.agents())

    def started(
        self,
        command: str,
        count: int = 1,
        after: Sequence[Mapping[str, Any]] = (),
        within_s: float = 60.0,
    ) -> list[dict[str, Any]]:
        """What the stubs of a command that live have left, once there are `count` without those of before."""
        old = {one["pid"] for one in after}

        def found() -> list[dict[str, Any]]:
            assert self.process.poll() is None, self.said
            known = [
                json.loads(path.read_text())
                for path in sorted(self.folder.glob(f"{command}-*.json"))
            ]
            own = [one for one in known if one["pid"] not in old and psutil.pid_exists(one["pid"])]
            return own if len(own) == count else []

        self.below()
        return list(until(found, within_s))

    def end(self, code: int, node: int = 0) -> None:
        """Tells the trainers of a node what to end with."""
        part = self.folder / f".end-{node}"
        part.write_text(str(code))
        part.rename(self.folder / f"end-{node}")

    def wait(self, within_s: float = 60.0) -> int:
        """Its exit code; nothing that it has started is left then."""
        self.below()
        code = self.process.wait(within_s)
        wait_until_gone(self.seen.values(), 1.0)
        return code

    def stop(self) -> None:
        self.below()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
        print(self.said)
        wait_until_gone(self.seen.values(), 30.0)


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """`write_run(roles, model=..., rlhf={}, **sections)` (model None: none) writes run.yaml into the test's folder."""

    def write(roles: Mapping[str, Any], model: str | Path | None = "m", **sections: Any) -> Path:
        content = {
            "rlhf": RLHF
            | ({} if model is None else {"model": str(model)})
            | sections.pop("rlhf", {}),
            "roles": dict(roles),
        } | sections
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    return write


@pytest.fixture
def interpreter(tmp_path: Path) -> Callable[[str], str]:
    """`interpreter(line)` is a program that a shell runs in Python's place, with `line` as its script."""

    def make(line: str) -> str:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
def launch(
    tmp_path: Path, write_run: Callable[..., Path], interpreter: Callable[[str], str]
) -> Iterator[Callable[..., Launch]]:
    """`launch(roles, *words, local={}, streams={}, **sections) -> Launch` with the stubs."""
    running: list[Launch] = []
    python = interpreter(f'exec {sys.executable} {STUB} "$@"')

    def start(
        roles: Mapping[str, Any],
        *words: str,
        local: Mapping[str, Any] | None = None,
        streams: Mapping[str, Any] | None = None,
        **sections: Any,
    ) -> Launch:
        write_run(roles, local={"python": python} | dict(local or {}), **sections)
        running.append(Launch(tmp_path, list(words), **(streams or {})))
        return running[-1]

    yield start
    for one in running:
        one.stop()
