"""The trainer's handle of the processes that episodes run in (`parent.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swift_r1.errors import RunFailed, UsageError
from swift_r1.rollout.agents.parent import Order, mark_of
from swift_r1.runtime.processes import module_words
from swift_r1.workers.killing import end_marked
from swift_r1.workers.pool import START_SECONDS
from swift_r1.workers.process import SupervisedProcess

_LONGEST_LINE = 64 << 20
_END_SECONDS = 15.0  # for the parent to end all episodes and itself


@dataclass(frozen=True, slots=True)
class EpisodeExit:
    """How an episode's process ended.

    Attributes:
        code: its exit code, negative for a signal; None where it was lost with its parent.
        result: what a class returned, as JSON.
        raised: what a class raised, in one line.
        stdout, stderr: the end of what it wrote.
        given_up: keys of the calls whose answers its `client` has not read.
    """

    code: int | None
    result: str | None = None
    raised: str | None = None
    stdout: str = ""
    stderr: str = ""
    given_up: Sequence[str] = ()


def client_environment(url: str, key: str, model: str) -> dict[str, str]:
    """Returns the variables by which clients of OpenAI and Anthropic find the model; `url` ends in `/v1`."""
    return {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": model,
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": model,
        # Claude Code's own, which else sends fields that change tokens and are refused: with these it does not
        "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
        "CLAUDE_CODE_EFFORT_LEVEL": "unset",
    }


class AgentProcesses:
    """Starts and kills episodes. All methods are for one event loop."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._parent: SupervisedProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[EpisodeExit]] = {}
        self._numbers = 0
        self._starting = asyncio.Lock()

    @property
    def pid(self) -> int:
        """Returns the process id of the parent."""
        assert self._parent is not None
        return self._parent.pid

    async def start(self) -> None:
        """Raises UsageError where plugins cannot be loaded there, RunFailed where it does not come up."""
        ours, theirs = socket.socketpair()
        with theirs:
            words = module_words("swift_r1.rollout.agents.parent", str(theirs.fileno()))
            # It makes a group of its own, as all that is confined.
            self._parent = SupervisedProcess(
                [sys.executable, *words], start_new_session=False, pass_fds=[theirs.fileno()]
            )
        reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=_LONGEST_LINE)
        self._send(asdict(self._order))
        try:
            async with asyncio.timeout(START_SECONDS):
                line = await reader.readline()
        except TimeoutError as error:
            raise RunFailed(
                f"no agent could be run within {START_SECONDS:g} s: does a plugin hang?"
            ) from error
        if not line:
            raise RunFailed(
                "the process that agents are forked from died while it loaded the plugins"
            )
        fault = json.loads(line).get("fault")
        if fault is not None:
            raise UsageError(fault)
        self._listening = asyncio.create_task(self._listen(reader))

    async def begin(
        self, environ: Mapping[str, str], row: Mapping[str, Any]
    ) -> tuple[int, asyncio.Future[EpisodeExit]]:
        """Begins an episode: its number, and how it ends. Starts the parent again where it was killed."""
        async with self._starting:
            if self._listening is None or self._listening.done():
                await self._end()
                await self.start()
        self._numbers += 1
        ended = self._waiting[self._numbers] = asyncio.get_running_loop().create_future()
        self._send({"begin": self._numbers, "environ": environ, "row": row})
        return self._numbers, ended

    def kill(self, number: int) -> None:
        """Kills an episode, which ends soon, with all that it has started."""
        if number in self._waiting:
            self._send({"end": number})

    async def _end(self) -> None:
        """Ends the parent, which kills what runs."""
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()
            self._writer = None
        if self._parent is not None:
            await asyncio.to_thread(self._parent.finish, _END_SECONDS)
            self._parent = None

    async def close(self) -> None:
        """Kills what runs."""
        if self._listening is not None:
            self._listening.cancel()
        await self._end()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._writer is not None
        self._writer.write(json.dumps(message, default=str).encode() + b"\n")

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            async for line in reader:
                about = json.loads(line)
                ended = self._waiting.pop(about.pop("ended"))
                if not ended.done():
                    ended.set_result(EpisodeExit(**about))
        # The parent was killed, and its children with it, but not what is below them.
        await asyncio.to_thread(end_marked, mark_of(self.pid))
        for ended in self._waiting.values():
            if not ended.done():
                ended.set_result(EpisodeExit(None))
        self._waiting.clear()
