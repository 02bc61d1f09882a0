"""The page of the chosen runs: what they are, where they stand, and their curves."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

from nicegui import ui

from swift_r1.lab.diagnosis.verdict import Verdict, brief, headline
from swift_r1.lab.diagnosis.watch import Diagnosis, Finding
from swift_r1.lab.report.parts import command, facts
from swift_r1.lab.runs.progress import progress_of
from swift_r1.lab.runs.timeline import Mark, Timeline
from swift_r1.lab.view import charts
from swift_r1.lab.view.curves import CurveControls, RunGroup, lines, panels
from swift_r1.lab.view.event_ticks import ticks
from swift_r1.lab.view.markup import markup
from swift_r1.lab.view.shell import Page, in_order, opened, view_page
from swift_r1.record.folder import RunFolder
from swift_r1.record.glossary import GROUPS
from swift_r1.record.metric_log import at_steps, same_but_seed

_ANSWER_S = 5.0  # that the first look at the logs may take before the page is answered without it


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

    async def build(self) -> None:
        await self._first_read()
        self.verdict = _Headline() if len(self.page.chosen) == 1 else None
        self.state = ui.html("", sanitize=False).classes("view-scroll")
        self.rows: tuple[list[Any], ...] = ()
        self._show_state()
        ui.html(_facts(self.page.run, shown=len(self.page.chosen) == 1), sanitize=False).classes(
            "view-run"
        )
        self._controls()
        self.grid = ui.element("div").classes("view-charts")
        self.meanings = ui.html("", sanitize=False).classes("view-scroll")
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
        self.diagnoses = [
            _finding(run, one)
            for run, log in zip(self.found, self.logs, strict=True)
            for one in log.findings.values()
        ]
        states = [log.state for log in self.logs]
        if self.judged != states:
            self.judged = states
            self.verdicts = [log.verdict for log in self.logs]
        self.standings = [
            progress_of(run, log) for run, log in zip(self.found, self.logs, strict=True)
        ]

    def _show_state(self) -> None:
        rows = self.standings
        if self.verdict is not None:
            self.verdict.show(self.verdicts[0], self.logs[0])
        if (rows, self.diagnoses, self.judged) != self.rows:
            self.rows = rows, self.diagnoses, self.judged
            if len(rows) > 1:
                colours = [0] * len(rows)
                for number, places in enumerate(self._seeds().values()):
                    for place in places:
                        colours[place] = number
                shown = [
                    {"run": row["run"], "verdict": brief(verdict), "why": _first(verdict)} | row
                    for row, verdict in zip(rows, self.verdicts, strict=True)
                ]
                self.state.content = _table(shown, colours) + _different(self.found)
            else:
                self.state.content = _table(rows)
            self.state.content += _table(self.diagnoses) if self.diagnoses else ""
        for log in self.logs:
            self.page.problems(log, log.problems)

    def _controls(self) -> None:
        page = self.page

        def changes(name: str, value_of: str = "value") -> Any:
            async def change(event: Any) -> None:
                page.set(**{name: getattr(event, value_of)})
                self.rows = ()  # colours go by what is drawn as one
                self._show_state()
                await self._draw()

            return change

        with ui.element("div").classes("view-row"):
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
                ui.checkbox(
                    "seeds as one", value=page.flag("seeds", True), on_change=changes("seeds")
                )
            ui.checkbox("all metrics", value=page.flag("all"), on_change=changes("all"))

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
        runs = self.page.chosen
        found = []
        for places in self._seeds().values():
            more = f" and {len(places) - 1} other seeds" if len(places) > 1 else ""
            found.append(
                RunGroup(runs[places[0]].name + more, [self.logs[place] for place in places])
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
        drawn = await in_order(self._options)
        for title in self.charts.keys() - drawn.keys():
            self.charts.pop(title).delete()
        with self.grid:
            for title, options in drawn.items():
                if title in self.charts:
                    charts.refresh(self.charts[title], options)
                else:
                    options |= charts.zooming(charts.zoom_of(self.page))
                    self.charts[title] = charts.chart(options, title)
        self.meanings.content = _meanings({name for log in self.logs for name in log.series})

    def _options(self) -> dict[str, dict[str, Any]]:
        """Returns ECharts' options by the chart's title."""
        page = self.page
        per_hour = 0.0
        if page.text("x") == "time":
            per_hour = 1.0 if any(sum(log.hours().values[-1:]) > 1 for log in self.logs) else 60.0
        shown = CurveControls(
            min(0.99, max(0.0, page.number("smooth", 0))), page.flag("log"), per_hour
        )
        return _options(self._groups(), shown, page.flag("all"), self._ticks(shown))


class _Headline:
    """The verdict on the run: what it is, its first cause with what to try, and below them, folded, the others."""

    def __init__(self) -> None:
        with ui.element("section").props('aria-label="verdict"') as self.frame:
            self.head = ui.html("", sanitize=False)
            with ui.element("details") as self.more:
                with ui.element("summary"):
                    self.summary = ui.label()
                self.rest = ui.html("", sanitize=False).classes("view-scroll")

    def show(self, verdict: Verdict | None, log: Diagnosis) -> None:
        """Shows it; what is unfolded stays so."""
        kind = verdict.reward.kind.replace(" ", "-") if verdict is not None else "too-early"
        self.frame.classes(replace=f"view-verdict view-{kind}")
        title = f"Reward: {brief(verdict)}"
        if verdict is None and log.get("token_accuracy"):
            title = "Answers"
        head = f"<h2>{markup(title)}</h2><p>{markup(headline(verdict, log))}</p>"
        causes = verdict.causes if verdict is not None else []
        for one in causes[:1]:
            head += f"<p><b>Why:</b> {markup(one.name)}: {markup(one.evidence)}</p>"
            head += f"<p><b>Try:</b> {markup(one.advice)}</p>"
        trends = verdict.trends if verdict is not None else []
        others = len(causes) - 1
        found = [f"{others} more cause{'s' if others > 1 else ''}"] if others > 0 else []
        if trends:
            found.append("each reward and evaluation")
        rows = [
            {"why": one.name, "evidence": one.evidence, "try": one.advice} for one in causes[1:]
        ]
        lines = "".join(f"<li>{markup(trend.text)}</li>" for trend in trends)
        self.head.content = head
        self.summary.text = ", ".join(found)
        self.more.set_visibility(bool(found))
        self.rest.content = (_table(rows) if rows else "") + (f"<ul>{lines}</ul>" if lines else "")


def _options(
    groups: Sequence[RunGroup],
    shown: CurveControls,
    everything: bool,
    happened: Sequence[charts.Tick],
) -> dict[str, dict[str, Any]]:
    """Returns ECharts' options by the chart's title."""
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
    found = {}
    for panel in panels(groups, everything):
        found[panel.title] = charts.line_options(
            panel.title,
            lines(panel, groups, shown),
            about=panel.about,
            x_name=unit,
            log=shown.log,
            extent=(0.0, max(lasts, default=0.0)),
            ticks=happened,
        )
    return found


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
    text = _table(rows)
    return f"<details><summary>what the curves mean</summary>{text}</details>"


def _different(runs: Sequence[RunFolder]) -> str:
    """Returns the flags that not all of the runs have alike, a row each, as HTML."""
    rows = []
    for name in sorted({name for run in runs for name in run.args} - {"output_dir"}):
        values = {repr(run.args.get(name)) for run in runs}
        if len(values) > 1:
            rows.append(
                {"flag": f"--{name}"} | {run.name: str(run.args.get(name, "")) for run in runs}
            )
    number = "no flag differs"
    if rows:
        number = f"{len(rows)} flag{'s differ' if len(rows) > 1 else ' differs'}"
    return f"<details><summary>{number}</summary>{_table(rows)}</details>"


def _table(rows: Sequence[Mapping[str, str]], colours: Sequence[int] = ()) -> str:
    """Returns the rows as HTML; with `colours`, their numbers, each row begins with that of its curves."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    heads = "".join(f"<th>{markup(name)}</th>" for name in names)
    lines = [f"<tr>{heads}</tr>"]
    for number, row in enumerate(rows):
        mark = ""
        if colours:
            mark = f'<span class="view-mark" style="background: {charts.series_colour(colours[number])}"></span>'
        cells = "</td><td>".join(markup(row.get(name, "")) for name in names)
        lines.append(f"<tr><td>{mark}{cells}</td></tr>")
    return f'<table class="view-table">{"".join(lines)}</table>'


def _first(verdict: Verdict | None) -> str:
    """Returns the name of the first cause; empty where there is none."""
    return verdict.causes[0].name if verdict is not None and verdict.causes else ""


def _finding(run: RunFolder, one: Finding) -> dict[str, str]:
    return {
        "run": run.name,
        "sign": one.name,
        "steps": "{} to {}".format(*one.steps),
        "evidence": one.evidence,
        "try": one.advice,
    }


def _facts(run: RunFolder, shown: bool) -> str:
    """Returns what a run is, and below it its command, as HTML."""
    found = facts(run) | {"folder": str(run.path)}
    plan = run.plan
    if plan:
        parts = []
        for what in ("prompts", "completions", "optimizer steps"):
            count = plan.get(f"{what.replace(' ', '_')}_per_round")
            if isinstance(count, int):
                parts.append(f"{count:,} {what}")
        found["plan"] = f"{plan.get('total_steps')} steps" + (
            f"; a round: {', '.join(parts)}" if parts else ""
        )
    rows = "".join(
        f"<dt>{markup(name)}</dt><dd>{markup(text)}</dd>" for name, text in found.items()
    )
    code = ""
    for block in command(run):
        code += f"<details><summary>command</summary><pre>{markup(block.text)}</pre></details>"
    summary = f"<summary>run {markup(run.name)}</summary>"
    return f"<details{' open' if shown else ''}>{summary}<dl class=view-facts>{rows}</dl>{code}</details>"
