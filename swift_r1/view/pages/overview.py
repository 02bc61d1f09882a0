"""What the chosen runs are, where they stand, and their curves."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from typing import Any

from nicegui import ui

from swift_r1.runs.folder import RunFolder
from swift_r1.runs.metrics import MetricLog, at_steps, same_but_seed
from swift_r1.view import charts
from swift_r1.view.curves import Group, Panel, Shown, lines, panels
from swift_r1.view.shell import Page, in_order, opened, view_page

_LAST_LINES = 20  # whose seconds a step say how long the rest takes


@view_page("/", "Overview", go="o")
async def overview(page: Page) -> None:
    await _Overview(page).build()


class _Overview:
    """The page: what it shows of the chosen runs, and the charts that follow them."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.logs = [opened(MetricLog, run.path) for run in page.chosen]
        self.charts: dict[str, ui.echart] = {}

    async def build(self) -> None:
        await in_order(lambda: [log.refresh() for log in self.logs])
        self.state = ui.column().classes("view-state")
        self._show_state()
        _facts(self.page.run)
        self._controls()
        self.grid = ui.element("div").classes("view-charts")
        await self._draw()
        self.page.follow(self._look)

    async def _look(self) -> None:
        """New lines, where there are any."""
        changed = await in_order(lambda: [log.refresh() for log in self.logs])
        self._show_state()
        if any(changed):
            await self._draw()

    def _show_state(self) -> None:
        # A folder is read once: another object looks again.
        found = [RunFolder(run.path, run.name) for run in self.page.chosen]
        rows = [_state(run, log) for run, log in zip(found, self.logs, strict=True)]
        if rows != getattr(self, "rows", None):
            self.rows = rows
            self.state.clear()
            with self.state:
                _state_table(rows, compare=len(found) > 1)
        for log in self.logs:
            for line in log.problems:
                self.page.problem(line)

    def _controls(self) -> None:
        page = self.page

        def changes(name: str) -> Any:
            async def change(event: Any) -> None:
                page.set(**{name: event.value})
                await self._draw()

            return change

        with ui.element("div").classes("view-row"):
            ui.label("smoothing").props('id="smoothing"')
            slider = ui.slider(min=0, max=0.99, step=0.01, value=page.number("smooth", 0))
            slider.classes("view-slider").props('aria-labelledby="smoothing" label')
            slider.on_value_change(changes("smooth"))
            log = ui.checkbox("log scale", value=page.flag("log"), on_change=changes("log")).props('data-key="l"')
            log.props('title="logarithmic y axes"')
            ui.toggle({"step": "steps", "time": "hours"}, value=page.text("x", "step"), on_change=changes("x")).props(
                "dense no-caps"
            )
            if any(len(group) > 1 for group in self._seeds().values()):
                ui.checkbox("seeds as one", value=page.flag("seeds", True), on_change=changes("seeds"))
            ui.checkbox("all metrics", value=page.flag("all"), on_change=changes("all"))

    def _seeds(self) -> dict[str, list[int]]:
        """The places of the chosen runs, by what they have in common but for the seed."""
        found: dict[str, list[int]] = {}
        for place, run in enumerate(self.page.chosen):
            key = same_but_seed(run.args) if run.args and self.page.flag("seeds", True) else run.name
            found.setdefault(key, []).append(place)
        return found

    def _groups(self) -> list[Group]:
        runs, found = self.page.chosen, []
        for places in self._seeds().values():
            more = f" and {len(places) - 1} other seeds" if len(places) > 1 else ""
            found.append(Group(runs[places[0]].name + more, [self.logs[place] for place in places]))
        return found

    async def _draw(self) -> None:
        page, groups = self.page, self._groups()
        shown = Shown(min(0.99, max(0.0, page.number("smooth", 0))), page.flag("log"), page.text("x") == "time")
        drawn = await in_order(_options, groups, shown, page.flag("all"))
        for title in [title for title in self.charts if title not in drawn]:
            self.charts.pop(title).delete()
        with self.grid:
            for title, options in drawn.items():
                if title in self.charts:
                    charts.refresh(self.charts[title], options)
                else:
                    options |= charts.zooming(charts.zoom_of(page))
                    self.charts[title] = charts.chart(options, title)


def _options(groups: Sequence[Group], shown: Shown, everything: bool) -> dict[str, dict[str, Any]]:
    """ECharts' options by the chart's title."""
    logs = [log for group in groups for log in group.logs]
    if shown.hours:
        last = max((at_steps(log.hours(), [log.last_step])[0] for log in logs), default=0.0)
    else:
        last = float(max((log.last_step for log in logs), default=0))
    found = {}
    for panel in panels(groups, everything):
        found[panel.title] = charts.line_options(
            panel.title,
            lines(panel, groups, shown),
            about=panel.about,
            x_name="hours of training" if shown.hours else "step",
            log=shown.log,
            extent=(0.0, last),
        )
    return found


def _state(run: RunFolder, log: MetricLog) -> dict[str, str]:
    """Where a run stands, as the table has it."""
    total = run.plan.get("total_steps")
    done = f"step {log.last_step:,}"
    share = None
    if isinstance(total, int) and total > 0:
        share = min(1.0, log.last_step / total)
        done += f" of {total:,} ({100 * share:.0f} %)"
    left = ""
    seconds = log.get("time/step").values[-_LAST_LINES:]
    if run.status == "running" and share is not None and len(seconds):
        rest = (total - log.last_step) * sum(seconds) / len(seconds)
        left = f"about {duration(rest)} left"
    found = {"run": run.name, "status": run.status, "progress": done, "share": "" if share is None else f"{share:.4f}"}
    found["left"] = left or (f"took {duration(run.summary['seconds'])}" if "seconds" in run.summary else "")
    for name, metric in (("reward", "reward"),):
        values = log.get(metric).values
        found[name] = f"{values[-1]:.4g}" if len(values) else ""
    for benchmark, names in log.benchmarks().items():
        if evaluated := log.evaluations(benchmark, names[0]):
            last = evaluated[-1]
            interval = "" if last.low is None or last.high is None else f" [{last.low:.3g}, {last.high:.3g}]"
            found[f"{benchmark} {names[0]}"] = f"{last.value:.3g}{interval}"
    return found


def duration(seconds: float) -> str:
    """Two units of it: 2 h 5 min."""
    whole = round(seconds)
    for size, name, small, less in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // small
            return f"{whole // size} {name}" + (f" {rest} {less}" if rest else "")
    return f"{whole} s"
