"""The spread of a column of numbers over the steps, of one run or of several on the same scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy

    from swift_r1.lab.runs.completions import CompletionTable

_MOST_STEPS = 200  # of a heat map, bins
_MOST_VALUES = 12  # that have a row each; more are binned
_DIGITS = 6  # after the point, to which values are the same
_LARGEST = 1e300  # of its values
_AT_ONCE = 1 << 16  # values that are counted at once


@dataclass(frozen=True)
class Heatmap:
    """Counts of completions by step and value: `counts[i][j]` from step `steps[i]` (up to the next), and from
    `rows[j][0]` to `rows[j][1]`, which are the same where the row is one value."""

    steps: list[int]
    rows: list[tuple[float, float]]
    counts: list[list[int]]


def heatmaps(tables: Sequence[CompletionTable], column: str, bins: int = 30) -> list[Heatmap]:
    """Counts the values of a column by step, with the same rows for all tables: one for each value where there are few,
    else at most about `bins` of a round width. Several steps are one where there are very many. A table without such
    numbers has no steps."""
    import numpy

    parts = []
    for table in tables:
        steps, values = table.values(column)
        known = numpy.abs(values) < _LARGEST
        if not known.all():
            steps, values = steps[known], values[known]
        parts.append((steps, numpy.round(values, _DIGITS, out=values)))
    distinct = numpy.unique(numpy.concatenate([numpy.unique(values) for _, values in parts]))
    if len(distinct) <= _MOST_VALUES:
        rows = [(value, value) for value in distinct.tolist()]
    else:
        edges = _edges(distinct, bins)
        rows = list(pairwise(edges))
    return [_heatmap(steps, values, rows) for steps, values in parts]


def _heatmap(
    of_rows: numpy.ndarray, values: numpy.ndarray, rows: list[tuple[float, float]]
) -> Heatmap:
    import numpy

    if not len(values):
        return Heatmap([], rows, [])
    steps = numpy.unique(of_rows)
    each = math.ceil(len(steps) / _MOST_STEPS)
    size = (math.ceil(len(steps) / each), len(rows))
    lows = [low for low, _ in rows]
    counts = numpy.zeros(math.prod(size), int)
    for start in range(0, len(values), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        row = numpy.searchsorted(lows, values[part], "right") - 1
        place = numpy.searchsorted(steps, of_rows[part]) // each
        cells = place * len(rows) + numpy.clip(row, 0, len(rows) - 1)
        counts += numpy.bincount(cells, minlength=len(counts))
    return Heatmap(steps[::each].tolist(), rows, counts.reshape(size).tolist())


def _edges(distinct: numpy.ndarray, bins: int) -> list[float]:
    """Returns edges at multiples of 1, 2 or 5 times a power of ten, whole ones for whole numbers."""
    low = float(distinct[0])
    high = float(distinct[-1])
    least = high / bins - low / bins
    power = 10.0 ** math.floor(math.log10(least))
    width = next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))
    if not (distinct % 1).any():
        width = max(1.0, width)
    first = math.floor(low / width)
    return [number * width for number in range(first, math.floor(high / width) + 2)]
