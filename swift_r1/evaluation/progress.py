"""What a person sees while `swift eval` works: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from swift_r1.evaluation.store import say

_LINE_EVERY_S = 60.0


class EvalProgress:
    """Counts completions, `done` of `total` at the start. Use as a context manager."""

    def __init__(self, total: int, done: int) -> None:
        console = Console(stderr=True)
        self._total, self._done, self._said = total, done, time.monotonic()
        self._bar = Progress(
            TextColumn("completions"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("completions", total=total, completed=done)

    def __enter__(self) -> EvalProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, count: int) -> None:
        """`count` more are written down."""
        self._done += count
        self._bar.advance(self._task, count)
        if self._bar.disable and time.monotonic() - self._said >= _LINE_EVERY_S:
            self._said = time.monotonic()
            say(f"{self._done} of {self._total} completions")
