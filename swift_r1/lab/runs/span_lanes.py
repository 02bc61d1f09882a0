"""The spans of one lane: what a process, a server or a pool of workers did when (`spans/<lane>.jsonl`)."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy

from swift_r1.record.lines import JsonRows
from swift_r1.record.metric_log import LARGEST_STEP


@dataclass(frozen=True, slots=True)
class Span:
    """Times are seconds since the epoch; `step` is the optimizer step that it belongs to."""

    lane: str
    start: float
    end: float
    name: str
    step: int


@dataclass(frozen=True, slots=True)
class SpanBlock:
    """Spans of a lane that are drawn as one: a single one, or `count` of them too short to tell apart, of which `name`
    took the most time."""

    lane: str
    start: float
    end: float
    name: str
    step: int
    count: int


class LaneRows:
    """The spans of one lane in their order, 25 bytes each."""

    def __init__(self, name: str, path: Path | None = None) -> None:
        self.name = name
        self.rows = None if path is None else JsonRows(path)
        self._forget()

    def _forget(self) -> None:
        self.starts = array("d")
        self.ends = array("d")
        self.steps = array("q")
        self._kinds = array("i")
        self.names: list[str] = []
        self._sorted = True

    def refresh(self) -> bool:
        """Reads what has been written since; whether there was anything."""
        assert self.rows is not None
        changed = self.rows.refresh(self._take, self._forget)
        self._sort()
        return changed

    def _take(self, row: Mapping[str, Any]) -> bool:
        start, end, name, step = (row.get(key) for key in ("start", "end", "name", "step"))
        if (
            is_time(start)
            and is_time(end)
            and start <= end
            and isinstance(name, str)
            and is_step(step)
        ):
            self.add(start, end, name, step)
            return True
        return False

    def add(self, start: float, end: float, name: str, step: int) -> None:
        self._sorted = self._sorted and (not self.starts or start >= self.starts[-1])
        self.starts.append(start)
        self.ends.append(end)
        self.steps.append(step)
        if name not in self.names:
            self.names.append(name)
        self._kinds.append(self.names.index(name))

    def _sort(self) -> None:
        """Orders what a clock that was set back has mixed up."""
        if self._sorted:
            return
        order = sorted(range(len(self.starts)), key=self.starts.__getitem__)
        columns: tuple[array[Any], ...] = (self.starts, self.ends, self.steps, self._kinds)
        for column in columns:
            column[:] = array(column.typecode, [column[index] for index in order])
        self._sorted = True

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Span:
        name = self.names[self._kinds[index]]
        return Span(self.name, self.starts[index], self.ends[index], name, self.steps[index])

    def between(self, start: float, end: float) -> range:
        """Returns the numbers of those that are in the window, at least in part."""
        return range(bisect_left(self.ends, start), bisect_right(self.starts, end))

    def seconds(self, start: float, end: float, steps: int) -> dict[int, dict[str, float]]:
        """Returns the seconds of the last `steps` steps that are in the window, by step and name."""
        found: dict[int, dict[str, float]] = {}
        for index in reversed(self.between(start, end)):
            if self.steps[index] not in found and len(found) == steps:
                break
            inside = min(self.ends[index], end) - max(self.starts[index], start)
            of_step = found.setdefault(self.steps[index], {})
            name = self.names[self._kinds[index]]
            of_step[name] = of_step.get(name, 0.0) + inside
        return found

    def totals(self, start: float, end: float) -> dict[str, float]:
        """Returns the seconds of the window by name."""
        starts, ends, kinds = self._in(self.between(start, end))
        inside = numpy.minimum(ends, end) - numpy.maximum(starts, start)
        sums = numpy.bincount(kinds, inside, len(self.names)).tolist()
        return {name: seconds for name, seconds in zip(self.names, sums, strict=True) if seconds}

    def _in(self, known: range) -> Iterator[numpy.ndarray]:
        """Starts, ends and kinds."""
        return (
            numpy.array(one[known.start : known.stop])
            for one in (self.starts, self.ends, self._kinds)
        )

    def blocks(self, start: float, end: float, cell: float) -> Iterator[SpanBlock]:
        """Yields what is in the window; neighbours that are shorter than `cell` seconds and begin in the same cell are
        one."""
        known = self.between(start, end)
        starts, ends, kinds = self._in(known)
        if not len(starts):
            return
        # a long one is equal to none
        cells = numpy.where(ends - starts < cell, (starts - start) // cell, numpy.nan)
        first = numpy.flatnonzero(numpy.append(True, cells[1:] != cells[:-1]))
        last = numpy.append(first[1:], len(starts)) - 1
        group = numpy.repeat(numpy.arange(len(first)), last - first + 1) * len(self.names) + kinds
        most = (
            numpy.bincount(group, ends - starts, len(first) * len(self.names))
            .reshape(-1, len(self.names))
            .argmax(1)
        )
        for i, j, kind in zip(first.tolist(), last.tolist(), most.tolist(), strict=True):
            step = self.steps[known.start + i]
            yield SpanBlock(
                self.name,
                float(starts[i]),
                float(ends[j]),
                self.names[kind],
                step,
                j - i + 1,
            )


def is_time(value: Any) -> TypeGuard[float]:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )


def is_step(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST_STEP
