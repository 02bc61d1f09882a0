"""Why a run ends early: Ctrl-C, SIGTERM, `--max_runtime`, or no progress.

The first signal asks for an orderly end, where there is something to save; the second ends the process at once.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Self

from swift_r1.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_RUN_FAILED, EXIT_TERMINATED
from swift_r1.runtime.processes import say

LAUNCHED = "SWIFT_R1_LAUNCHED"
"""The variable that says that `swift launch` started this process, and reads its exit code."""
OUT_OF_TIME = 1
NOT_BETTER = 2
_EXIT_CODES: dict[int, int] = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_TERMINATED}
_LAST_RESORT_S = 30.0
_TOLD_S = 2.0  # for what is told of an end: the disk that it goes to may be what stands still


class StopRequest:
    """What this process knows of a stop. Its `reason`, as all ranks have agreed, is 0 while there is none,
    `OUT_OF_TIME`, `NOT_BETTER` (`--early_stop_interval`), or the exit code of the signal (130, 143): numbers, so that
    ranks can agree on the largest."""

    def __init__(self) -> None:
        self.reason = 0
        self._signalled = 0
        self._heard: Callable[[str], None] | None = None
        self._deadline: float | None = None
        self._longest = 0.0
        self._last_asked: float | None = None

    def listen(self) -> Self:
        """Starts a thread that takes signals: the main thread may be in C for long, loading or in a collective."""
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end)
        # Forked children must not report their signals to this process.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        for number in _EXIT_CODES:
            signal.signal(number, lambda _number, _frame: None)
        threading.Thread(
            target=self._read_signals, args=(read_end,), name="signals", daemon=True
        ).start()
        return self

    def in_order(self, heard: Callable[[str], None] = lambda _text: None) -> None:
        """Notes that training begins: a signal, which `heard` is told of in a thread, asks to end after the current
        step, with a checkpoint. Before, with nothing to save, it ended the process at once."""
        self._heard = heard

    @property
    def signalled(self) -> bool:
        """Says whether this process was told to stop."""
        return bool(self._signalled)

    @property
    def exit_code(self) -> int:
        return EXIT_OK if self.reason in (OUT_OF_TIME, NOT_BETTER) else self.reason

    def limit(self, seconds: float) -> None:
        """Sets the seconds from now in which the run must have ended."""
        self._deadline = time.monotonic() + seconds

    def due(self) -> int:
        """This process's own reason to stop now; call it before the first step and after each.

        Time is up when there may be too little of it for another step like the longest so far, and a save that takes
        as long.
        """
        now = time.monotonic()
        self._longest = max(self._longest, now - (self._last_asked or now))
        self._last_asked = now
        if self._signalled:
            return self._signalled
        late = self._deadline is not None and now + 2 * self._longest >= self._deadline
        return OUT_OF_TIME if late else 0

    def _read_signals(self, read_end: int) -> None:
        for numbers in iter(lambda: os.read(read_end, 64), b""):
            for number in filter(_EXIT_CODES.__contains__, numbers):
                self._on_signal(number)

    def _on_signal(self, number: int) -> None:
        if self._signalled and number == signal.SIGTERM and LAUNCHED in os.environ:
            return  # from the node's end and from its launcher: only `swift launch` ends it at once
        if self._signalled or self._heard is None:
            os._exit(_EXIT_CODES[number])
        self._signalled = _EXIT_CODES[number]
        if os.environ.get("RANK", "0") == "0":
            # Not `print`: the main thread may be in the middle of one.
            os.write(2, b"\nstopping after this step, with a checkpoint; once more stops at once\n")
        _tell(self._heard, f"after this step, with a checkpoint: {signal.Signals(number).name}")


class Watchdog:
    """While open, ends the process with exit code 5 after `timeout_s` seconds (0: never) without a call of `progress`.

    `stuck` is told why. Every rank has its own; a rank that waits for others that are alive makes progress
    (`Presence`). Where the interpreter itself is stuck, so that no Python thread runs, the C library ends the process
    30 s later, with exit code 1.
    """

    def __init__(
        self, timeout_s: float, rank: int, stuck: Callable[[str], None] = lambda _text: None
    ) -> None:
        self.timeout_s = timeout_s
        self.rank = rank
        self._stuck = stuck
        self._doing = "the start"
        self._since = time.monotonic()
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        if self.timeout_s:
            self.progress(self._doing)
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self.timeout_s:
            faulthandler.cancel_dump_traceback_later()

    def progress(self, doing: str) -> None:
        """Notes that something was done; `doing` is what comes now."""
        self._doing = doing
        self._since = time.monotonic()
        if self.timeout_s:
            faulthandler.dump_traceback_later(self.timeout_s + _LAST_RESORT_S, exit=True)

    def _watch(self) -> None:
        while not self._closed.wait(max(0.0, self._since + self.timeout_s - time.monotonic())):
            if time.monotonic() - self._since < self.timeout_s:
                continue
            sys.stderr.write("\n")
            stuck = f"rank {self.rank} made no progress for {self.timeout_s:g} s (--step_timeout) in {self._doing}"
            say(f"{stuck}; where each thread stands:")
            faulthandler.dump_traceback(all_threads=True)
            _tell(self._stuck, stuck)
            os._exit(EXIT_RUN_FAILED)


def _tell(who: Callable[[str], None], text: str) -> None:
    """Calls `who`, and does not wait for it longer than `_TOLD_S`."""
    thread = threading.Thread(target=who, args=(text,), name="telling", daemon=True)
    thread.start()
    thread.join(_TOLD_S)
