"""The spread of rewards and lengths over the steps, how many groups teach something, and why completions fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from nicegui import ui
from nicegui.client import ClientConnectionTimeout

from swift_r1.lab.report.colours import scale
from swift_r1.lab.report.parts import joined
from swift_r1.lab.runs.completions import CompletionTable, Heatmap
from swift_r1.lab.runs.failures import FAILURES
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
from swift_r1.lab.view.completion_html import length_column, reward_columns
from swift_r1.lab.view.elements import of_choice, table_of
from swift_r1.lab.view.shell import Page, view_page

_MOST_POINTS = 400
_CONNECTED_S = 10.0
_SHARE = 10  # charts of a run that grows are made again after so many times what they took


@view_page("/distributions", "Distributions", go="d")
async def distributions(page: Page) -> None:
    table = await table_of(page)
    of_choice(page)
    steps = await asyncio.to_thread(table.steps)
    state = table.state
    if not steps:
        ui.label("no completions yet").classes("said")
        page.follow(partial(_begun, table))
        return
    with suppress(ClientConnectionTimeout):  # each chart is shown as soon as it is made
        await ui.context.client.connected(_CONNECTED_S)
    began = time.monotonic()
    shown = {}
    for title, make in _charts(page, table).items():
        options = await asyncio.to_thread(make)
        if options:
            shown[title] = chart(options, title, height=280 if "heat" in title else 240)
    after = time.monotonic()
    pause = _SHARE * (after - began)

    async def grown() -> None:
        nonlocal after, state
        if time.monotonic() < after + pause:
            return
        await asyncio.to_thread(table.refresh)
        if table.state == state:
            return
        state = table.state
        for title, make in _charts(page, table).items():
            if title in shown and (options := await asyncio.to_thread(make)):
                refresh(shown[title], options)
        after = time.monotonic()

    page.follow(grown)


async def _begun(table: CompletionTable) -> None:
    await asyncio.to_thread(table.refresh)
    if await asyncio.to_thread(table.steps):
        ui.navigate.reload()


def _charts(page: Page, table: CompletionTable) -> dict[str, Callable[[], dict[str, Any] | None]]:
    """Returns what makes a chart's options (None if there is nothing to show), by its label."""
    zoom = zoom_of(page)

    def areas(title: str, lines: list[Line]) -> dict[str, Any]:
        options = line_options(title, lines, area=True, zoom=zoom)
        options["yAxis"] |= {"min": 0, "max": 1, "scale": False}
        return options

    def groups() -> dict[str, Any]:
        names = {"all right": "right", "mixed": "mixed", "all wrong": "wrong"}
        return areas("share of groups", shares(table.group_shares(), names))

    def failures() -> dict[str, Any]:
        return areas(
            "share of completions",
            shares(of_all(table.failure_classes()), {name: name for name in FAILURES}),
        )

    def heat(column: str) -> dict[str, Any] | None:
        found = table.heatmap(column)
        return heat_options(column, found) if found.steps else None

    charts: dict[str, Callable[[], dict[str, Any] | None]] = {
        "groups: share that is all right, mixed (these teach) or all wrong": groups,
        "completions: share that is right, and of each way to fail": failures,
    }
    known = table.columns
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
    """Returns a line for each title of `names`, of the column that it is for; where there are very many steps each
    point is the mean of some."""
    parts = joined(rows, _MOST_POINTS)

    def points(column: str) -> list[Point]:
        return [
            (float(part[0]["step"]), sum(row[column] for row in part) / len(part)) for part in parts
        ]

    return [
        Line(title, points(column), colour=number)
        for number, (title, column) in enumerate(names.items())
    ]


def heat_options(title: str, heat: Heatmap) -> dict[str, Any]:
    """ECharts options of a heat map; a cell's colour is its share of the step's completions."""
    middles = [
        f"{(low + high) / 2:.4g}" for low, high in zip(heat.edges, heat.edges[1:], strict=False)
    ]
    cells = [
        [place, bin_, round(count / sum(counts), 4)]
        for place, counts in enumerate(heat.counts)
        for bin_, count in enumerate(counts)
        if count
    ]
    most = max((share for *_, share in cells), default=1.0)
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
            "textStyle": {"color": "var(--ink)", "fontSize": 13},
        },
        "grid": {"left": 60, "right": 12, "top": 30, "bottom": 60},
        "tooltip": {**TOOLTIP, "trigger": "item"},
        "xAxis": {
            **plain,
            "data": heat.steps,
            "name": "step",
            "nameGap": 16,
            "nameLocation": "middle",
        },
        "yAxis": {**plain, "data": middles},
        "visualMap": {
            **{
                "min": 0,
                "max": most,
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
                "text": [f"{most:.0%}", "0 %"],
            },
            "inRange": {"color": list(scale())},
        },
        "series": [
            {
                "type": "heatmap",
                "name": "share of the step",
                "data": cells,
                "progressive": 0,
            }
        ],
    }
