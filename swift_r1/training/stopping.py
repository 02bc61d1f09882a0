"""Ctrl-C and SIGTERM: the first asks for an orderly end with a checkpoint, the second ends at once."""

from __future__ import annotations

import os
import signal
from types import FrameType

from swift_r1.errors import EXIT_INTERRUPTED, EXIT_TERMINATED

_EXIT_CODES = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_TERMINATED}


class StopRequest:
    """`exit_code` is 0 until a signal came, then 130 or 143."""

    def __init__(self) -> None:
        self.exit_code = 0

    def listen(self) -> StopRequest:
        for number in _EXIT_CODES:
            signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        code = _EXIT_CODES[signal.Signals(number)]
        if self.exit_code:
            os._exit(code)
        self.exit_code = code
        if os.environ.get("RANK", "0") == "0":
            # Not through `print`: the signal may have come in the middle of one.
            os.write(2, b"\nstopping after this step, with a checkpoint; once more stops at once\n")
