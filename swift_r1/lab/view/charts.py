"""Charts: ECharts options whose colours are the page's CSS variables, so that a theme changes them without a message;
zoom and pointer that all charts of a page share; the buttons of each, for its full size, its numbers and its picture.

A point of a line leads on: a click on it, or Enter once the arrow keys have reached it, opens `Line.opens`."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nicegui import ui

from swift_r1.lab.report.colours import SERIES_LIGHT
from swift_r1.lab.view.shell import Page

Point = tuple[float, float | None]
DASHES: Sequence[Any] = ("solid", "dashed", "dotted", [10, 3, 2, 3])
"""The strokes of the metrics of a chart that shows several runs."""
_TEXT = {"color": "var(--muted)", "fontSize": 11, "textBorderWidth": 0}


@dataclass(frozen=True, slots=True)
class Line:
    """A series of a line chart.

    Attributes:
        points: x and y; None leaves a gap.
        colour: number of its colour in the palette.
        band: x, low and high of what is drawn around it.
        dash: number of its kind of stroke, 0 for a solid one.
        faint: drawn thin and pale, as the values under a smoothed line.
        beside: by x its other measure: the time of a step, or the step of a time.
        opens: address that a click on a point opens, with `step`; empty for none.
        every: steps that share what is opened: those of a round.
    """

    name: str
    points: Sequence[Point]
    colour: int = 0
    band: Sequence[tuple[float, float, float]] = ()
    dash: int = 0
    faint: bool = False
    beside: Mapping[float, float] = field(default_factory=dict)
    opens: str = ""
    every: int = 1


@dataclass(frozen=True, slots=True)
class Tick:
    """An event on the x axis: drawn as a thin line with a letter; `text` is said when it is pointed at."""

    x: float
    letter: str
    text: str
    colour: str = "var(--muted)"


def series_colour(number: int) -> str:
    """Returns the palette's colour of a series in CSS, for the theme that is on."""
    return f"var(--series-{number % len(SERIES_LIGHT)})"


def line_options(
    title: str,
    lines: Sequence[Line],
    *,
    about: str = "",
    x_name: str = "step",
    log: bool = False,
    ticks: Sequence[Tick] = (),
    extent: tuple[float, float] | None = None,
    zoom: tuple[float, float] | None = None,
    area: bool = False,
    legend: bool = True,
) -> dict[str, Any]:
    """Returns the options of a line chart, the first line on top. `area` stacks the lines as areas; `extent` is the x
    axis (by default from the first point to the last), `zoom` the part of it in view; without `legend` the page has
    one for all charts."""
    series: list[dict[str, Any]] = []
    for number, line in enumerate(lines):
        series.append(_curve(line, log, area))
        beside = "hours of training" if x_name == "step" else "step"
        series[-1] |= {
            "z": series[-1]["z"] - number / len(lines),
            "dimensions": [x_name, "value", beside, "low", "high"],
        }
        if line.band:
            series.append(_band(line))
    if series:
        series[0]["markLine"] = mark_lines(ticks)
    shown = [line.name for line in lines if not line.faint]
    has_legend = legend and len(set(shown)) > 1
    return {
        "animation": False,
        "title": {
            "text": title,
            "subtext": about,
            "left": 0,
            "top": 0,
            "itemGap": 3,
            "textStyle": {
                "color": "var(--ink)",
                "fontSize": 13,
                "lineHeight": 16,
                "width": 240,  # beside the buttons
                "overflow": "truncate",
            },
            "subtextStyle": {"color": "var(--muted)", "fontSize": 11, "lineHeight": 13},
        },
        "legend": {
            "show": has_legend,
            "data": list(dict.fromkeys(shown)),
            "type": "scroll",
            "top": 36 if about else 22,
            "left": 0,
            "textStyle": _TEXT,
            "icon": "roundRect",
            "itemWidth": 12,
            "itemHeight": 4,
        },
        "grid": {
            "left": 52,
            "right": 12,
            "top": 30 + 16 * bool(about) + 20 * has_legend,
            "bottom": 30,
        },
        "tooltip": {
            **TOOLTIP,
            "trigger": "axis",
            ":formatter": f"(all) => view.tip(all, {json.dumps(x_name)})",
        },
        "xAxis": {
            **axis(),
            "type": "value",
            "min": "dataMin" if extent is None else extent[0],
            "max": "dataMax" if extent is None else extent[1],
            "name": x_name,
            "nameLocation": "middle",
            "nameGap": 16,
            "splitLine": {"show": False},
        },
        "yAxis": {**axis(), "type": "log" if log else "value", "scale": True},
        **zooming(zoom),
        "series": series,
    }


def _curve(line: Line, log: bool, area: bool) -> dict[str, Any]:
    colour = series_colour(line.colour)
    style: dict[str, Any] = {
        "color": colour,
        "width": 1 if line.faint else 2,
        "opacity": 0.3 if line.faint else 1,
    }
    if line.dash:
        style["type"] = DASHES[line.dash % len(DASHES)]
    around = {x: (low, high) for x, low, high in line.band}
    options = {
        "type": "line",
        "name": line.name,
        "encode": {"x": 0, "y": 1},
        "data": [
            [x, None if log and y is not None and y <= 0 else y]
            + ([line.beside.get(x), *around.get(x, ())] if line.beside or line.band else [])
            for x, y in line.points
        ],
        "opens": line.opens,
        "every": line.every,
        "showSymbol": len(line.points) < 40 and not line.faint and not area,
        "symbol": "circle",
        "symbolSize": 5,
        "lineStyle": style,
        "itemStyle": {"color": colour},
        "emphasis": {"disabled": True},
        "tooltip": {"show": not line.faint},
        "z": 2 if line.faint else 3,
    }
    if area:
        options |= {"stack": "all", "areaStyle": {"color": colour, "opacity": 0.7}}
    return options


def _band(line: Line) -> dict[str, Any]:
    return {
        "type": "custom",
        ":renderItem": "view.band",
        "name": line.name,
        "data": list(line.band),
        "encode": {"x": 0, "y": [1, 2]},
        "itemStyle": {"color": series_colour(line.colour), "opacity": 0.18},
        "tooltip": {"show": False},
        "clip": True,
        "silent": True,
        "z": 1,
    }


TOOLTIP: Mapping[str, Any] = {
    "confine": True,
    "backgroundColor": "var(--panel)",
    "borderColor": "var(--line)",
    "textStyle": {"color": "var(--ink)", "fontSize": 12},
    "axisPointer": {"lineStyle": {"color": "var(--muted)"}},
}


def axis() -> dict[str, Any]:
    """Returns the options that every axis has."""
    return {
        "axisLabel": {**_TEXT, "hideOverlap": True, ":formatter": "view.number"},
        "nameTextStyle": _TEXT,
        "axisPointer": {"label": {":formatter": "(one) => view.number(one.value)"}},
        "axisLine": {"lineStyle": {"color": "var(--line)"}},
        "axisTick": {"lineStyle": {"color": "var(--line)"}},
        "splitLine": {"lineStyle": {"color": "var(--line)", "opacity": 0.6}},
    }


def zooming(zoom: tuple[float, float] | None) -> dict[str, Any]:
    """Returns the options that let a chart's x axis be zoomed. Without Ctrl the wheel scrolls the page."""
    inside: dict[str, Any] = {
        "type": "inside",
        "zoomOnMouseWheel": "ctrl",
        "moveOnMouseMove": "shift",
        "moveOnMouseWheel": False,
        "filterMode": "none",
    }
    values = {} if zoom is None else {"startValue": zoom[0], "endValue": zoom[1]}
    # The tool that selects by dragging must be there, though its button is not.
    select = {"dataZoom": {"yAxisIndex": "none", "filterMode": "none"}}
    return {
        "dataZoom": [inside | values],
        "toolbox": {
            "itemSize": 0,
            "showTitle": False,
            "feature": select,
        },
    }


_TOOLS = (
    ("full", "⤢", "full size"),
    ("csv", "csv", "numbers as CSV"),
    ("png", "png", "picture as PNG"),
)


def chart(options: dict[str, Any], label: str, height: int = 240) -> ui.echart:
    """Shows a chart with its buttons; `label` is what a screen reader says. Those of a page share the zoom of their x
    axes, which goes into the address as `from` and `to`: dragging and Ctrl with the wheel zoom, a double click shows
    all."""
    with ui.element("figure").classes("view-figure"):
        shown = ui.echart(options, renderer="svg").classes("view-chart")
        buttons = "".join(
            f'<button data-chart="{what}" title="{title}" aria-label="{title}: {html.escape(label)}">{text}</button>'
            for what, text, title in _TOOLS
        )
        ui.html(buttons, sanitize=False).classes("view-chart-tools")
    shown.style(f"height: {height}px")
    # arrow keys go from point to point
    shown.props["role"], shown.props["tabindex"], shown.props["aria-label"] = "img", "0", label
    shown.on("chart:finished", js_handler=f"() => view.chart({shown.id})")
    shown.on("chart:datazoom", js_handler=f"() => view.zoomed({shown.id})")
    return shown


def remove(shown: ui.echart) -> None:
    """Takes a chart off the page."""
    _figure(shown).delete()


def place(shown: ui.echart, number: int, heading: str) -> None:
    """Puts a chart at a place among the others, with a heading above it, which may be empty."""
    figure = _figure(shown).style(f"order: {number}")
    if figure.props.get("data-heading", "") != heading:
        figure.props["data-heading"] = heading
        figure.update()


def _figure(shown: ui.echart) -> ui.element:
    assert shown.parent_slot is not None
    return shown.parent_slot.parent


def zoom_of(page: Page) -> tuple[float, float] | None:
    """Returns the window that `from` and `to` in the address say."""
    if "from" in page.query and "to" in page.query:
        return page.number("from", 0), page.number("to", 0)
    return None


def refresh(shown: ui.echart, options: dict[str, Any]) -> None:
    """New points for a chart; what the user has zoomed to stays."""
    options.pop("dataZoom", None)
    if options != shown.options:
        shown.options.clear()
        shown.options.update(options)
        shown.update()


def mark_lines(ticks: Sequence[Tick]) -> dict[str, Any]:
    """Returns the `markLine` of the series that bears a chart's events."""
    return {
        "symbol": "none",
        "precision": 12,  # it would round where a mark is to 2 digits
        "silent": False,
        "animation": False,
        "tooltip": {
            "show": True,
            "trigger": "item",
            ":formatter": "(one) => view.escape(one.name)",
        },
        "data": [
            {
                "xAxis": tick.x,
                "name": tick.text,
                "lineStyle": {"color": tick.colour, "type": "dotted", "width": 1},
                "label": {
                    "show": True,
                    "position": "end",
                    "distance": 0,
                    "formatter": tick.letter,
                    **_TEXT,
                },
            }
            for tick in _together(ticks)
        ],
    }


def _together(ticks: Sequence[Tick]) -> list[Tick]:
    """Joins the ticks at the same place."""
    found: dict[float, Tick] = {}
    for tick in ticks:
        before = found.get(tick.x)
        more = (f"{before.letter} ", f"{before.text}; ") if before else ("", "")
        found[tick.x] = Tick(tick.x, more[0] + tick.letter, more[1] + tick.text, tick.colour)
    return list(found.values())
