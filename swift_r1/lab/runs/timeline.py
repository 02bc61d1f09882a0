"""Who did what when: the spans of a run by lane (a process, a server, a pool of workers), and what happened to it."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from swift_r1.lab.runs.span_lanes import LaneRows, Span, SpanBlock, is_step, is_time
from swift_r1.record.events import EVENTS
from swift_r1.record.folder import RunFolder
from swift_r1.record.lines import JsonRows
from swift_r1.record.metric_log import MetricLog
from swift_r1.record.spans import SPANS
from swift_r1.runtime.processes import run_folder_is_held

_BEGIN = ("started", "resumed")
_END = ("failed", "ended")
_ORDER = ("rank", "rollout-ahead", "rewards", "server")
_LOGGED = ("generate", "reward", "sleep", "offload", "train", "sync")
_OLD = "This run has no spans/ (written by an older version). Times are reconstructed from logging.jsonl."


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
        self._lanes: dict[str, LaneRows] = {}
        self._happened: list[Mark] = []
        self._events = JsonRows(run / EVENTS)
        self._old = False

    def refresh(self) -> bool:
        """Reads what has been written since; whether there was anything."""
        for path in (self.run / SPANS).glob(self._files):
            if self._old:
                self._lanes = {}
                self._old = False
            self._lanes.setdefault(path.stem, LaneRows(path.stem, path))
        if not self._lanes:
            self._lay_out_logged()
        changed = [lane.refresh() for lane in self._lanes.values() if lane.rows is not None]
        return self._events.refresh(self._add_event, self._happened.clear) or any(changed)

    def _add_event(self, row: Mapping[str, Any]) -> bool:
        time, step, kind, text = (row.get(key) for key in ("time", "step", "kind", "text"))
        if is_time(time) and is_step(step) and isinstance(kind, str) and isinstance(text, str):
            self._happened.append(Mark(time, step, kind, text))
            return True
        return False

    def _lay_out_logged(self) -> None:
        """Makes the lane of a run without spans: the times of its log, end to end from its start."""
        log = MetricLog(self.run)
        lane = LaneRows("rank-0")
        log.refresh()
        now = RunFolder(self.run, self.run.name).started or 0.0
        before = 0
        logged = {
            name: dict(zip(one.steps, one.values, strict=True))
            for name in _LOGGED
            if (one := log.get(f"time/{name}"))
        }
        for step in log.get("time/step").steps:
            for name, seconds in logged.items():
                taken = seconds.get(step, 0.0) * (step - before)
                if taken > 0:
                    lane.add(now, now + taken, name, step)
                    now += taken
            before = step
        self._old = len(lane) > 0
        self._lanes = {lane.name: lane} if self._old else {}

    @property
    def lanes(self) -> list[str]:
        """Returns the trainer's ranks, rounds that are sampled ahead, rewards, servers; then others."""
        return sorted(self._lanes, key=_place)

    @property
    def names(self) -> list[str]:
        """Returns the names of all spans."""
        return sorted({name for lane in self._lanes.values() for name in lane.names})

    @property
    def problems(self) -> list[str]:
        """Returns what could not be read, a line each."""
        found = [_OLD] if self._old else []
        for lane in self._lanes.values():
            if lane.rows is not None:
                found += lane.rows.problems
        return found + self._events.problems

    @property
    def extent(self) -> tuple[float, float] | None:
        """Returns the times of the first sign of the run and its last; None without one."""
        times = [
            time
            for lane in self._lanes.values()
            if len(lane)
            for time in (lane.starts[0], lane.ends[-1])
        ]
        times += [mark.time for mark in self._happened]
        return (min(times), max(times)) if times else None

    @property
    def last(self) -> Span | None:
        """Returns what the trainer did last; None without spans."""
        lanes = [
            lane for lane in self._lanes.values() if len(lane) and lane.name.startswith("rank")
        ]
        return max((lane[len(lane) - 1] for lane in lanes), key=lambda span: span.end, default=None)

    def spans(self, lane: str, start: float = -math.inf, end: float = math.inf) -> Iterator[Span]:
        """Returns the spans of a lane that are in a window, at least in part, in their order."""
        found = self._lanes[lane]
        return (found[index] for index in found.between(start, end))

    def blocks(
        self,
        start: float,
        end: float,
        most: int = 2000,
        pixels: int = 1200,
    ) -> list[SpanBlock]:
        """Returns all lanes in a window as at most `most` blocks, or twice the number of lanes: what is shorter than a
        pixel is drawn with its neighbours, and if there are still too many, what is shorter than 2, 4, ... pixels."""
        cell = max((end - start) / pixels, 1e-6)
        while True:
            lanes = (self._lanes[name].blocks(start, end, cell) for name in self.lanes)
            found = list(islice(chain.from_iterable(lanes), most + 1))
            if len(found) <= most or cell > end - start:
                return found
            cell *= 2

    def seconds(
        self,
        lane: str,
        start: float,
        end: float,
        steps: int,
    ) -> dict[int, dict[str, float]]:
        """Returns what a lane spent in a window, by step and name, for the last `steps` steps of it."""
        return self._lanes[lane].seconds(start, end, steps)

    def totals(self, lane: str, start: float, end: float) -> dict[str, float]:
        """Returns what a lane spent in a window, by name."""
        return self._lanes[lane].totals(start, end)

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
            number = bisect_right(lane.ends, before) - 1
            if number >= 0 and lane.ends[number] > time:
                time = lane.ends[number]
                step = lane.steps[number]
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
