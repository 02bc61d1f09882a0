"""Charts: ECharts options whose colours are the page's CSS variables, so that a theme changes them without a message;
zoom and pointer that all charts of a page share.

A point of a line leads on: a click on it, or Enter once the arrow keys have reached it, opens its completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nicegui import ui

from swift_r1.lab.report.colours import SERIES_LIGHT
from swift_r1.lab.runs.curves import Curve

Opens = tuple[str, int]
"""The address that a click on a point opens, with `step`; and the steps that share what is opened, those of a round."""
DASHES: Sequence[Any] = ("solid", "dashed", "dotted", [10, 3, 2, 3])
"""The strokes of the metrics of a chart that shows several runs."""
_TEXT = {"color": "var(--muted)", "fontSize": 11, "textBorderWidth": 0}


def series_colour(number: int) -> str:
    """Returns the palette's colour of a series in CSS, for the theme that is on."""
    return f"var(--series-{number % len(SERIES_LIGHT)})"


def line_options(
    title: str,
    curves: Sequence[Curve],
    *,
    faint: Sequence[Curve] = (),
    about: str = "",
    opens: Sequence[Opens] = (),
    last: float | str = "dataMax",
    legend: bool = True,
) -> dict[str, Any]:
    """Returns the options of a line chart, the first line on top.

    Args:
        faint: lines that are drawn thin and pale, as the values under smoothed ones.
        opens: for each group of runs.
        last: the end of the axis of steps, by default the last point.
        legend: False where the page has one for all charts.
    """
    series = [_pale(_curve(line, ())) for line in faint]
    for number, line in enumerate(curves):
        series.append(_curve(line, opens) | {"z": 3 - number / len(curves)})
        if line.band:
            series.append(_band(line))
    names = list(dict.fromkeys(line.label for line in curves))
    has_legend = legend and len(names) > 1
    return {
        "animation": False,
        "title": {
            "text": title,
            "subtext": about,
            "left": 0,
            "top": 0,
            "itemGap": 3,
            "textStyle": {"color": "var(--ink)", "fontSize": 13, "lineHeight": 16},
            "subtextStyle": {"color": "var(--muted)", "fontSize": 11, "lineHeight": 13},
        },
        "legend": {
            "show": has_legend,
            "data": names,
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
            "confine": True,
            "backgroundColor": "var(--panel)",
            "borderColor": "var(--line)",
            "textStyle": {"color": "var(--ink)", "fontSize": 12},
            "axisPointer": {"lineStyle": {"color": "var(--muted)"}},
            "trigger": "axis",
            ":formatter": "view.tip",
        },
        "xAxis": {
            **_AXIS,
            "type": "value",
            "min": 0,
            "max": last,
            "name": "step",
            "nameLocation": "middle",
            "nameGap": 16,
            "splitLine": {"show": False},
        },
        "yAxis": {**_AXIS, "type": "value", "scale": True},
        **_ZOOM,
        "series": series,
    }


_AXIS: dict[str, Any] = {
    "axisLabel": {**_TEXT, "hideOverlap": True, ":formatter": "view.number"},
    "nameTextStyle": _TEXT,
    "axisPointer": {"label": {":formatter": "(one) => view.number(one.value)"}},
    "axisLine": {"lineStyle": {"color": "var(--line)"}},
    "axisTick": {"lineStyle": {"color": "var(--line)"}},
    "splitLine": {"lineStyle": {"color": "var(--line)", "opacity": 0.6}},
}
_ZOOM: dict[str, Any] = {
    "dataZoom": [
        {
            "type": "inside",
            "zoomOnMouseWheel": "ctrl",  # without it the wheel scrolls the page
            "moveOnMouseMove": "shift",
            "moveOnMouseWheel": False,
            "filterMode": "none",
        }
    ],
    # The tool that selects by dragging must be there, though its button is not.
    "toolbox": {
        "itemSize": 0,
        "showTitle": False,
        "feature": {"dataZoom": {"yAxisIndex": "none", "filterMode": "none"}},
    },
}


def _curve(line: Curve, opens: Sequence[Opens]) -> dict[str, Any]:
    colour = series_colour(line.colour)
    address, every = opens[line.group] if opens else ("", 1)
    if address and line.metric.startswith("eval/"):
        address, every = f"{address}&of=eval", 1
    around = {x: (low, high) for x, low, high in line.band}
    return {
        "type": "line",
        "name": line.label,
        "encode": {"x": 0, "y": 1},
        "data": [[x, y, *around.get(x, ())] for x, y in line.points],
        "opens": address,
        "every": every,
        "showSymbol": len(line.points) < 40,
        "symbol": "circle",
        "symbolSize": 5,
        "lineStyle": {
            "color": colour,
            "width": 2,
            "type": DASHES[line.dash % len(DASHES)],
        },
        "itemStyle": {"color": colour},
        "emphasis": {"disabled": True},
        "tooltip": {"show": True},
    }


def _pale(curve: dict[str, Any]) -> dict[str, Any]:
    style = curve["lineStyle"] | {"width": 1, "opacity": 0.3}
    return curve | {"lineStyle": style, "showSymbol": False, "tooltip": {"show": False}, "z": 2}


def _band(line: Curve) -> dict[str, Any]:
    return {
        "type": "custom",
        ":renderItem": "view.band",
        "name": line.label,
        "data": list(line.band),
        "encode": {"x": 0, "y": [1, 2]},
        "itemStyle": {"color": series_colour(line.colour), "opacity": 0.18},
        "tooltip": {"show": False},
        "clip": True,
        "silent": True,
        "z": 1,
    }


def chart(options: dict[str, Any], label: str, height: int = 240) -> ui.echart:
    """Shows a chart; `label` is what a screen reader says. Those of a page share the zoom of their x axes, which goes
    into the address as `from` and `to`: dragging and Ctrl with the wheel zoom, a double click shows all."""
    with ui.element("figure").classes("view-figure"):
        shown = ui.echart(options, renderer="svg").classes("view-chart")
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


def refresh(shown: ui.echart, options: dict[str, Any]) -> None:
    """New points for a chart; what the user has zoomed to stays."""
    options.pop("dataZoom", None)
    if options != shown.options:
        shown.options.clear()
        shown.options.update(options)
        shown.update()
