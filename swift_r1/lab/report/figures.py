"""Curves as SVG: the same bytes for the same numbers, text as text, colours that follow the page's light or dark."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from swift_r1.lab.report.blocks import Figure, printable
from swift_r1.lab.report.colours import (
    INK_DARK,
    INK_LIGHT,
    PAGE_DARK,
    PAGE_LIGHT,
    SERIES_DARK,
    SERIES_LIGHT,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (4.6, 2.5)  # inches, of 72 units
_MANY = 60  # points, from which on they have no marks
_VARIABLES = {
    INK_LIGHT: "--ink",
    **{colour: f"--series-{number}" for number, colour in enumerate(SERIES_LIGHT)},
}


def _colours(ink: str, page: str, series: Sequence[str]) -> str:
    named = "; ".join(f"--series-{number}: {colour}" for number, colour in enumerate(series))
    return f"--ink: {ink}; --page: {page}; {named}"


LIGHT = _colours(INK_LIGHT, PAGE_LIGHT, SERIES_LIGHT)
DARK = _colours(INK_DARK, PAGE_DARK, SERIES_DARK)
"""CSS variables that the figures read; a figure that stands alone has them in it."""


@dataclass(frozen=True)
class Curve:
    """Values at steps, with the band around them where there is one; all of the same length."""

    label: str  # may be empty
    number: int  # of its colour
    steps: Sequence[float]
    values: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def curves(title: str, drawn: Sequence[Curve], unit: str = "", intervals: bool = False) -> Figure:
    """Lines over steps; with `intervals` their bands are those of each point."""
    with _figure(title, unit) as (axes, written):
        for one in drawn:
            colour = SERIES_LIGHT[one.number % len(SERIES_LIGHT)]
            few = len(one.steps) < _MANY
            mark = "." if few else ""
            axes.plot(
                one.steps,
                one.values,
                color=colour,
                marker=mark,
                markersize=5,
                linewidth=1.4,
                label=one.label,
            )
            if one.low is not None and one.high is not None:
                if intervals:
                    axes.vlines(
                        one.steps,
                        one.low,
                        one.high,
                        color=colour,
                        linewidth=1,
                        alpha=0.6,
                    )
                else:
                    axes.fill_between(
                        one.steps,
                        one.low,
                        one.high,
                        color=colour,
                        alpha=0.2,
                        linewidth=0,
                    )
        _legend(axes, [one.label for one in drawn])
    return written[0]


def shares(title: str, parts: Sequence[Curve]) -> Figure:
    """Parts of a whole over the same steps, one upon the other; their values are from 0 to 1."""
    with _figure(title, "share") as (axes, written):
        bottom = [0.0] * len(parts[0].steps)
        for one in parts:
            top = [below + value for below, value in zip(bottom, one.values, strict=True)]
            colour = SERIES_LIGHT[one.number % len(SERIES_LIGHT)]
            axes.fill_between(one.steps, bottom, top, color=colour, linewidth=0, step="mid")
            bottom = top
        axes.set_ylim(0, 1)
        _legend(axes, [one.label for one in parts])
    return written[0]


def alone(figure: Figure) -> str:
    """Returns the SVG of a file of its own."""
    style = f"svg {{ {LIGHT}; background: var(--page) }}"
    style += f" @media (prefers-color-scheme: dark) {{ svg {{ {DARK} }} }}"
    return figure.svg.replace("<style>", f"<style>{style} ", 1) + "\n"


@contextmanager
def _figure(title: str, unit: str) -> Iterator[tuple[Axes, list[Figure]]]:
    """Axes to draw in; the list holds the figure afterwards."""
    title = printable(title)
    import matplotlib
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import MaxNLocator

    ours = {
        "svg.hashsalt": title,
        "svg.fonttype": "none",
        "text.parse_math": False,
        "font.size": 8,
    }
    inks = dict.fromkeys(
        (
            *("text.color", "xtick.color", "ytick.color"),
            *("axes.edgecolor", "axes.labelcolor", "grid.color"),
        ),
        INK_LIGHT,
    )
    bare = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
    }
    style: Any = ours | inks | bare
    written: list[Figure] = []
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that the font for measuring does not have
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(style)
        canvas = Canvas(figsize=_SIZE, layout="constrained")
        axes = canvas.subplots()
        axes.set_xlabel("step")
        axes.set_ylabel(unit)
        axes.grid(alpha=0.15, linewidth=0.6)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        yield axes, written
        stream = io.BytesIO()
        canvas.savefig(
            stream,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None},
        )
    written.append(Figure(title, _plain(stream.getvalue().decode("utf-8"), title)))


def _legend(axes: Axes, labels: Sequence[str]) -> None:
    if not any(labels):
        return
    handles: list[Any] = [*axes.get_lines()] or [*axes.collections]
    # A label that begins with an underscore would be left out.
    named = [" " + " ".join(printable(label).split()) for label in labels]
    columns = 3 if max(map(len, named)) < 14 else 2 if max(map(len, named)) < 26 else 1
    axes.figure.legend(
        handles,
        named,
        loc="outside lower left",
        ncols=columns,
        frameon=False,
        fontsize=8,
    )


def _plain(svg: str, title: str) -> str:
    """Removes what a page does not need, makes variables of the colours, and adds a title for those who hear it."""
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<g id=\"[^\"]*\"", "<g", svg)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: sans-serif", svg)
    svg = re.sub(r" transform=\"rotate\(-0[^\"]*\)\"", "", svg)
    svg = re.sub(
        "<[^>]*>",
        lambda tag: re.sub(r"\d+\.\d{2,}", lambda found: f"{float(found[0]):.2f}", tag[0]),
        svg,
    )
    svg = re.sub(r" (width|height)=\"[\d.]+pt\"", "", svg, count=2)
    svg = re.sub(r"\s*\n\s*", " ", svg).replace("> <", "><")
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable}, {colour})")
    start, rest = svg.split(">", 1)
    rest = rest.replace('<style type="text/css">', "<style>", 1)
    return f'{start} role="img"><title>{escape(title)}</title>{rest}'
