"""Programs that this process starts, watches and ends. Linux."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from swift_r1.runtime.processes import end_with_parent


class SupervisedProcess(subprocess.Popen[bytes]):
    """A program that was started, as `subprocess.Popen`, which a terminal's Ctrl-C does not reach.

    Args:
        words: its command.
        environ: all its variables; None: those of this process.
        log: file that its output is appended to.
        keeps_errors: whether its standard error is kept in a file without a name, for `last_line`.
        ends_with_parent: whether the kernel sends it SIGTERM when the thread that starts it ends, however that ends.
        cpus: that it may run on; None: those of this process.
        options: of `subprocess.Popen`; without `stdin` it has nothing to read, and it leads a session of its own
            unless they say otherwise.

    Attributes:
        deadline: when `look` kills it, by the monotonic clock; infinite until `ask_to_end`.

    Raises OSError, subprocess.SubprocessError: it cannot be started.
    """

    def __init__(
        self,
        words: Sequence[str],
        environ: Mapping[str, str] | None = None,
        log: Path | None = None,
        keeps_errors: bool = False,
        ends_with_parent: bool = False,
        cpus: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        self.deadline = math.inf
        options = {"stdin": subprocess.DEVNULL, "start_new_session": True} | options
        self._leads_group = bool(options["start_new_session"])

        parent = os.getpid()

        def in_child() -> None:
            if ends_with_parent:
                end_with_parent(signal.SIGTERM)
                if os.getppid() != parent:  # it has ended meanwhile
                    os._exit(1)
            if cpus is not None:
                os.sched_setaffinity(0, cpus)

        if ends_with_parent or cpus is not None:
            options["preexec_fn"] = in_child
        with ExitStack() as cleanup:
            if log is not None:
                self._said = log
                options["stdout"] = cleanup.enter_context(log.open("ab"))
                options["stderr"] = subprocess.STDOUT
            elif keeps_errors:
                self._errors = tempfile.TemporaryFile()  # noqa: SIM115  open as long as this object
                self._said = Path(f"/proc/self/fd/{self._errors.fileno()}")
                options["stderr"] = self._errors
            super().__init__(list(words), env=None if environ is None else dict(environ), **options)

    def last_line(self, nothing: str = "it said nothing") -> str:
        """Returns the last line of its log, or of its standard error, that is not blank, at most 300 characters of it;
        `nothing` where there is none."""
        text = self._said.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1][:300] if lines else nothing

    def ask_to_end(self, seconds: float) -> None:
        """Sends SIGTERM; `look` kills the process after `seconds`."""
        self.terminate()
        self.deadline = time.monotonic() + seconds

    def look(self) -> int | None:
        """Returns the exit code; None while the process runs. Kills one that is late."""
        if self.late:
            self.kill()
        return self.poll()

    @property
    def late(self) -> bool:
        """Says whether the process should have ended by now."""
        return time.monotonic() > self.deadline

    def kill(self) -> None:
        """Kills the process, with its group where it leads one."""
        if self._leads_group and self.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        super().kill()

    def finish(self, seconds: float) -> bool:
        """Waits for the end of a process that was told to end, and kills it after `seconds`. Returns whether it ended
        by itself."""
        try:
            self.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.kill()
            self.wait()
            return False
        return True

    def end(self, seconds: float) -> bool:
        """Ends the process by SIGTERM, and after `seconds` by SIGKILL. Returns whether it ended in time."""
        self.terminate()
        return self.finish(seconds)
