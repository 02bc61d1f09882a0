"""One trial of a task: its sandbox as the recipe makes it, the commands of a model or of the solution, and the tests."""

from __future__ import annotations

import json
import math
import posixpath
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from swift_r1.plugins.harbor.folder import HarborTask
from swift_r1.plugins.harbor.recipe import Ran, files_in
from swift_r1.runtime.files import read_bytes
from swift_r1.sandboxes.base import ExecResult, SandboxError, SandboxLimits, SandboxSpec
from swift_r1.sandboxes.providers import open_sandbox

_REWARDS = "/logs/verifier"
_LONGEST_S = 3600.0  # of a phase without a limit of its own
_HOUSEKEEPING_S = 30.0
_SHOWN = 200  # characters of what is no reward
_MODE = 0o644
_PROGRAM = 0o755


class TaskFailed(Exception):
    """A task that cannot be begun: a command of its Dockerfile fails."""


@dataclass(frozen=True, slots=True)
class TestVerdict:
    """What the tests said.

    Attributes:
        reward: None where they wrote none; `why` says how they ended then.
        parts: what else reward.json has, by name.
        output: theirs.
    """

    reward: float | None
    why: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    output: str = ""


class TaskTrial:
    """A task's sandbox, from its recipe to the verdict. Use as a context manager; entering it raises TaskFailed, making
    it SandboxError.

    Attributes:
        seconds_left: of the model's phase. Only its commands take from them, not the model; 0 where the sandbox is over.
    """

    def __init__(self, task: HarborTask, provider: str, proxy: str | None = None) -> None:
        self.task = task
        settings = task.settings
        asked = settings.environment
        self.seconds_left = settings.agent.timeout_sec or _LONGEST_S
        wanted = {
            "cpus": None if asked.cpus is None else math.ceil(asked.cpus),
            "memory_bytes": asked.memory_bytes,
            "disk_bytes": asked.disk_bytes,
        }
        limits = SandboxLimits(
            seconds=asked.build_timeout_sec
            + self.seconds_left
            + settings.verifier.timeout_sec
            + _HOUSEKEEPING_S,
            **{name: number for name, number in wanted.items() if number is not None},
        )
        spec = SandboxSpec(
            image=task.image,
            limits=limits,
            network=proxy if asked.wants_network else None,
            workdir=task.workdir,
            env={**task.recipe.env, **asked.env},
        )
        self._box = open_sandbox(provider, spec)

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self._box.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._box.close()

    def command(self, command: str, seconds: float = _LONGEST_S) -> ExecResult:
        """Runs a command of the model, for as long as the model's phase has left."""
        started = time.monotonic()
        try:
            result = self._box.exec(command, min(seconds, self.seconds_left))
        except SandboxError as error:
            self.seconds_left = 0.0
            return ExecResult(None, str(error))
        self.seconds_left -= time.monotonic() - started
        return result

    def solve(self) -> ExecResult:
        """Runs the task's own solution, as the model's phase. Raises FileNotFoundError where it has none."""
        folder = self.task.solution
        if folder is None:
            raise FileNotFoundError(f"{self.task.path} has no solution/solve.sh")
        self._put(folder, "/solution")
        variables = _assignments(self.task.settings.solution.env)
        return self.command(f"{variables}/solution/solve.sh")

    def verify(self) -> TestVerdict:
        """Runs the tests, which no model has seen, and reads the reward. What was left in their places is removed
        first. A sandbox that has come to its end has no reward, however it came to it."""
        try:
            return self._judged()
        except SandboxError as error:
            return TestVerdict(None, str(error))

    def _judged(self) -> TestVerdict:
        self._box.exec(
            f"rm -rf /tests {_REWARDS}; mkdir -p /tests {_REWARDS} /logs/agent", _HOUSEKEEPING_S
        )
        self._put(self.task.tests, "/tests")
        verifier = self.task.settings.verifier
        variables = _assignments(verifier.env)
        ended = self._box.exec(f"{variables}/tests/test.sh", verifier.timeout_sec)
        if ended.exit_code is None:
            why = f"the tests did not end within {verifier.timeout_sec:g} s"
            return TestVerdict(None, why, output=ended.output)
        found = self._box.exec(
            f"cat {_REWARDS}/reward.txt 2> /dev/null || cat {_REWARDS}/reward.json", _HOUSEKEEPING_S
        )
        if found.exit_code == 0:
            return replace(_read(found.output), output=ended.output)
        why = f"the tests wrote no {_REWARDS}/reward.txt, and ended with {ending(ended)}"
        return TestVerdict(None, why, output=ended.output)

    def _build(self) -> None:
        deadline = time.monotonic() + self.task.settings.environment.build_timeout_sec
        for step in self.task.recipe.steps:
            if isinstance(step, Ran):
                place = shlex.quote(step.workdir)
                command = f"mkdir -p {place} && cd {place} && {{ {step.command}\n}}"
                ended = self._box.exec(command, max(deadline - time.monotonic(), 0.0))
                if ended.exit_code != 0:
                    where = f"{self.task.environment / 'Dockerfile'}:{step.line}"
                    raise TaskFailed(f"{where}: RUN ended with {ending(ended)}")
            else:
                for file, target in step.files(self.task.environment):
                    self._write(file, target, bool(file.stat().st_mode & 0o100))

    def _put(self, folder: Path, target: str) -> None:
        """Copies a folder into the sandbox; its scripts may be run."""
        for file in files_in(folder):
            inside = posixpath.join(target, file.relative_to(folder).as_posix())
            self._write(file, inside, file.suffix == ".sh" or bool(file.stat().st_mode & 0o100))

    def _write(self, file: Path, target: str, executable: bool) -> None:
        self._box.write_file(target, read_bytes(file), _PROGRAM if executable else _MODE)


def _assignments(variables: Mapping[str, str]) -> str:
    return "".join(f"{name}={shlex.quote(value)} " for name, value in variables.items())


def ending(result: ExecResult) -> str:
    """Says how a command ended, with the last line that it wrote."""
    code = "no exit code in time" if result.exit_code is None else f"code {result.exit_code}"
    lines = result.output.strip().splitlines()
    return f"{code}: {lines[-1]}" if lines else f"{code} and no output"


def _read(text: str) -> TestVerdict:
    """Reads a number, or an object with rewards by name: the one called `reward`, or the only one, is the episode's."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = text.strip()
    rewards = found if isinstance(found, dict) else {"reward": found}
    name = "reward" if "reward" in rewards or len(rewards) != 1 else next(iter(rewards))
    if name not in rewards:
        return TestVerdict(None, f"the tests wrote rewards without `reward`: {', '.join(rewards)}")
    try:
        numbers = {key: float(str(value)) for key, value in rewards.items()}
    except ValueError:
        return TestVerdict(
            None, f"the tests wrote a reward that is no number: {text.strip()[:_SHOWN]!r}"
        )
    if not all(map(math.isfinite, numbers.values())):
        return TestVerdict(
            None, f"the tests wrote a reward that is not finite: {text.strip()[:_SHOWN]!r}"
        )
    return TestVerdict(numbers.pop(name), parts=numbers)
