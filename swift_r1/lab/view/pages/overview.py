"""The page of the chosen runs: what they are, where they stand, and their curves."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any
from urllib.parse import urlencode

from nicegui import ui

from swift_r1.lab.diagnosis.verdict import Verdict, brief
from swift_r1.lab.diagnosis.watch import Diagnosis
from swift_r1.lab.report.parts import command, facts
from swift_r1.lab.runs.curves import (
    Panel,
    RunGroup,
    about,
    constant,
    curves,
    groups_of,
    panels,
)
from swift_r1.lab.runs.names import different_flags
from swift_r1.lab.runs.progress import progress_of
from swift_r1.lab.runs.timeline import Timeline
from swift_r1.lab.view import charts
from swift_r1.lab.view.headline import Headline, signs
from swift_r1.lab.view.markup import markup, table, table_of_html
from swift_r1.lab.view.shell import Page, in_order, opened, view_page
from swift_r1.record.folder import RunFolder
from swift_r1.record.glossary import GROUPS

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
            self.table = ui.html("", sanitize=False).classes("view-scroll")
            self.signs = ui.html("", sanitize=False).classes("view-scroll")
        self._show_state()
        self._controls()
        self.grid = ui.element("div").classes("view-charts view-questions")
        self.constant = ui.label().classes("view-constant")
        self.empty = ui.label().classes("view-empty")
        self.meanings = ui.html("", sanitize=False).classes("view-scroll")
        ui.html(_facts(self.page.run), sanitize=False).classes("view-run")
        self.events = ui.html("", sanitize=False).classes("view-scroll")
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
        now = (self.standings, self.judged)
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
        """Shows a row for each run, with the colour of its curves, and the signs of all."""
        page = self.page
        groups = self._groups()
        flags = different_flags(page.chosen)
        rows = []
        found = ""
        count = 0
        for place, (run, log, verdict, standing) in enumerate(
            zip(page.chosen, self.logs, self.verdicts, self.standings, strict=True)
        ):
            [colour] = [at for at, group in enumerate(groups) if run in group.runs]
            name = page.names[run.name]
            texts = {
                "verdict": brief(verdict, log.past),
                "why": verdict.causes[0].name if verdict is not None and verdict.causes else "",
                **{f"--{flag}": values[place] for flag, values in flags.items()},
                **{name: text for name, text in standing.items() if name != "run"},
            }
            address = urlencode({"run": run.name}, errors="replace")
            link = f'<a href="/?{address}" title="this run alone">{markup(name)}</a>'
            cells = {name: markup(text) for name, text in texts.items()}
            rows.append({"run": f"{_mark(colour)}{link}", **cells})
            of_run = signs(page, run, list(log.findings.values()))
            found += f"<h3>{markup(name)}</h3>{of_run}" if of_run else ""
            count += len(log.findings)
        self.table.content = table_of_html(rows)
        summary = f"{count} sign{'s' if count != 1 else ''} of trouble"
        self.signs.content = (
            f"<details><summary>{summary}</summary>{found}</details>" if found else ""
        )

    def _controls(self) -> None:
        page = self.page

        def changes(name: str, value_of: str = "value") -> Any:
            async def change(event: Any) -> None:
                page.set(**{name: getattr(event, value_of) or None})
                await self._draw()

            return change

        with ui.element("div").classes("view-row view-controls view-sticky"):
            self.legend = ui.html("", sanitize=False).classes("view-legend")
            ui.label("smoothing").props('id="smoothing"')
            slider = ui.slider(min=0, max=0.99, step=0.01, value=page.number("smooth", 0))
            slider.classes("view-slider").props('aria-labelledby="smoothing" label')
            slider.on("change", changes("smooth", "args"))  # once it is let go
            find = ui.input("find a metric", value=page.text("find"), on_change=changes("find"))
            find.props("dense clearable debounce=250 data-search").classes("view-find")

    def _groups(self) -> list[RunGroup]:
        page = self.page
        return groups_of(page.chosen, self.logs, [page.names[run.name] for run in page.chosen])

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
        self.events.content = self._events()
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
        wanted = self.page.text("find").casefold()
        found = [
            panel
            for panel in panels(groups, everything=bool(wanted))
            if wanted in " ".join([panel.title, *panel.metrics]).casefold()
        ]
        still = {panel: constant(panel, groups) for panel in found if not wanted}
        drawn = [panel for panel in found if not still.get(panel)]
        smooth = min(0.99, max(0.0, self.page.number("smooth", 0)))
        opens = [self._opens(group) for group in groups]
        alone = len(groups) == 1
        options = {
            panel: charts.line_options(
                panel.title,
                curves(panel, groups, smooth),
                faint=curves(panel, groups) if smooth and alone else (),
                about=about(panel, groups),
                opens=opens,
                last=max((log.last_step for log in self.logs), default=0),
                legend=alone,
            )
            for panel in drawn
        }
        return options, [text for text in still.values() if text]

    def _opens(self, group: RunGroup) -> charts.Opens:
        """Returns the address of the completions behind a point, and the steps that share them."""
        every = group.runs[0].plan.get("optimizer_steps_per_round")
        address = self.page.link_of(group.runs[0], "/completions")
        return address, every if isinstance(every, int) and every > 0 else 1

    def _events(self) -> str:
        """Returns what happened to the runs as HTML: kills, resumes, servers that were lost."""
        rows = [
            {
                "run": self.page.names[run.name],
                "step": f"{mark.step}",
                "event": mark.kind.replace("_", " "),
                "": mark.text,
            }
            for run, timeline in zip(self.page.chosen, self.timelines, strict=True)
            for mark in timeline.marks
        ]
        return f"<details><summary>events</summary>{table(rows)}</details>" if rows else ""


def _legend(groups: Sequence[RunGroup]) -> str:
    """Returns the legend of all charts as HTML."""
    return "".join(
        f"<span>{_mark(number)}{markup(group.name)}</span>" for number, group in enumerate(groups)
    )


def _mark(number: int) -> str:
    return f'<span class=view-mark style="background: {charts.series_colour(number)}"></span>'


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
