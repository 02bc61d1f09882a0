"""The spread of rewards and lengths over the steps, how many groups teach something, and why completions fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

from nicegui import ui
from nicegui.client import ClientConnectionTimeout

from swift_r1.lab.report.colours import CLASSES, scale
from swift_r1.lab.report.parts import joined
from swift_r1.lab.runs.completions import CompletionTable
from swift_r1.lab.runs.failures import FAILURES
from swift_r1.lab.runs.heatmap import Heatmap, heatmaps
from swift_r1.lab.view.charts import (
    TOOLTIP,
    Line,
    Point,
    axis,
    chart,
    line_options,
    refresh,
    zoom_of,
)
from swift_r1.lab.view.completion_html import length_column, reward_columns, short
from swift_r1.lab.view.elements import busy_bar, nothing, of_choice, table_of
from swift_r1.lab.view.shell import Page, view_page

_MOST_POINTS = 400
_CONNECTED_S = 10.0
# what is said of a cell: [step's place, row's place, share, row, completions of the step]
_SAY = """({ name, seriesName, value: [, , share, row, all] }) =>
  `step ${name}, ${view.escape(seriesName)} ${row}: ${view.number(100 * share)} % of ${all}`"""
# pixels of a heat map: around its rows, and of each
_FRAME = 122
_ROW = 14
_SHARE = 10  # charts of a run that grows are made again after so many times what they took


@view_page("/distributions", "Distributions", go="d", compares=True)
async def distributions(page: Page) -> None:
    of_choice(page)
    tables = [await table_of(page, run=run) for run in page.chosen]
    steps = [await asyncio.to_thread(table.steps) for table in tables]
    state = [table.state for table in tables]
    if not any(steps):
        ui.label(nothing(page, "completions")).classes("said")
        page.follow(partial(_begun, tables))
        return
    with suppress(ClientConnectionTimeout):  # each chart is shown as soon as it is made
        await ui.context.client.connected(_CONNECTED_S)
    began = time.monotonic()
    shown: dict[str, list[ui.echart]] = {}
    place = _row() if len(tables) == 1 else None
    busy = busy_bar()
    busy.set_visibility(True)
    for title, make in _charts(page, tables).items():
        options = await asyncio.to_thread(make)
        if options:
            with place or _row():
                shown[title] = [_chart(page, title, *one) for one in enumerate(options)]
    busy.set_visibility(False)
    after = time.monotonic()
    pause = _SHARE * (after - began)

    async def grown() -> None:
        nonlocal after, state
        if time.monotonic() < after + pause:
            return
        for table in tables:
            await asyncio.to_thread(table.refresh)
        now = [table.state for table in tables]
        if now == state:
            return
        state = now
        for title, make in _charts(page, tables).items():
            options = await asyncio.to_thread(make)
            for own, one in zip(shown.get(title, ()), options, strict=False):
                refresh(own, one)
        after = time.monotonic()

    page.follow(grown)


def _row() -> ui.element:
    return ui.element("div").classes("view-charts side-by-side")


def _chart(page: Page, title: str, number: int, options: dict[str, Any]) -> ui.echart:
    """Shows a chart of a run; one of several runs has its name."""
    name = page.names[page.chosen[number].name]
    if len(page.chosen) > 1:
        options["title"]["subtext"] = name
        title = f"{title} ({name})"
    rows = options["yAxis"].get("data")
    return chart(options, title, height=240 if rows is None else _FRAME + _ROW * len(rows))


async def _begun(tables: Sequence[CompletionTable]) -> None:
    for table in tables:
        await asyncio.to_thread(table.refresh)
        if await asyncio.to_thread(table.steps):
            ui.navigate.reload()


def _charts(
    page: Page, tables: Sequence[CompletionTable]
) -> dict[str, Callable[[], list[dict[str, Any]]]]:
    """Returns what makes a chart's options for each run (none if there is nothing to show), by its label."""
    zoom = zoom_of(page)

    def areas(title: str, lines: list[Line]) -> dict[str, Any]:
        options = line_options(title, lines, about=" ", area=True, zoom=zoom)
        options["yAxis"] |= {"min": 0, "max": 1, "scale": False}
        return options

    def groups() -> list[dict[str, Any]]:
        names = {"all right": "right", "mixed: these teach": "mixed", "all wrong": "wrong"}
        return [areas("share of groups", shares(table.group_shares(), names)) for table in tables]

    def failures() -> list[dict[str, Any]]:
        names = {name: name for name in FAILURES}
        return [
            areas("share of completions", shares(of_all(table.failure_classes()), names))
            for table in tables
        ]

    def heat(column: str) -> list[dict[str, Any]]:
        found = heatmaps(tables, column)
        most = max(map(largest_share, found))
        return [heat_options(short(column), one, most) for one in found] if most else []

    charts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "groups: share that is all right, mixed (these teach) or all wrong": groups,
        "completions: share that is right, and of each way to fail": failures,
    }
    known = dict.fromkeys(chain.from_iterable(table.columns for table in tables))
    for column in ("reward", length_column(known), *reward_columns(known)):
        charts[f"heat map of {column} over the steps"] = partial(heat, column)
    return charts


def of_all(counts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Counts of classes by step as shares of the step's completions."""
    found = []
    for row in counts:
        total = sum(row[name] for name in FAILURES) or 1
        found.append({"step": row["step"]} | {name: row[name] / total for name in FAILURES})
    return found


def shares(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[Line]:
    """Returns a line for each title of `names`, of the column that it is for, unless that is 0 throughout; where there
    are very many steps each point is the mean of some."""
    parts = joined(rows, _MOST_POINTS)

    def points(column: str) -> list[Point]:
        return [
            (float(part[0]["step"]), sum(row[column] for row in part) / len(part)) for part in parts
        ]

    return [
        Line(title, points(column), colour=CLASSES[column])
        for title, column in names.items()
        if any(row[column] for row in rows)
    ]


def largest_share(heat: Heatmap) -> float:
    """Returns the largest share of a step's completions that has one value; 0 without any."""
    return max((max(counts) / sum(counts) for counts in heat.counts), default=0.0)


def heat_options(title: str, heat: Heatmap, most: float) -> dict[str, Any]:
    """ECharts options of a heat map; a cell's colour is its share of the step's completions, up to `most`."""
    labels = [
        f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}" for low, high in heat.rows
    ]
    cells = [
        [place, row, round(count / sum(counts), 4), labels[row], sum(counts)]
        for place, counts in enumerate(heat.counts)
        for row, count in enumerate(counts)
        if count
    ]
    plain = axis() | {
        "type": "category",
        "axisLabel": {
            "color": "var(--muted)",
            "fontSize": 11,
            "hideOverlap": True,
        },
    }
    text = {"color": "var(--muted)", "fontSize": 11}
    return {
        "animation": False,
        "title": {
            "text": title,
            "left": 0,
            "top": 0,
            "textStyle": {"color": "var(--ink)", "fontSize": 13, "lineHeight": 16},
            "subtextStyle": {"color": "var(--muted)", "fontSize": 11, "lineHeight": 13},
            "itemGap": 3,
        },
        "grid": {"left": 76, "right": 12, "top": 40, "bottom": 72},
        "tooltip": {**TOOLTIP, "trigger": "item", ":formatter": _SAY},
        "xAxis": {
            **plain,
            "data": heat.steps,
            "name": "step",
            "nameGap": 24,
            "nameLocation": "middle",
        },
        "yAxis": {**plain, "data": labels},
        "visualMap": {
            **{
                "min": 0,
                "max": most,
                "dimension": 2,
                "calculable": False,
                "orient": "horizontal",
                "left": "center",
                "bottom": 0,
            },
            **{
                "itemHeight": 120,
                "itemWidth": 12,
                "precision": 2,
                "textStyle": text,
                "text": [f"{100 * most:.0f} %", "0 %"],
            },
            "inRange": {"color": list(scale())},
        },
        "series": [
            {
                "type": "heatmap",
                "name": title,
                "data": cells,
                "progressive": 0,
            }
        ],
    }
