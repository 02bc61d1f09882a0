"""A table and a plot of how something grows, for the `growth_*.py` scripts beside this one.

    growth("rows", "rows", [{"rows": 1000, "start": 0.8}, {"rows": 10_000, "start": 1.9}], {"start": "start, seconds"})

A line of the table is a size. Beside each figure stands its exponent since the line above: 1 is linear, 0 is flat. The
plot is `docs/images/growth-NAME.svg`; the same rows give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

IMAGES = Path(__file__).parent.parent / "docs" / "images"
# Of like contrast on black and on white.
COLOURS = ("#3b82f6", "#e0752d", "#2fa36b", "#c2477f", "#8b6fd6", "#9a8a2c", "#2a9aa8", "#d04848")
INK = "#808890"

Row = Mapping[str, float]


def growth(
    name: str,
    x: str,
    rows: Sequence[Row],
    series: Mapping[str, str],
    *,
    x_label: str = "",
    y_label: str = "",
    log: bool = True,
    plot: bool = True,
) -> None:
    """Prints `rows` as a table and draws each key of `series` (its value is the label) over `rows[i][x]` to
    growth-NAME.svg, with logarithmic axes unless `log` is false. `plot=False`: the table alone. A row without a key of
    the series, or with NaN there, is left out of that line. Raises KeyError for a row without `x`, and ValueError for
    more series than there are colours."""
    if len(series) > len(COLOURS):
        raise ValueError(f"{len(series)} series, and {len(COLOURS)} colours")
    rows = sorted(rows, key=lambda row: row[x])
    _table(x, rows, series, x_label or x)
    if plot:
        _svg(IMAGES / f"growth-{name}.svg", x, rows, series, x_label or x, y_label, log)


def exponent(before: Row, after: Row, x: str, y: str) -> float:
    """b of y ~ x^b between two rows; NaN where one of the figures is missing or not positive."""
    figures = (before[x], after[x], before.get(y, math.nan), after.get(y, math.nan))
    if not all(f > 0 for f in figures) or before[x] == after[x]:
        return math.nan
    return math.log(figures[3] / figures[2]) / math.log(figures[1] / figures[0])


def _table(x: str, rows: Sequence[Row], series: Mapping[str, str], x_label: str) -> None:
    table = Table(x_label, *(cell for label in series.values() for cell in (label, "^")))
    for before, row in zip([None, *rows], rows, strict=False):
        cells = [f"{row[x]:,.10g}"]
        for y in series:
            power = math.nan if before is None else exponent(before, row, x, y)
            cells += [
                f"{row[y]:,.4g}" if y in row else "",
                "" if math.isnan(power) else f"{power:.2f}",
            ]
        table.add_row(*cells)
    Console(width=max(100, 14 * len(table.columns))).print(table)


def _svg(
    file: Path,
    x: str,
    rows: Sequence[Row],
    series: Mapping[str, str],
    x_label: str,
    y_label: str,
    log: bool,
) -> None:
    # Text stays text, and ids do not come from a clock.
    with mpl.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "growth", "font.family": "sans-serif"}
    ):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.add_subplot()
        for colour, (y, label) in zip(COLOURS, series.items(), strict=False):
            known = [(row[x], row[y]) for row in rows if not math.isnan(row.get(y, math.nan))]
            axes.plot(
                *zip(*known, strict=True), marker="o", markersize=4, color=colour, label=label
            )
        if log:
            axes.set(xscale="log", yscale="log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlabel(x_label, color=INK)
        axes.set_ylabel(y_label, color=INK)
        axes.tick_params(which="both", colors=INK)
        axes.grid(color=INK, alpha=0.25, linewidth=0.6)
        axes.patch.set_alpha(0)
        for spine in axes.spines.values():
            spine.set_color(INK)
        axes.legend(frameon=False, labelcolor=INK)
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, metadata={"Date": None}, transparent=True)
