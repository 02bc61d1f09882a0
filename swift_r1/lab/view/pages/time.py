"""Who did what when: a lane for each process, server and pool of workers; what the time went into."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from nicegui import ui
from nicegui.events import GenericEventArguments

from swift_r1.lab.runs.span_lanes import SpanBlock
from swift_r1.lab.runs.timeline import Timeline
from swift_r1.lab.view import charts
from swift_r1.lab.view.event_ticks import ticks
from swift_r1.lab.view.markup import markup
from swift_r1.lab.view.shell import Page, in_order, opened, view_page

_COLOURS = {
    "generate": "var(--series-0)",
    "train": "var(--series-1)",
    "sync": "var(--series-2)",
    "reward": "var(--series-3)",
    "save": "var(--series-4)",
    "evaluate": "var(--series-5)",
    "wait": "var(--line)",
}
_OTHER = "var(--muted)"
_LANE = 26  # pixels
_STEPS = 30  # in the table
# Each item is [start, end, lane, step, number of spans].
_DRAW = """(params, api) => {
  const from = api.coord([api.value(0), api.value(2)]), to = api.coord([api.value(1), api.value(2)]);
  const { x, width } = params.coordSys, height = Math.min(18, api.size([0, 1])[1] * 0.8);
  const left = Math.max(from[0], x), right = Math.min(Math.max(to[0], from[0] + 0.7), x + width);
  const shape = { x: left, y: from[1] - height / 2, width: right - left, height };
  return right > left ? { type: "rect", shape, style: api.style() } : null;
}"""
_CLOCK = """(value) => {
  const whole = Math.floor(value), two = (number) => String(number).padStart(2, "0"), rest = value - whole;
  const short = `${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
  const clock = whole >= 3600 ? `${Math.floor(whole / 3600)}:${short}` : short;
  return rest > 1e-4 ? clock + rest.toFixed(3).slice(1).replace(/0+$/, "") : clock;
}"""
_SAY = """(one) => {
  const [start, end, , step, count] = one.value;
  const many = count > 1 ? `, mostly, in ${count} spans` : "";
  return `${view.escape(one.seriesName)}${many}<br>${view.number(end - start)} s, step ${step}`;
}"""
_WINDOW = """() => {
  const zoom = getElement(%d).chart.getOption().dataZoom[0];
  emit(zoom.start <= 0 && zoom.end >= 100 ? [] : [zoom.startValue, zoom.endValue]);
}"""
# The window moves by a share of its width, and its width is multiplied.
_MOVE = """() => {
  const chart = getElement(%d).chart, { start, end } = chart.getOption().dataZoom[0], width = end - start;
  const wide = Math.min(100, width * %g), middle = (start + end) / 2 + width * %g;
  const from = Math.max(0, Math.min(100 - wide, middle - wide / 2));
  chart.dispatchAction({ type: "dataZoom", start: from, end: from + wide });
}"""
_MOVES = {
    "◀": ("h ArrowLeft", "earlier", 1, -0.5),
    "▶": ("l ArrowRight", "later", 1, 0.5),
    "+": ("+ =", "zoom in", 0.5, 0),
    "−": ("-", "zoom out", 2, 0),
    "all": ("0", "all of the time", 1e9, 0),
}


@view_page("/time", "Time", go="t")
async def time_page(page: Page) -> None:
    await _TimePage(page).build()


class _TimePage:
    """What it shows of one run; times are seconds since the run's first sign."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.timeline = opened(Timeline, page.run.path)
        self.window = charts.zoom_of(page)
        self.seen: object = None
        self.chart: ui.echart | None = None

    async def build(self) -> None:
        with ui.element("div").classes("view-row") as self.buttons:
            self.about = ui.label()
        self.place = ui.element("div").classes("view-scroll")
        self.lanes, self.steps = (
            ui.html("", sanitize=False).classes("view-scroll") for _ in range(2)
        )
        await self._look()
        self.page.follow(self._look)

    async def _look(self) -> None:
        """Shows what is new."""
        await in_order(self.timeline.refresh)
        self.page.problems(
            self.timeline, [f"{self.page.run.name}: {line}" for line in self.timeline.problems]
        )
        seen = (self.timeline.extent, len(self.timeline.marks))
        if seen != self.seen:
            self.seen = seen
            await self._draw()

    async def _zoomed(self, event: GenericEventArguments) -> None:
        """Shows more of a smaller window, which the address has already."""
        self.window = (float(event.args[0]), float(event.args[1])) if len(event.args) == 2 else None
        await self._draw()

    async def _draw(self) -> None:
        extent = self.timeline.extent
        if extent is None:
            self.about.text = "nothing was timed yet"
            return
        first = extent[0]
        start, end = (first + one for one in self.window) if self.window else extent
        blocks, *tables = await in_order(_read, self.timeline, start, end)
        began = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(first))
        self.about.text = f"from {began}; drag to zoom in"
        options = gantt(self.timeline, blocks)
        options["series"][0]["markLine"] = charts.mark_lines(
            ticks(self.timeline.marks, lambda mark: mark.time - first)
        )
        for shown, content in zip((self.lanes, self.steps), tables, strict=True):
            shown.content = content
        if self.chart is not None:
            charts.refresh(self.chart, options)
            return
        with self.place:
            height = 80 + _LANE * len(self.timeline.lanes)
            self.chart = charts.chart(
                options | charts.zooming(charts.zoom_of(self.page)), "what each lane did", height
            )
        self.chart.on(
            "chart:datazoom", self._zoomed, js_handler=_WINDOW % self.chart.id, throttle=0.3
        )
        with self.buttons:
            for text, (keys, title, scale, shift) in _MOVES.items():
                button = ui.button(text).props(
                    f'flat dense no-caps data-key="{keys}" title="{title}"'
                )
                button.on("click", js_handler=_MOVE % (self.chart.id, scale, shift))


def _read(timeline: Timeline, start: float, end: float) -> tuple[list[SpanBlock], str, str]:
    """Reads what to draw, and the tables."""
    lanes = timeline.lanes
    totals = {lane: timeline.totals(lane, start, end) for lane in lanes}
    by_step = timeline.seconds(lanes[0], start, end, _STEPS) if lanes else {}
    steps = {str(step): seconds for step, seconds in sorted(by_step.items())}
    taken = {step: sum(seconds.values()) for step, seconds in steps.items()}
    of_lanes = _table(
        "lane",
        totals,
        dict.fromkeys(lanes, end - start),
        "what each lane did, in % of the time shown",
    )
    title = f"{''.join(lanes[:1])}: share of each step in % (last {_STEPS} steps)"
    return timeline.blocks(start, end), of_lanes, _table("step", steps, taken, title)


def _table(
    what: str,
    rows: Mapping[str, Mapping[str, float]],
    whole: Mapping[str, float],
    title: str,
) -> str:
    """Shares as HTML: a row per key, a column per name, and the seconds that are the whole."""
    present = {name for seconds in rows.values() for name in seconds}
    names = [*(name for name in _COLOURS if name in present), *sorted(present - _COLOURS.keys())]
    lines = ["".join(f"<th>{markup(name)}</th>" for name in (what, *names, "seconds"))]
    for key, seconds in rows.items():
        shares = [
            f"{100 * seconds[name] / (whole[key] or 1):.1f}" if name in seconds else ""
            for name in names
        ]
        numbers = "".join(
            f'<td class="number">{cell}</td>' for cell in (*shares, f"{whole[key]:.2f}")
        )
        lines.append(f"<td>{markup(key)}</td>{numbers}")
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<table class="view-table"><caption style="text-align: left">{markup(title)}</caption>{body}</table>'


def gantt(timeline: Timeline, blocks: Sequence[SpanBlock]) -> dict[str, Any]:
    """ECharts options of rectangles in lanes, a series per name, so that the legend hides and shows it; also of those
    that no block has, since with other series a chart loses its zoom."""
    lanes, (first, last) = timeline.lanes, timeline.extent or (0.0, 0.0)
    places = {lane: place for place, lane in enumerate(reversed(lanes))}
    series: dict[str, dict[str, Any]] = {}
    for name in [*_COLOURS, *(one for one in timeline.names if one not in _COLOURS)]:
        items = [
            [
                round(one.start - first, 6),
                round(one.end - first, 6),
                places[one.lane],
                one.step,
                one.count,
            ]
            for one in blocks
            if one.name == name
        ]
        series[name] = {
            "type": "custom",
            ":renderItem": _DRAW,
            "name": name,
            "data": items,
            "encode": {"x": [0, 1], "y": 2},
            "itemStyle": {"color": _COLOURS.get(name, _OTHER)},
            "clip": True,
            "z": 2,
        }
    x = charts.axis()
    x["axisLabel"] |= {":formatter": _CLOCK}
    y = charts.axis()
    del y["axisLabel"][":formatter"]
    shown = [name for name, one in series.items() if one["data"]]
    legend = {
        "data": shown,
        "type": "scroll",
        "top": 0,
        "left": 0,
        "itemWidth": 12,
        "itemHeight": 8,
    }
    return {
        "animation": False,
        "legend": legend
        | {"icon": "roundRect", "textStyle": {"color": "var(--muted)", "fontSize": 11}},
        "grid": {"left": 110, "right": 12, "top": 44, "bottom": 30},
        "tooltip": {**charts.TOOLTIP, "trigger": "item", ":formatter": _SAY},
        "xAxis": {
            **x,
            "type": "value",
            "min": 0,
            "max": round(last - first, 6) or 1,
            "splitLine": {"show": False},
        },
        "yAxis": {**y, "type": "category", "data": list(lanes)[::-1]},
        "series": list(series.values()),
    }
