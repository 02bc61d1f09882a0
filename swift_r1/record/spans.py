"""Who did what from when to when: `spans/<lane>.jsonl`, one file per process, server or pool of workers."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from swift_r1.record.events import AppendedLines

SPANS = "spans"


@dataclass(frozen=True)
class SpanLane:
    """Spans that do not overlap, in their order. Without a file nothing is written."""

    file: AppendedLines | None = None
    step: Callable[[], int] = lambda: 0

    def write(self, name: str, start: float, end: float) -> None:
        """Seconds since the epoch."""
        if self.file is not None:
            self.file.write({"start": start, "end": end, "name": name, "step": self.step()})


class Spans:
    """The lanes that a process writes in a run folder; without a folder nothing is written. A line for each phase of a
    step, and of each `Busy` at most some hundred a step.

    `step` is the optimizer step that is worked on; after it and until the next, that which was taken.
    """

    def __init__(self, run_dir: Path | None = None) -> None:
        self.step = 0
        self._folder = None if run_dir is None else run_dir / SPANS
        self._files: dict[str, AppendedLines] = {}
        self._busy: dict[str, Busy] = {}

    def lane(self, name: str, step: int | None = None) -> SpanLane:
        """Returns the lane of all steps, or of a `step` that is worked on before its time."""
        if self._folder is None:
            return SpanLane()
        file = self._files.setdefault(name, AppendedLines(self._folder / f"{name}.jsonl"))
        return SpanLane(file, lambda: self.step if step is None else step)

    def busy(self, lane: str, name: str) -> Busy:
        """Returns a new `Busy` in the place of the lane's."""
        self._busy[lane] = found = Busy(self.lane(lane), name)
        return found

    def begin(self, step: int) -> None:
        """What is worked on from now on."""
        self.flush()
        self.step = step

    def flush(self) -> None:
        """Writes what was busy until now."""
        for one in self._busy.values():
            one.flush()


class Stopwatch:
    """Adds up wall-clock seconds by name, and writes each time as a span of `lane`."""

    def __init__(self, lane: SpanLane | None = None) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._lane = lane or SpanLane()

    @contextmanager
    def timed(self, name: str, span: str | None = None) -> Iterator[None]:
        """`span` is the name in the lane where that is another one."""
        began = time.time()
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self.seconds[name] += seconds
            self._lane.write(span or name, began, began + seconds)

    def take(self) -> dict[str, float]:
        """Returns the seconds by name since the last call."""
        taken = dict(self.seconds)
        self.seconds.clear()
        return taken


class Busy:
    """Something that works on several things at a time: a span for the time in which there were any. For all threads.

    Short pauses count as work, longer ones too as lines of a step come together, so that they are at most
    8 log2(100 T) in T seconds.
    """

    def __init__(self, lane: SpanLane, name: str) -> None:
        self._lane = lane
        self._name = name
        self._lock = threading.Lock()
        self._count = 0
        self._lines = 0
        # of the span that is not written yet; none where they are equal
        self._began = self._ended = 0.0

    def add(self) -> None:
        """One more is under way."""
        with self._lock:
            now = time.time()
            if not self._count and now - self._ended > 0.01 * 2 ** (self._lines // 8):
                self._write(now)
            self._count += 1

    def done(self, count: int = 1) -> None:
        """So many of them are over."""
        with self._lock:
            self._count -= count
            if count:
                self._ended = time.time()

    def flush(self) -> None:
        """Writes what has passed."""
        with self._lock:
            now = time.time()
            if self._count:
                self._ended = now
            self._write(now)
            self._lines = 0

    def _write(self, now: float) -> None:
        if self._ended > self._began:
            self._lane.write(self._name, self._began, self._ended)
            self._lines += 1
        self._began = self._ended = now
