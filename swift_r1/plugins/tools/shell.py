"""The tool `shell`: a command in a sandbox of the conversation's own, which is opened with its first call."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from swift_r1.data.tool_registry import SandboxTool, sandbox_tools, tools
from swift_r1.errors import UsageError, one_line
from swift_r1.plugins.tools.calling import Outcome, ToolAnswer, within
from swift_r1.plugins.tools.pool import ToolLimits
from swift_r1.sandboxes.base import (
    ExecResult,
    SandboxError,
    SandboxOver,
    SandboxSpec,
    StatefulSandbox,
)
from swift_r1.sandboxes.providers import open_sandbox

SHELL = "shell"
_AT_ONCE = 256  # calls; each waits in a thread
_COMMAND = {"type": "string", "description": "what bash runs, in the same folder each time"}
_ABOUT = "Runs a shell command on a Linux machine of your own. Its files and background processes stay until the end."


def _shell() -> SandboxTool:
    parameters = {"type": "object", "properties": {"command": _COMMAND}, "required": ["command"]}
    function = {"name": SHELL, "description": _ABOUT, "parameters": parameters}
    return SandboxTool({"type": "function", "function": function})


tools[SHELL] = _shell()


class ShellTools:
    """The sandboxes of a run; a context manager, which ends those that are still open.

    Args:
        limits: of a call.
    """

    def __init__(self, provider: str, spec: SandboxSpec, limits: ToolLimits) -> None:
        self.provider = provider
        self.spec = spec
        self.limits = limits
        self.threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="shell")
        self.open: set[StatefulSandbox] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for box in list(self.open):
            box.close()
        self.threads.shutdown()

    def check(self) -> None:
        """Opens a sandbox and closes it again. Raises UsageError: there can be none, and why."""
        try:
            open_sandbox(self.provider, self.spec).close()
        except (SandboxError, ValueError) as error:
            raise UsageError(f"--tools {SHELL}: {one_line(error)}") from error

    def episode(self) -> ShellEpisode:
        """Returns what calls the tool for one conversation; it must be closed."""
        return ShellEpisode(self)


class ShellEpisode:
    """The sandbox of one conversation."""

    def __init__(self, owner: ShellTools) -> None:
        self._owner = owner
        self._alone = threading.Lock()
        self._box: StatefulSandbox | None = None
        self._closed = False

    def names(self) -> Collection[str]:
        """Returns the tools that are called here: none where a plugin has registered another one by that name."""
        return sandbox_tools()

    async def call(self, name: str, arguments: str) -> ToolAnswer:
        """Returns what a command prints, and its exit code where that is not 0. From any event loop."""
        return await asyncio.wrap_future(self._owner.threads.submit(self._answer, arguments))

    def close(self) -> None:
        """Ends the sandbox, without waiting for it. From any thread."""
        self._closed = True
        if self._box is not None:
            self._owner.threads.submit(self._close, self._box)

    def _close(self, box: StatefulSandbox) -> None:
        box.close()
        self._owner.open.discard(box)

    def _answer(self, arguments: str) -> ToolAnswer:
        started = time.perf_counter()
        limits = self._owner.limits
        cause = None
        outcome: Outcome = "error"
        try:
            result = self._run(_command(arguments), limits.seconds)
            text, outcome = said(result, limits.seconds)
        except (ValueError, SandboxOver) as error:  # the model's own doing
            text = f"Error: {error}"
        except SandboxError as error:
            text, cause = f"Error: {one_line(error)}", f"{SHELL}: {error}"
        content, cut = within(text, limits.characters)
        seconds = time.perf_counter() - started
        return ToolAnswer(content, outcome, seconds, cut, cause)

    def _run(self, command: str, seconds: float) -> ExecResult:
        with self._alone:
            if self._box is None:
                self._box = open_sandbox(self._owner.provider, self._owner.spec)
                self._owner.open.add(self._box)
                if self._closed:  # meanwhile
                    self._close(self._box)
            box = self._box
        return box.exec(command, seconds)


def _command(arguments: str) -> str:
    """Raises ValueError: they are not those of the tool."""
    try:
        return command_of(json.loads(arguments.strip() or "{}"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the arguments are not JSON: {error}") from None


def command_of(given: object) -> str:
    """Returns the command of a call's arguments. Raises ValueError: they are not those of the tool."""
    command = given.get("command") if isinstance(given, dict) else None
    if not isinstance(command, str) or not isinstance(given, dict) or len(given) != 1:
        raise ValueError("the arguments are not a JSON object with the text `command` alone")
    return command


def said(result: ExecResult, seconds: float) -> tuple[str, Outcome]:
    """Returns what the model reads, and the outcome."""
    if result.exit_code is None:
        return f"{result.output}\nError: not done within {seconds:g} s, and killed", "timeout"
    if result.exit_code:
        return f"{result.output}\n[exit code {result.exit_code}]", "answer"
    return result.output, "answer"
