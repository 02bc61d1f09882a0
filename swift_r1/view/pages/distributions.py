"""How rewards and lengths are spread over the steps, how many groups teach something, and why completions fail."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nicegui import ui

from swift_r1.report.colours import scale
from swift_r1.runs.completions import CompletionTable, Heatmap
from swift_r1.runs.failures import FAILURES
from swift_r1.view.charts import TOOLTIP, Line, Point, axis, chart, line_options, refresh, zoom_of
from swift_r1.view.completion_html import length_column, reward_columns
from swift_r1.view.elements import of_choice, table_of
from swift_r1.view.shell import Page, view_page

_MOST_POINTS = 400
_GROUPS = ("right", "mixed", "wrong")


@view_page("/distributions", "Distributions", go="d")
def distributions(page: Page) -> None:
    table = table_of(page)
    of_choice(page)
    if not table.steps():
        ui.label("no completions yet").classes("said")
        return
    shown = {
        title: chart(options, title, height=280 if "heat" in title else 240)
        for title, options in _options(page, table).items()
    }

    def grown() -> None:
        if table.refresh():
            for title, options in _options(page, table).items():
                if title in shown:
                    refresh(shown[title], options)

    page.follow(grown)


def _options(page: Page, table: CompletionTable) -> dict[str, dict[str, Any]]:
    """A chart's options by its label."""
    zoom = zoom_of(page)
    groups = {f"all {name}" if name != "mixed" else name: name for name in _GROUPS}
    options = {
        "groups: share that is all right, mixed (these teach) or all wrong": line_options(
            "share of groups", shares(table.group_shares(), groups), area=True, zoom=zoom
        ),
        "completions: share that is right, and of each way to fail": line_options(
            "share of completions",
            shares(of_all(table.failure_classes()), {name: name for name in FAILURES}),
            area=True,
            zoom=zoom,
        ),
    }
    for one in options.values():
        one["yAxis"] |= {"min": 0, "max": 1, "scale": False}
    known = table.columns
    for column in ("reward", length_column(known), *reward_columns(known)):
        if (heat := table.heatmap(column)).steps:
            options[f"heat map of {column} over the steps"] = heat_options(column, heat)
    return options


def of_all(counts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Counts of classes by step as shares of the step's completions."""
    found = []
    for row in counts:
        total = sum(row[name] for name in FAILURES) or 1
        found.append({"step": row["step"]} | {name: row[name] / total for name in FAILURES})
    return found


def shares(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[Line]:
    """A line for each title of `names`, of the column that it is for; where there are very many steps each point is the
    mean of some."""
    each = math.ceil(len(rows) / _MOST_POINTS) or 1
    parts = [rows[first : first + each] for first in range(0, len(rows), each)]

    def points(column: str) -> list[Point]:
        return [(float(part[0]["step"]), sum(row[column] for row in part) / len(part)) for part in parts]

    return [Line(title, points(column), colour=number) for number, (title, column) in enumerate(names.items())]


def heat_options(title: str, heat: Heatmap) -> dict[str, Any]:
    """ECharts options of a heat map; a cell's colour is its share of the step's completions."""
    middles = [f"{(low + high) / 2:.4g}" for low, high in zip(heat.edges, heat.edges[1:], strict=False)]
    cells = [
        [place, bin_, round(count / sum(counts), 4)]
        for place, counts in enumerate(heat.counts)
        for bin_, count in enumerate(counts)
        if count
    ]
    most = max((share for *_, share in cells), default=1.0)
    plain = axis() | {"type": "category", "axisLabel": {"color": "var(--muted)", "fontSize": 11, "hideOverlap": True}}
    text = {"color": "var(--muted)", "fontSize": 11}
    return {
        "animation": False,
        "title": {"text": title, "left": 0, "top": 0, "textStyle": {"color": "var(--ink)", "fontSize": 13}},
        "grid": {"left": 60, "right": 12, "top": 30, "bottom": 60},
        "tooltip": {**TOOLTIP, "trigger": "item"},
        "xAxis": {**plain, "data": heat.steps, "name": "step", "nameGap": 16, "nameLocation": "middle"},
        "yAxis": {**plain, "data": middles},
        "visualMap": {
            **{"min": 0, "max": most, "calculable": False, "orient": "horizontal", "left": "center", "bottom": 0},
            **{"itemHeight": 120, "itemWidth": 12, "precision": 2, "textStyle": text, "text": [f"{most:.0%}", "0 %"]},
            "inRange": {"color": list(scale("sequential"))},
        },
        "series": [{"type": "heatmap", "name": "share of the step", "data": cells, "progressive": 0}],
    }
