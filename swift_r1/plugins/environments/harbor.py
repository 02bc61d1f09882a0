"""`harbor:FOLDER`: tasks in Harbor's format, a folder each, played with a shell in a sandbox (docs/harbor.md).

`--env_args`: `eval` (a folder of held-out tasks), `images` (the prepared root of each image that a Dockerfile begins
with), `reply` ("command": the model's whole answer is a command, and no tool is called), `command_seconds` (longest
time of one command, 60), `provider` (of sandboxes, local), `proxy` (HOST:PORT, all that a task with a network reaches).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from swift_r1.data.tool_registry import described
from swift_r1.errors import UsageError, describe, one_line
from swift_r1.plugins.agents import AgentResult
from swift_r1.plugins.environments.base import (
    ENV_ROW,
    PASSED,
    EnvironmentAgent,
    Proof,
    Prover,
    Row,
    Script,
)
from swift_r1.plugins.environments.chat import Chat
from swift_r1.plugins.harbor.folder import HOST, HarborTask, read_task, read_tasks, task_folders
from swift_r1.plugins.harbor.settings import Seconds
from swift_r1.plugins.harbor.trial import TaskFailed, TaskTrial, TestVerdict, ending
from swift_r1.plugins.tools.shell import SHELL, command_of, said
from swift_r1.sandboxes.base import ExecResult, SandboxError, SandboxSpec, proxy_address
from swift_r1.sandboxes.providers import PROVIDERS, open_sandbox

_LOCAL = "local"
_LAST = "exit"
ASKED = (
    "Answer with a command for the shell, and nothing else; its output comes back. "
    f"When the task is done, end with the line {_LAST}."
)
_BLOCK = re.compile(r"```(?:bash|sh|shell)?[ \t]*\n(.*?)```", re.DOTALL)


def _checked_proxy(named: str) -> str:
    proxy_address(named)
    return named


class _Args(BaseModel):
    """`--env_args`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    eval: str | None = None
    images: dict[str, str] = {}
    reply: Literal["command"] | None = None
    command_seconds: Seconds = 60.0
    provider: Literal[PROVIDERS] = _LOCAL  # type: ignore[valid-type]  # a tuple of their names
    proxy: Annotated[str, AfterValidator(_checked_proxy)] | None = None


class HarborAgent(EnvironmentAgent):
    """The model runs commands in the task's sandbox until it answers without one; then the task's tests, which it has
    not seen, give the reward."""

    _tasks: ClassVar[Mapping[str, HarborTask]] = {}

    @classmethod
    def prepare(cls) -> None:
        folders = cls._folders()
        cls._prepare_sandboxes()
        tasks = read_tasks(folders, cls._root_of)
        cls._tasks = {str(task.path): task for task in tasks}

    @classmethod
    def rows(cls, split: str, count: int | None) -> Iterator[Row]:
        suite = cls._args().eval if split == "eval" else cls.name
        if suite is None:
            raise UsageError(
                f"--env harbor:{cls.name} holds no tasks out: name a folder of others, --env_args "
                '\'{"eval": "FOLDER"}\', or give --split_dataset_ratio or --val_dataset'
            )
        for task in read_tasks(task_folders(Path(suite)), cls._root_of):
            text = f"{task.instruction}\n\n{ASKED}" if cls._args().reply else task.instruction
            yield {
                "messages": [{"role": "user", "content": text}],
                ENV_ROW: {"task": str(task.path)},
            }

    @classmethod
    def scripts(cls, own: Row) -> dict[str, Script]:
        return {"some commands": lambda chance: chance.choice(("ls", "pwd", "cat *", _LAST))}

    @classmethod
    def provers(cls) -> list[Prover]:
        folders = cls._folders()
        cls._prepare_sandboxes()
        return [partial(cls._proved, folder) for folder in folders]

    async def play(self, client: Any, row: Row, own: Row) -> AgentResult:
        task = self._task(str(own["task"]))
        args = self._args()
        commands = 0
        failed = 0
        with self._trial(task) as trial:

            def run(command: str) -> str:
                nonlocal commands, failed
                result = trial.command(command, args.command_seconds)
                commands += 1
                failed += result.exit_code != 0
                return said(result, args.command_seconds)[0]

            async def call(name: str, arguments: Mapping[str, Any]) -> str:
                return run(command_of(arguments))

            chat = Chat(client, row["messages"], [] if args.reply else [described(SHELL)])
            while trial.seconds_left > 0:
                message = await chat.turn()
                if message is None or chat.ended is not None:
                    break
                if args.reply:
                    command, is_last = _command(message["content"])
                    output = run(command) if command else ""
                    if is_last:
                        break
                    chat.messages.append({"role": "user", "content": output})
                elif message.get("tool_calls"):
                    await chat.call(message, call)
                else:
                    break
            verdict = trial.verify()
        return {
            "reward": verdict.reward or 0.0,
            **verdict.parts,
            "commands": float(commands),
            "commands_failed": float(failed),
            "tests_without_reward": float(verdict.reward is None),
            **({"unjudged": verdict.why} if verdict.reward is None else {}),
        }

    @classmethod
    def _args(cls) -> _Args:
        try:
            return _Args.model_validate(dict(cls.args))
        except ValidationError as error:
            raise UsageError(f"--env_args of harbor: {one_line(error)}") from error

    @classmethod
    def _prepare_sandboxes(cls) -> None:
        """Opens a sandbox of this machine and closes it again. Raises UsageError where there can be none."""
        if cls._args().provider != _LOCAL:
            return
        try:
            open_sandbox(_LOCAL, SandboxSpec()).close()
        except SandboxError as error:
            raise UsageError(f"--env harbor:{cls.name}: {one_line(error)}") from error

    @classmethod
    def _root_of(cls, image: str) -> str | None:
        """Returns what a sandbox is made of for an image: providers that fetch images know it by its name."""
        args = cls._args()
        unknown = None if args.provider == _LOCAL else image
        return {HOST: HOST, **args.images}.get(image, unknown)

    @classmethod
    def _folders(cls) -> list[Path]:
        suites = filter(None, [cls.name, cls._args().eval])
        return [folder for suite in suites for folder in task_folders(Path(suite))]

    @classmethod
    def _task(cls, path: str) -> HarborTask:
        """Returns a task that `prepare` has read; one of a user's own rows is read now."""
        found = cls._tasks.get(path)
        return found if found is not None else read_task(Path(path), cls._root_of)

    @classmethod
    def _trial(cls, task: HarborTask) -> TaskTrial:
        args = cls._args()
        return TaskTrial(task, args.provider, args.proxy)

    @classmethod
    def _proved(cls, folder: Path) -> Proof:
        """Runs the tests without a solution, and behind the task's own."""
        started = time.perf_counter()
        empty: float | None = None
        oracle: float | None = None
        faults: tuple[str, ...] = ()
        try:
            task = read_task(folder, cls._root_of)
            with cls._trial(task) as trial:
                untouched = trial.verify()
            empty = untouched.reward
            faults += _untouched_faults(folder, untouched)
            if task.solution is not None:
                with cls._trial(task) as trial:
                    ended = trial.solve()
                    solved = trial.verify()
                oracle = solved.reward
                faults += _solved_faults(folder, solved, ended)
        except UsageError as error:
            faults = error.faults
        except TaskFailed as error:
            faults = (str(error),)
        except (OSError, SandboxError) as error:
            faults = (f"{folder}: {describe(error)}",)
        return Proof(folder.name, oracle, empty, time.perf_counter() - started, faults)


def _untouched_faults(folder: Path, verdict: TestVerdict) -> tuple[str, ...]:
    if verdict.reward is None:
        return (f"{folder}: without a solution {verdict.why}",)
    if verdict.reward >= PASSED:
        return (f"{folder}: it passes without a solution, with reward {verdict.reward:g}",)
    return ()


def _solved_faults(folder: Path, verdict: TestVerdict, ended: ExecResult) -> tuple[str, ...]:
    if verdict.reward is None:
        return (f"{folder}: behind its own solution {verdict.why}",)
    if verdict.reward < PASSED:
        return (
            f"{folder}: its own solution gets reward {verdict.reward:g}; solve.sh ended with {ending(ended)}",
        )
    return ()


def _command(reply: str) -> tuple[str, bool]:
    """Returns the command of an answer, its first block of code if it has one, and whether it is the last."""
    block = _BLOCK.search(reply)
    lines = (block[1] if block else reply).strip().splitlines()
    is_last = bool(lines) and lines[-1].strip() == _LAST
    return "\n".join(lines[:-1] if is_last else lines), is_last
