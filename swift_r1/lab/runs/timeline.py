"""Who did what when: the spans of a run by lane (a process, a server, a pool of workers: `spans/<lane>.jsonl`), and what
happened to it."""

from __future__ import annotations

import math
import re
import sys
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from swift_r1.record.events import EVENTS
from swift_r1.record.lines import JsonRows
from swift_r1.record.metric_log import LARGEST_STEP
from swift_r1.record.spans import SPANS
from swift_r1.runtime.processes import run_folder_is_held

_BEGIN = ("started", "resumed")
_END = ("failed", "ended")
_ORDER = ("rank", "rollout-ahead", "rewards", "server")


@dataclass(frozen=True, slots=True)
class Span:
    """Times are seconds since the epoch; `step` is the optimizer step that it belongs to."""

    start: float
    end: float
    name: str
    step: int


class _Lane:
    """The spans of one lane in their order."""

    def __init__(self, path: Path) -> None:
        self._rows = JsonRows(path)
        self.spans: list[Span] = []

    def refresh(self) -> bool:
        """Reads what has been written since; whether there was anything."""
        return self._rows.refresh(self._take, self.spans.clear)

    def _take(self, row: Mapping[str, Any]) -> bool:
        start, end, name, step = (row.get(key) for key in ("start", "end", "name", "step"))
        if not (_is_time(start) and _is_time(end) and start <= end):
            return False
        if not (isinstance(name, str) and _is_step(step)):
            return False
        # a clock that was set back mixes them up
        insort(self.spans, Span(start, end, name, step), key=_start)
        return True

    @property
    def problems(self) -> list[str]:
        return self._rows.problems


def _start(span: Span) -> float:
    return span.start


@dataclass(frozen=True, slots=True)
class Mark:
    """An event. `kind` is one of `tracking.events.Kind`, or `killed`, which no process writes down: it is found from
    what is missing, and its time is that of the last sign of life."""

    time: float
    step: int
    kind: str
    text: str


class Timeline:
    """The spans of a run folder, or of those `lanes` of it that match, and its events. Reads them on `refresh`, each
    line once; nothing before."""

    def __init__(self, run: Path, lanes: str = "*") -> None:
        self.run = run
        self._files = f"{lanes}.jsonl"
        self._lanes: dict[str, _Lane] = {}
        self._happened: list[Mark] = []
        self._events = JsonRows(run / EVENTS)

    def refresh(self) -> bool:
        """Reads what has been written since; whether there was anything."""
        for path in (self.run / SPANS).glob(self._files):
            self._lanes.setdefault(path.stem, _Lane(path))
        changed = [lane.refresh() for lane in self._lanes.values()]
        return self._events.refresh(self._add_event, self._happened.clear) or any(changed)

    def _add_event(self, row: Mapping[str, Any]) -> bool:
        time, step, kind, text = (row.get(key) for key in ("time", "step", "kind", "text"))
        if _is_time(time) and _is_step(step) and isinstance(kind, str) and isinstance(text, str):
            self._happened.append(Mark(time, step, kind, text))
            return True
        return False

    @property
    def lanes(self) -> list[str]:
        """Returns the trainer's ranks, rounds that are sampled ahead, rewards, servers; then others."""
        return sorted(self._lanes, key=_place)

    @property
    def problems(self) -> list[str]:
        """Returns what could not be read, a line each."""
        found = [problem for lane in self._lanes.values() for problem in lane.problems]
        return found + self._events.problems

    @property
    def extent(self) -> tuple[float, float] | None:
        """Returns the times of the first sign of the run and its last; None without one."""
        times = [
            time
            for lane in self._lanes.values()
            if lane.spans
            for time in (lane.spans[0].start, lane.spans[-1].end)
        ]
        times += [mark.time for mark in self._happened]
        return (min(times), max(times)) if times else None

    @property
    def last(self) -> Span | None:
        """Returns what the trainer did last; None without spans."""
        last = [
            lane.spans[-1]
            for name, lane in self._lanes.items()
            if lane.spans and name.startswith("rank")
        ]
        return max(last, key=lambda span: span.end, default=None)

    def spans(self, lane: str) -> Sequence[Span]:
        """Returns the spans of a lane in their order."""
        return self._lanes[lane].spans

    def totals(self, lane: str) -> dict[str, float]:
        """Returns the seconds that a lane spent, by name."""
        found: dict[str, float] = {}
        for span in self._lanes[lane].spans:
            found[span.name] = found.get(span.name, 0.0) + span.end - span.start
        return found

    @property
    def marks(self) -> list[Mark]:
        """Returns what happened, kills among it, in the order of time."""
        found: list[Mark] = []
        alive = False  # whether a process has begun that has not said how it ended
        for mark in self._happened:
            if mark.kind in _BEGIN and alive:
                found.append(self._killed(mark.time, found[-1]))
            alive = mark.kind in _BEGIN or (alive and mark.kind not in _END)
            found.append(mark)
        if alive and not run_folder_is_held(self.run):
            found.append(self._killed(math.inf, found[-1]))
        return found

    @property
    def alive_s(self) -> float | None:
        """Returns the seconds in which processes worked on the run: from each start to its end, or to its last sign of
        life. None without events."""
        total = 0.0
        began = None
        for mark in self.marks:
            if mark.kind in _BEGIN:
                began = mark.time
            elif began is not None and mark.kind in (*_END, "killed"):
                total = total + max(0.0, mark.time - began)
                began = None
        if began is not None and self.extent is not None:
            total += max(0.0, self.extent[1] - began)
        return total or None

    def _killed(self, before: float, last: Mark) -> Mark:
        """Returns the last sign of life before a time, of which `last` is the last event."""
        time = last.time
        step = last.step
        for lane in self._lanes.values():
            ended = [span for span in lane.spans if time < span.end <= before]
            if ended:
                time = ended[-1].end
                step = ended[-1].step
        return Mark(
            time,
            step,
            "killed",
            "the process ended without a word (killed, or the machine went down)",
        )


def _place(lane: str) -> tuple[int, list[int | str]]:
    kind = next(
        (number for number, start in enumerate(_ORDER) if lane.startswith(start)), len(_ORDER)
    )
    return kind, [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", lane)]


def _is_time(value: Any) -> TypeGuard[float]:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )


def _is_step(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST_STEP
