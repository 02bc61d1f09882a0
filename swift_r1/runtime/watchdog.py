"""A process that makes no progress ends itself, and says where each of its threads stood."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from types import TracebackType

from swift_r1.errors import EXIT_RUN_FAILED

_LAST_RESORT_S = 30.0


class Watchdog:
    """While open, ends the process with exit code 5 after `timeout_s` seconds without a call of `progress`.

    Every rank has its own, and one that waits for others that are alive counts as going on (`Presence`). Where the
    interpreter itself is stuck, so that no Python thread runs, the C library ends the process 30 s later, with exit
    code 1.

    Args:
        timeout_s: 0 for never.
        rank: for the message.
    """

    def __init__(self, timeout_s: float, rank: int) -> None:
        self.timeout_s, self.rank = timeout_s, rank
        self._doing, self._since = "the start", time.monotonic()
        self._closed = threading.Event()

    def __enter__(self) -> Watchdog:
        if self.timeout_s:
            self.progress(self._doing)
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        if self.timeout_s:
            faulthandler.cancel_dump_traceback_later()

    def progress(self, doing: str) -> None:
        """Something was done; `doing` is what comes now."""
        self._doing, self._since = doing, time.monotonic()
        if self.timeout_s:
            faulthandler.dump_traceback_later(self.timeout_s + _LAST_RESORT_S, exit=True)

    def _watch(self) -> None:
        while not self._closed.wait(max(0.0, self._since + self.timeout_s - time.monotonic())):
            if time.monotonic() - self._since < self.timeout_s:
                continue
            sys.stderr.write(
                f"\nswift rlhf: rank {self.rank} made no progress for {self.timeout_s:g} s (--step_timeout) in "
                f"{self._doing}; where each thread stands:\n"
            )
            sys.stderr.flush()
            faulthandler.dump_traceback(all_threads=True)
            os._exit(EXIT_RUN_FAILED)
