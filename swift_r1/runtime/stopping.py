"""Why a run ends early: Ctrl-C and SIGTERM, or time.

Of signals the first asks for an orderly end, where there is something to save, and the second ends at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time

from swift_r1.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED

OUT_OF_TIME = 1
_EXIT_CODES = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_TERMINATED}


class StopRequest:
    """What this process knows of a stop.

    Attributes:
        reason: why the run stops, as all ranks have agreed: 0 while it does not, `OUT_OF_TIME`, or the exit code of
            the signal (130, 143). Numbers, so that ranks can agree on the largest.
    """

    def __init__(self) -> None:
        self.reason = 0
        self._signalled = 0
        self._in_order = False
        self._deadline: float | None = None
        self._longest = 0.0
        self._last_asked: float | None = None

    def listen(self) -> StopRequest:
        """From here on a thread takes signals: the main one may be in C for long, loading or in a collective."""
        told, tell = os.pipe()
        os.set_blocking(tell, False)
        signal.set_wakeup_fd(tell)
        # What is forked must not tell this process of its signals.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        for number in _EXIT_CODES:
            signal.signal(number, lambda _number, _frame: None)
        threading.Thread(target=self._hear, args=(told,), name="signals", daemon=True).start()
        return self

    def in_order(self) -> None:
        """Training begins: a signal now asks for the end of the step in hand and a checkpoint. Before, with nothing to
        save, it ended the process at once."""
        self._in_order = True

    @property
    def exit_code(self) -> int:
        return EXIT_OK if self.reason == OUT_OF_TIME else self.reason

    def limit(self, seconds: float) -> None:
        """The run is to have ended in so many seconds from now."""
        self._deadline = time.monotonic() + seconds

    def due(self) -> int:
        """This process's own reason to stop now; to be asked before the first step and after each.

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

    def _hear(self, told: int) -> None:
        while numbers := os.read(told, 64):
            for number in numbers:
                if number in _EXIT_CODES:
                    self._on_signal(number)

    def _on_signal(self, number: int) -> None:
        code = _EXIT_CODES[signal.Signals(number)]
        if self._signalled or not self._in_order:
            os._exit(code)
        self._signalled = code
        if os.environ.get("RANK", "0") == "0":
            # Not through `print`: the main thread may be in the middle of one.
            os.write(2, b"\nstopping after this step, with a checkpoint; once more stops at once\n")
