"""A progress bar on standard error; where that is no terminal, a line now and then."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

_logger = logging.getLogger("swift_r1.data")
_EVERY = 10.0  # seconds between two lines
_PATIENCE = 1.0  # seconds before the bar is shown


class Progress:
    """Counts rows; a context manager.

    Args:
        what: what is being done.
        total: how many rows there will be; None where that is not known.
    """

    def __init__(self, what: str, total: int | None) -> None:
        self._what, self._total, self._done = what, total, 0
        self._started = self._said = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, rows: int) -> None:
        """So many more are done."""
        self._done += rows
        now = time.monotonic()
        if sys.stderr.isatty():
            if self._bar is None and now - self._started > _PATIENCE:
                self._open()
            if self._bar is not None:
                self._bar.update(self._task, completed=self._done)
        elif now - self._said > _EVERY:
            self._said = now
            of = f" of {self._total:,}" if self._total else ""
            _logger.info("%s: %s%s rows", self._what, f"{self._done:,}", of)

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(self._what, total=self._total)
        self._bar.start()
