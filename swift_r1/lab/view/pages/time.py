"""Who did what when: a lane for each process, server and pool of workers; what the time went into, step by step, and
how much of it was waited."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from nicegui import ui
from nicegui.events import GenericEventArguments

from swift_r1.lab.report.parts import joined
from swift_r1.lab.runs.span_lanes import SpanBlock
from swift_r1.lab.runs.timeline import Timeline
from swift_r1.lab.view import charts
from swift_r1.lab.view.event_ticks import legend, ticks
from swift_r1.lab.view.markup import markup
from swift_r1.lab.view.shell import Page, in_order, opened, view_page
from swift_r1.record.folder import RunFolder

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
_MOST_COMPARED = 3  # runs, one below the other
_LANE = 26  # pixels
_STEPS = 2000  # the last ones, that are looked at
_BARS = 100  # at most
_SLOWEST = 8
_ARROWS = 120  # blocks in view, from which on no arrows are drawn
# Each item is [start, end, lane, step, number of spans].
_DRAW = """(params, api) => {
  const from = api.coord([api.value(0), api.value(2)]), to = api.coord([api.value(1), api.value(2)]);
  const { x, width } = params.coordSys, height = Math.min(18, api.size([0, 1])[1] * 0.8);
  const left = Math.max(from[0], x), right = Math.min(Math.max(to[0], from[0] + 0.7), x + width);
  const shape = { x: left, y: from[1] - height / 2, width: right - left, height };
  const rect = { type: "rect", shape, style: api.style(), emphasisDisabled: true };
  return right > left ? rect : null;
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


@view_page("/time", "Time", go="t", compares=True)
async def time_page(page: Page) -> None:
    for run in page.chosen[:_MOST_COMPARED]:
        if len(page.chosen) > 1:
            ui.label(page.names[run.name]).classes("view-run-name").props(
                'role="heading" aria-level="2"'
            )
        await _TimeOfRun(page, run).build()
    legend()


class _TimeOfRun:
    """What the page shows of one run; times are seconds since the run's first sign."""

    def __init__(self, page: Page, run: RunFolder) -> None:
        self.page = page
        self.run = run
        self.timeline = opened(Timeline, run.path)
        self.window = charts.zoom_of(page)
        self.seen: object = None
        self.chart: ui.echart | None = None
        self.bars: ui.echart | None = None

    async def build(self) -> None:
        with ui.element("div").classes("view-row") as self.buttons:
            self.idle = ui.label().classes("view-idle")
            self.about = ui.label()
        self.place = ui.element("div").classes("view-scroll")
        with ui.element("div").classes("view-columns"):
            self.steps = ui.element("div")
            self.tables = ui.html("", sanitize=False).classes("view-scroll")
        await self._look()
        self.page.follow(self._look)

    async def _look(self) -> None:
        """Shows what is new."""
        await in_order(self.timeline.refresh)
        self.page.problems(
            self.timeline,
            [f"{self.page.names[self.run.name]}: {line}" for line in self.timeline.problems],
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
            live = RunFolder(self.run.path, self.run.name).status == "running"
            self.about.text = (
                "No times yet: the first appear with step 1."
                if live
                else "This run recorded no times."
            )
            return
        first = extent[0]
        start, end = (first + one for one in self.window) if self.window else extent
        blocks, spent = await in_order(_read, self.timeline, start, end)
        began = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(first))
        self.about.text = f"from {began}; drag to zoom in"
        if spent.lanes:
            name, seconds = next(iter(spent.lanes.items()))
            self.idle.text = f"{name} was idle for {100 * _idle(seconds, end - start):.1f} %"
        options = gantt(self.timeline, blocks)
        options["series"][0]["markLine"] = charts.mark_lines(
            ticks(self.timeline.marks, lambda mark: mark.time - first)
        )
        self.tables.content = _lanes_table(spent, end - start) + _slowest_table(
            spent, first, self.page
        )
        self._draw_steps(spent)
        if self.chart is not None:
            charts.refresh(self.chart, options)
            return
        with self.place:
            height = 80 + _LANE * len(self.timeline.lanes)
            self.chart = charts.chart(
                options | charts.zooming(charts.zoom_of(self.page)),
                f"what each lane of {self.page.names[self.run.name]} did",
                height,
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

    def _draw_steps(self, spent: _Spent) -> None:
        """Shows the parts of each step, one upon the other."""
        if not spent.steps:
            return
        options = bars(spent)
        if self.bars is not None:
            charts.refresh(self.bars, options)
            return
        with self.steps:
            name = self.page.names[self.run.name]
            self.bars = charts.chart(options, f"seconds of each step of {name}")


@dataclass(frozen=True, slots=True)
class _Spent:
    """Seconds in a window: of each lane by name, and of the first lane by step and name; and when its steps began and
    ended."""

    lanes: Mapping[str, Mapping[str, float]]
    steps: Mapping[int, Mapping[str, float]]
    times: Mapping[int, tuple[float, float]]


def _read(timeline: Timeline, start: float, end: float) -> tuple[list[SpanBlock], _Spent]:
    """Reads what to draw, and what the time went into."""
    lanes = timeline.lanes
    totals = {lane: timeline.totals(lane, start, end) for lane in lanes}
    steps = timeline.seconds(lanes[0], start, end, _STEPS) if lanes else {}
    times: dict[int, tuple[float, float]] = {}
    for span in timeline.spans(lanes[0], start, end) if lanes else ():
        if span.step in steps:
            known = times.get(span.step, (span.start, span.end))
            times[span.step] = (min(known[0], span.start), max(known[1], span.end))
    return timeline.blocks(start, end), _Spent(totals, dict(sorted(steps.items())), times)


def _idle(seconds: Mapping[str, float], whole: float) -> float:
    """Returns the share of a time in which a lane did nothing but wait."""
    busy = sum(value for name, value in seconds.items() if name != "wait")
    return max(0.0, 1 - busy / (whole or 1))


def _names(rows: Iterable[Mapping[str, float]]) -> list[str]:
    present = {name for seconds in rows for name in seconds}
    return [*(name for name in _COLOURS if name in present), *sorted(present - _COLOURS.keys())]


def _lanes_table(spent: _Spent, whole: float) -> str:
    """Returns as HTML the share of each name in each lane's time, and of idleness."""
    names = _names(spent.lanes.values())
    lines = []
    for lane, seconds in spent.lanes.items():
        shares = [
            f"{100 * seconds[name] / (whole or 1):.1f}" if name in seconds else "" for name in names
        ]
        lines.append([lane, f"{100 * _idle(seconds, whole):.1f}", *shares])
    title = f"Share of each lane's time, in %, of the {whole:,.1f} s shown"
    return _table(title, ["lane", "idle", *names], lines)


def _slowest_table(spent: _Spent, first: float, page: Page) -> str:
    """Returns as HTML the slowest steps, the slowest first, each with what took more than in the median step, and a way
    to its time."""
    taken = {step: sum(seconds.values()) for step, seconds in spent.steps.items() if step}
    if not taken:
        return ""
    usual = {
        name: median(seconds.get(name, 0.0) for seconds in spent.steps.values())
        for name in _names(spent.steps.values())
    }
    lines = []
    for step in sorted(taken, key=lambda step: -taken[step])[:_SLOWEST]:
        more = {name: spent.steps[step].get(name, 0.0) - usual[name] for name in usual}
        most = max(more, key=lambda name: more[name])
        start, end = (round(one - first, 3) for one in spent.times[step])
        href = markup(page.link("/time", **{"from": start, "to": end}))
        lines.append(
            [f'<a href="{href}">{step}</a>', f"{taken[step]:.2f}", f"{most} {more[most]:+.2f} s"]
        )
    title = f"Slowest steps, of {median(taken.values()):.2f} s in the median"
    return _table(title, ["step", "seconds", "beyond the median"], lines, is_html=True)


def _table(
    title: str, heads: Sequence[str], lines: Sequence[Sequence[str]], is_html: bool = False
) -> str:
    shown = "".join(f"<th>{markup(head)}</th>" for head in heads)
    for first, *numbers in lines:
        cells = "".join(f'<td class="number">{markup(cell)}</td>' for cell in numbers)
        shown += f"<tr><td>{first if is_html else markup(first)}</td>{cells}</tr>"
    return f'<table class="view-table"><caption style="text-align: left">{markup(title)}</caption>{shown}</table>'


def bars(spent: _Spent) -> dict[str, Any]:
    """Returns ECharts options of the parts of each step, one upon the other; where there are very many steps each bar
    is the mean of some."""
    rows = joined([one for one in spent.steps.items() if one[0]], _BARS)
    plain = charts.axis()
    del plain["axisLabel"][":formatter"]
    series = [
        {
            "type": "bar",
            "stack": "step",
            "name": name,
            "dimensions": ["step", "seconds"],
            "data": [
                [str(part[0][0]), sum(seconds.get(name, 0.0) for _, seconds in part) / len(part)]
                for part in rows
            ],
            "itemStyle": {"color": _COLOURS.get(name, _OTHER)},
            "emphasis": {"disabled": True},
        }
        for name in _names(spent.steps.values())
    ]
    return {
        "animation": False,
        "title": {
            "text": "Seconds of each step",
            "left": 0,
            "top": 0,
            "textStyle": {"color": "var(--ink)", "fontSize": 13},
        },
        "grid": {"left": 52, "right": 12, "top": 34, "bottom": 40},
        "tooltip": {
            **charts.TOOLTIP,
            "trigger": "axis",
            ":formatter": "(all) => view.tip(all, 'step')",
        },
        "xAxis": {
            **plain,
            "type": "category",
            "name": "step",
            "nameLocation": "middle",
            "nameGap": 18,
        },
        "yAxis": {**charts.axis(), "type": "value"},
        "series": series,
    }


def arrows(blocks: Sequence[SpanBlock]) -> list[tuple[SpanBlock, float, SpanBlock, float]]:
    """Returns the arrows between lanes, each with the block and the time that it leaves, and those that it reaches:
    from who asked for completions to the server and back, and from a push of weights to the server that gets them.
    None where blocks stand for many spans, or are many."""
    if len(blocks) > _ARROWS:
        return []
    found = []
    for asked in blocks:
        is_request = asked.name == "generate"
        if asked.lane.startswith("server") or asked.name not in ("generate", "sync"):
            continue
        answers: dict[str, list[SpanBlock]] = {}
        for one in blocks:
            overlaps = one.start < asked.end and one.end > asked.start
            is_weights = one.lane.endswith("-weights")
            if one.lane.startswith("server") and overlaps and is_weights != is_request:
                answers.setdefault(one.lane, []).append(one)
        for those in answers.values():
            found.append((asked, asked.start, those[0], max(asked.start, those[0].start)))
            if is_request:
                last = those[-1]
                found.append((last, min(asked.end, last.end), asked, asked.end))
    return found


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
            "emphasis": {"disabled": True},
            "dimensions": ["start", "end", "lane", "step", "spans"],
            "clip": True,
            "z": 2,
        }
    drawn = [
        {
            "coords": [
                [round(left - first, 6), places[one.lane]],
                [round(at - first, 6), places[other.lane]],
            ]
        }
        for one, left, other, at in arrows(blocks)
    ]
    series["arrows"] = {
        "type": "lines",
        "coordinateSystem": "cartesian2d",
        "name": "arrows",
        "data": drawn,
        "symbol": ["none", "arrow"],
        "symbolSize": 7,
        "lineStyle": {"color": "var(--ink)", "width": 1, "opacity": 0.8},
        "silent": True,
        "tooltip": {"show": False},
        "clip": True,
        "z": 5,
    }
    x = charts.axis()
    x["axisLabel"] |= {":formatter": _CLOCK}
    y = charts.axis()
    del y["axisLabel"][":formatter"]
    shown = [name for name, one in series.items() if one["data"] and name != "arrows"]
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
