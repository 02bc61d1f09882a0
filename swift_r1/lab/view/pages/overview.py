"""The page of the chosen runs: what they are, where they stand, and their curves."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

from nicegui import ui

from swift_r1.lab.diagnosis.verdict import Verdict, brief
from swift_r1.lab.diagnosis.watch import Diagnosis
from swift_r1.lab.report.parts import command, facts
from swift_r1.lab.runs.progress import progress_of
from swift_r1.lab.runs.timeline import Mark, Timeline
from swift_r1.lab.view import charts
from swift_r1.lab.view.curves import (
    CurveControls,
    Panel,
    RunGroup,
    about,
    constant,
    lines,
    panels,
)
from swift_r1.lab.view.event_ticks import legend, ticks
from swift_r1.lab.view.headline import Headline, signs
from swift_r1.lab.view.markup import markup, table
from swift_r1.lab.view.run_table import RunTable
from swift_r1.lab.view.shell import Page, in_order, opened, view_page
from swift_r1.record.folder import RunFolder
from swift_r1.record.glossary import GROUPS
from swift_r1.record.metric_log import at_steps, same_but_seed

_ANSWER_S = 5.0  # that the first look at the logs may take before the page is answered without it
_HEIGHT = 220  # pixels of a chart


@view_page("/", "Overview", go="o", compares=True)
async def overview(page: Page) -> None:
    await _Overview(page).build()


class _Overview:
    """The page: what it shows of the chosen runs, and the charts that follow them."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.logs = [opened(Diagnosis, run.path) for run in page.chosen]
        self.timelines = [opened(Timeline, run.path) for run in page.chosen]
        self.charts: dict[str, ui.echart] = {}
        self.verdicts: list[Verdict | None] = []
        self.judged: list[tuple[int, int]] = []  # states of the logs that the verdicts are of
        self.shown: object = None

    async def build(self) -> None:
        await self._first_read()
        if len(self.page.chosen) == 1:
            self.headline = Headline(self.page)
        else:
            self.table = RunTable(self.page, self.logs)
            self.signs = ui.html("", sanitize=False).classes("view-scroll")
        self._show_state()
        self._controls()
        self.grid = ui.element("div").classes("view-charts view-questions")
        legend()
        self.constant = ui.label().classes("view-constant")
        self.empty = ui.label().classes("view-empty")
        self.meanings = ui.html("", sanitize=False).classes("view-scroll")
        for run in self.page.chosen[:1]:
            ui.html(_facts(run), sanitize=False).classes("view-run")
        await self._draw()
        self.page.follow(self._look)

    async def _first_read(self) -> None:
        """Reads what is there. A long log takes longer than a browser waits for an answer."""
        reading = asyncio.ensure_future(in_order(self._read))
        done, _ = await asyncio.wait([reading], timeout=_ANSWER_S)
        if not done:
            await ui.context.client.connected()
        await reading

    async def _look(self) -> None:
        """New lines, where there are any."""
        await in_order(self._read)
        self._show_state()
        if self.seen != self.drawn:
            await self._draw()

    def _read(self) -> None:
        """Reads what was written since. Other pages read for this one too: what is new is what it has not drawn."""
        for log, timeline in zip(self.logs, self.timelines, strict=True):
            log.refresh()
            timeline.refresh()
        self.seen = (
            [log.state for log in self.logs],
            [len(timeline.marks) for timeline in self.timelines],
        )
        # A folder is read once: another object looks again.
        self.found = [RunFolder(run.path, run.name) for run in self.page.chosen]
        states = [log.state for log in self.logs]
        if self.judged != states:
            self.judged = states
            self.verdicts = [log.verdict for log in self.logs]
        self.standings = [
            progress_of(run, log) for run, log in zip(self.found, self.logs, strict=True)
        ]

    def _show_state(self) -> None:
        now = (self.standings, self.judged, self.page.flag("seeds", True))
        if len(self.logs) == 1:
            last = self.timelines[0].last
            if self.shown != (*now, last) or self.found[0].status == "running":
                self.shown = (*now, last)
                self.headline.show(self.verdicts[0], self.logs[0], self.standings[0], last)
        elif self.shown != now:
            self.shown = now
            self._show_runs()
        for run, log in zip(self.page.chosen, self.logs, strict=True):
            name = self.page.names[run.name]
            self.page.problems(log, [f"{name}: {line}" for line in log.problems])

    def _show_runs(self) -> None:
        colours = [0] * len(self.standings)
        for number, places in enumerate(self._seeds().values()):
            for place in places:
                colours[place] = number
        rows = [
            {"run": row["run"], "verdict": brief(verdict, log.past), "why": _first(verdict)} | row
            for row, verdict, log in zip(self.standings, self.verdicts, self.logs, strict=True)
        ]
        self.table.show(rows, colours)
        found = ""
        count = 0
        for run, log in zip(self.page.chosen, self.logs, strict=True):
            of_run = signs(self.page, run, list(log.findings.values()))
            found += f"<h3>{markup(self.page.names[run.name])}</h3>{of_run}" if of_run else ""
            count += len(log.findings)
        summary = f"{count} sign{'s' if count != 1 else ''} of trouble"
        self.signs.content = (
            f"<details><summary>{summary}</summary>{found}</details>" if found else ""
        )

    def _controls(self) -> None:
        page = self.page

        def changes(name: str, value_of: str = "value") -> Any:
            async def change(event: Any) -> None:
                page.set(**{name: getattr(event, value_of) or None})
                self._show_state()
                await self._draw()

            return change

        with ui.element("div").classes("view-row view-controls view-sticky"):
            self.legend = ui.html("", sanitize=False).classes("view-legend")
            ui.label("smoothing").props('id="smoothing"')
            slider = ui.slider(min=0, max=0.99, step=0.01, value=page.number("smooth", 0))
            slider.classes("view-slider").props('aria-labelledby="smoothing" label')
            slider.on("change", changes("smooth", "args"))  # once it is let go
            log = ui.checkbox("log scale", value=page.flag("log"), on_change=changes("log")).props(
                'data-key="l"'
            )
            log.props('title="logarithmic y axes"')
            ui.toggle(
                {"step": "steps", "time": "time"},
                value=page.text("x", "step"),
                on_change=changes("x"),
            ).props("dense no-caps")
            if any(len(group) > 1 for group in self._seeds().values()):
                seeds = ui.checkbox("seeds as one", value=page.flag("seeds", True))

                async def divide() -> None:
                    page.set(seeds=seeds.value)
                    self._show_state()
                    await self._draw()

                seeds.on_value_change(divide)
            ui.checkbox("all metrics", value=page.flag("all"), on_change=changes("all"))
            find = ui.input("find a metric", value=page.text("find"), on_change=changes("find"))
            find.props("dense clearable debounce=250 data-search").classes("view-find")

    def _seeds(self) -> dict[str, list[int]]:
        """Returns the places of the chosen runs, by what they have in common but for the seed."""
        found: dict[str, list[int]] = {}
        for place, run in enumerate(self.page.chosen):
            key = (
                same_but_seed(run.args) if run.args and self.page.flag("seeds", True) else run.name
            )
            found.setdefault(key, []).append(place)
        return found

    def _groups(self) -> list[RunGroup]:
        page = self.page
        found = []
        for places in self._seeds().values():
            runs = [page.chosen[place] for place in places]
            name = page.names[runs[0].name]
            if len(runs) > 1:
                seeds = ", ".join(str(run.args.get("seed")) for run in runs)
                name += f" and {len(runs) - 1} more (seeds {seeds})"
            opens = page.link_of(runs[0], "/completions")
            every = runs[0].plan.get("optimizer_steps_per_round")
            found.append(
                RunGroup(
                    name,
                    [self.logs[place] for place in places],
                    opens,
                    every if isinstance(every, int) and every > 0 else 1,
                )
            )
        return found

    def _ticks(self, shown: CurveControls) -> list[charts.Tick]:
        """Returns what happened to the first run; of several it would not be clear whose it is."""
        if len(self.logs) > 1:
            return []
        hours = self.logs[0].hours()
        # those have a chart
        marks = [mark for mark in self.timelines[0].marks if mark.kind != "evaluated"]

        def place(mark: Mark) -> float:
            if not shown.per_hour:
                return mark.step
            return shown.per_hour * at_steps(hours, [mark.step])[0]

        return ticks(marks, place)

    async def _draw(self) -> None:
        self.drawn = self.seen
        groups = self._groups()
        drawn, still = await in_order(self._options, groups)
        for title in self.charts.keys() - {panel.title for panel in drawn}:
            charts.remove(self.charts.pop(title))
        for panel, options in drawn.items():
            if panel.title in self.charts:
                charts.refresh(self.charts[panel.title], options)
                continue
            with self.grid:
                self.charts[panel.title] = charts.chart(options, panel.title, _HEIGHT)
        first = {panel.question: panel.title for panel in reversed(drawn)}
        for place, panel in enumerate(drawn):
            asks = panel.question if first[panel.question] == panel.title else ""
            charts.place(self.charts[panel.title], place, asks)
        self.legend.content = _legend(groups) if len(groups) > 1 else ""
        self.constant.text = f"Constant: {'; '.join(still)}" if still else ""
        self.constant.set_visibility(bool(still))
        self._say_empty(bool(drawn))
        self.meanings.content = _meanings({name for log in self.logs for name in log.series})

    def _say_empty(self, is_drawn: bool) -> None:
        is_live = any(run.status == "running" for run in self.found)
        if self.page.text("find"):
            self.empty.text = "No metric is called so."
        elif is_live:
            self.empty.text = "No steps yet: the first curves appear after step 1."
        else:
            self.empty.text = "This run has logged no steps."
        self.empty.set_visibility(not is_drawn)

    def _options(self, groups: Sequence[RunGroup]) -> tuple[dict[Panel, dict[str, Any]], list[str]]:
        """Returns ECharts' options of each chart, and what is to be said of those that would show nothing."""
        page = self.page
        per_hour = 0.0
        if page.text("x") == "time":
            per_hour = 1.0 if any(sum(log.hours().values[-1:]) > 1 for log in self.logs) else 60.0
        shown = CurveControls(
            min(0.99, max(0.0, page.number("smooth", 0))), page.flag("log"), per_hour
        )
        wanted = page.text("find").casefold()
        found = [
            panel
            for panel in panels(groups, page.flag("all") or bool(wanted))
            if wanted in " ".join([panel.title, *panel.metrics]).casefold()
        ]
        still = {panel: constant(panel, groups) for panel in found if not wanted}
        drawn = [panel for panel in found if not still.get(panel)]
        options = _options(drawn, groups, shown, self._ticks(shown))
        return options, [text for text in still.values() if text]


def _options(
    drawn: Sequence[Panel],
    groups: Sequence[RunGroup],
    shown: CurveControls,
    happened: Sequence[charts.Tick],
) -> dict[Panel, dict[str, Any]]:
    """Returns ECharts' options of each chart."""
    logs = [log for group in groups for log in group.logs]
    unit = {
        0.0: "step",
        1.0: "hours of training",
        60.0: "minutes of training",
    }[shown.per_hour]
    if shown.per_hour:
        lasts = [shown.per_hour * sum(log.hours().values[-1:]) for log in logs]
    else:
        lasts = [float(log.last_step) for log in logs]
    return {
        panel: charts.line_options(
            panel.title,
            lines(panel, groups, shown),
            about=about(panel, groups),
            x_name=unit,
            log=shown.log,
            extent=(0.0, max(lasts, default=0.0)),
            ticks=happened,
            legend=len(groups) == 1,
        )
        for panel in drawn
    }


def _legend(groups: Sequence[RunGroup]) -> str:
    """Returns the legend of all charts as HTML; a click on a run leaves it alone in them."""
    return "".join(
        f'<button data-run="{markup(group.name)}" aria-pressed="false" title="this one alone">'
        f'<span class=view-mark style="background: {charts.series_colour(number)}"></span>'
        f"{markup(group.name)}</button>"
        for number, group in enumerate(groups)
    )


def _meanings(names: Collection[str]) -> str:
    """Returns what the metrics of these names are, as HTML; families as one."""
    rows = []
    for metric in dict.fromkeys(chain.from_iterable(GROUPS.values())):
        if any(map(metric.pattern.fullmatch, names)):
            row = {
                "metric": metric.name,
                "what it is": metric.meaning,
                "unit": metric.unit,
                "healthy": metric.healthy,
            }
            rows.append({name: text.replace("`", "") for name, text in row.items()})
    return f"<details><summary>what the curves mean</summary>{table(rows)}</details>"


def _first(verdict: Verdict | None) -> str:
    """Returns the name of the first cause; empty where there is none."""
    return verdict.causes[0].name if verdict is not None and verdict.causes else ""


def _facts(run: RunFolder) -> str:
    """Returns what a run is, and below it its command, as HTML."""
    found = facts(run) | {"folder": str(run.path)}
    plan = run.plan
    if plan:
        parts = []
        for what in ("prompts", "completions", "optimizer steps"):
            count = plan.get(f"{what.replace(' ', '_')}_per_round")
            if isinstance(count, int):
                parts.append(f"{count:,} {what.removesuffix('s') if count == 1 else what}")
        found["plan"] = f"{plan.get('total_steps')} steps" + (
            f"; a round: {', '.join(parts)}" if parts else ""
        )
    rows = "".join(
        f"<dt>{markup(name)}</dt><dd>{markup(text)}</dd>" for name, text in found.items()
    )
    code = ""
    for block in command(run):
        code += f"<details><summary>command</summary><pre>{markup(block.text)}</pre></details>"
    summary = f"<summary>what was run: {markup(run.name)}</summary>"
    return f"<details>{summary}<dl class=view-facts>{rows}</dl>{code}</details>"
