"""Curves as SVG: the same bytes for the same numbers, text as text, colours that follow the page's light or dark."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Sequence
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
from swift_r1.lab.runs.curves import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (4.6, 2.5)  # inches, of 72 units
_MANY = 60  # points, from which on they have no marks
_INKS = (
    *("text.color", "xtick.color", "ytick.color"),
    *("axes.edgecolor", "axes.labelcolor", "grid.color"),
)
_STROKES = ("-", "--", ":", "-.")
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


def figure(title: str, curves: Sequence[Curve], about: str = "") -> Figure:
    """Draws lines over steps, with their bands."""
    title = printable(title)
    import matplotlib
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import MaxNLocator

    style: Any = {
        "svg.hashsalt": title,
        "svg.fonttype": "none",
        "text.parse_math": False,
        "font.size": 8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        **dict.fromkeys(_INKS, INK_LIGHT),
    }
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that the font for measuring does not have
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(style)
        canvas = Canvas(figsize=_SIZE, layout="constrained")
        axes = canvas.subplots()
        axes.set_xlabel("step")
        axes.set_title(_line(about), loc="left", fontsize=7)
        axes.grid(alpha=0.15, linewidth=0.6)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        for one in curves:
            _draw(axes, one)
        if len(curves) > 1:
            _legend(axes, [one.label for one in curves])
        stream = io.BytesIO()
        canvas.savefig(
            stream,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None},
        )
    return Figure(title, _plain(stream.getvalue().decode("utf-8"), title))


def _draw(axes: Axes, curve: Curve) -> None:
    colour = SERIES_LIGHT[curve.colour % len(SERIES_LIGHT)]
    axes.plot(
        [step for step, _ in curve.points],
        [math.nan if value is None else value for _, value in curve.points],
        color=colour,
        marker="." if len(curve.points) < _MANY else "",
        markersize=5,
        linewidth=1.4,
        linestyle=_STROKES[curve.dash % len(_STROKES)],
        label=curve.label,
    )
    if curve.band:
        steps, low, high = zip(*curve.band, strict=True)
        axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)


def alone(figure: Figure) -> str:
    """Returns the SVG of a file of its own."""
    style = f"svg {{ {LIGHT}; background: var(--page) }}"
    style += f" @media (prefers-color-scheme: dark) {{ svg {{ {DARK} }} }}"
    return figure.svg.replace("<style>", f"<style>{style} ", 1) + "\n"


def _line(text: str) -> str:
    return " ".join(printable(text).split())


def _legend(axes: Axes, labels: Sequence[str]) -> None:
    # A label that begins with an underscore would be left out.
    named = [f" {_line(label)}" for label in labels]
    columns = 3 if max(map(len, named)) < 14 else 2 if max(map(len, named)) < 26 else 1
    axes.figure.legend(
        [*axes.get_lines()],
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
