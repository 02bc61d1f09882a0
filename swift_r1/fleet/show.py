"""The display of a launch: lines, and on a terminal a table of the roles below the trainer's own output."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from rich import box
from rich.console import ConsoleRenderable
from rich.live import Live
from rich.table import Table
from rich.text import Text

from swift_r1.runtime.terminal import Terminal

if TYPE_CHECKING:
    from swift_r1.fleet.driver import Driver

_STYLES = {
    "waiting": "yellow",
    "starting": "dim",
    "ready": "green",
    "running": "green",
    "given up": "red",
}
_MOST_ROWS = 12


@contextmanager
def _closed_allowed(stream: TextIO) -> Iterator[None]:
    """Silences the stream from then on if nobody can read it any more."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EPIPE):
            raise
        _silence(stream)


def _silence(stream: TextIO) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)


class _Terminal(Terminal):
    def on_broken_pipe(self) -> None:
        """Silences standard error; Rich would end this process."""
        _silence(sys.stderr)


class Display:
    """Lines go to standard error, what the trainer says to standard output; on a terminal both go above the table.

    A terminal that is closed, or a pipe that nobody reads any more, ends what is shown, not the run.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._console = _Terminal(stderr=True)
        self._live = (
            Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        )

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._live is not None:
            with _closed_allowed(sys.stderr):
                self._live.update(Text())
                self._live.stop()

    def say(self, text: str) -> None:
        with _closed_allowed(sys.stderr):
            self._console.print(Text(f"swift launch: {text}"), soft_wrap=True)

    def show(self, text: str) -> None:
        """Shows what the trainer says, whole lines of it."""
        if self._live is not None:
            with _closed_allowed(sys.stderr):
                self._console.print(Text.from_ansi(text.rstrip("\n")), soft_wrap=True)
        else:
            with _closed_allowed(sys.stdout):
                print(text, end="", flush=True)

    def changed(self, driver: Driver) -> None:
        if self._live is not None:
            with _closed_allowed(sys.stderr):
                self._live.update(self._table(driver), refresh=True)

    def _table(self, driver: Driver) -> ConsoleRenderable:
        table = Table(
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            caption=f"logs: {self._logs}",
            caption_justify="left",
        )
        for name in ("role", "node", "state", "restarts", "address"):
            table.add_column(name, overflow="fold")
        tasks = sorted(driver.tasks, key=lambda task: task.state in ("ready", "running"))
        for task in tasks[:_MOST_ROWS]:
            restarts = str(max(task.attempt - 1, 0) or "")
            words = (task.name, task.node, task.state, restarts, task.url or "")
            table.add_row(*map(Text, words), style=_STYLES.get(task.state, ""))
        if len(tasks) > _MOST_ROWS:
            table.add_row(f"and {len(tasks) - _MOST_ROWS} more that run")
        return table
