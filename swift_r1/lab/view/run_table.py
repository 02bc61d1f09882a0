"""The chosen runs, a row each: sorted and filtered, with the metrics that are asked for; their names, which a click
isolates and an edit changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nicegui import ui
from nicegui.events import GenericEventArguments

from swift_r1.flags.fields import flag_specs
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.lab.runs.names import different_flags, give_name, given_name, was_given
from swift_r1.lab.view.charts import series_colour
from swift_r1.lab.view.markup import table
from swift_r1.lab.view.shell import Page
from swift_r1.record.metric_log import MetricLog

_MOST_FLAGS = 4  # columns


class _Grid(ui.table, component="run_table.js"):
    """Quasar's table with the cells of `run_table.js`."""


class RunTable:
    """The table, with a field to filter it and a choice of metrics; `changed` is called after a run was renamed."""

    def __init__(self, page: Page, logs: Sequence[MetricLog]) -> None:
        self.page = page
        self.logs = logs
        with ui.element("div").classes("view-row") as above:
            filtered = ui.input("filter the runs").props("dense clearable")
            names = sorted({name for log in logs for name in log.series})
            chosen = [name for name in page.text("metrics").split(",") if name in names]
            metrics = ui.select(
                names, value=chosen, multiple=True, with_input=True, label="metrics"
            )
            metrics.props("dense options-dense use-chips").classes("view-metrics")
        self.table = _Grid(rows=[], columns=[], row_key="key")
        self.table.props("dense flat").classes("view-run-table")
        self.table.bind_filter_from(filtered, "value")
        self.table.on("rename", self._rename)
        with above:
            ui.html(_different(page), sanitize=False).classes("view-scroll view-different")
        metrics.on_value_change(lambda event: self._choose(event.value))
        self.rows: Sequence[Mapping[str, str]] = ()
        self.colours: Sequence[int] = ()

    def show(self, rows: Sequence[Mapping[str, str]], colours: Sequence[int]) -> None:
        """Shows a row for each chosen run, with the number of the colour of its curves."""
        self.rows = rows
        self.colours = colours
        page = self.page
        wanted = [name for name in page.text("metrics").split(",") if name]
        shown: list[dict[str, Any]] = []
        every = different_flags(page.chosen)
        given = [name for name in every if was_given(name, page.chosen)][:_MOST_FLAGS]
        flags = {f"--{name}": every[name] for name in given}
        for place, (run, log, row, colour) in enumerate(
            zip(page.chosen, self.logs, rows, colours, strict=True)
        ):
            last = {name: list(log.get(name).values[-1:]) for name in wanted}
            shown.append(
                {
                    **{flag: values[place] for flag, values in flags.items()},
                    **row,
                    **{name: values[0] for name, values in last.items() if values},
                    "run": page.names[run.name],
                    "key": run.name,
                    "given": given_name(run),
                    "colour": series_colour(colour),
                    "link": f"{page.path}?run={run.name}",
                }
            )
        names = dict.fromkeys(["run", *flags, *(name for row in rows for name in row), *wanted])
        columns = [
            {
                "name": name,
                "label": name,
                "field": name,
                "sortable": True,
                "align": "right" if name in wanted else "left",
                "metric": name in wanted,
            }
            for name in names
        ]
        self.table.columns = columns
        self.table.rows = shown

    def _choose(self, metrics: Sequence[str]) -> None:
        self.page.set(metrics=",".join(metrics) or None)
        self.show(self.rows, self.colours)

    def _rename(self, event: GenericEventArguments) -> None:
        [run] = [one for one in self.page.chosen if one.name == event.args["run"]]
        try:
            give_name(run, str(event.args["name"]))
        except OSError as error:
            self.page.problems("name", [f"{run.path}: cannot be named: {error.strerror}"])
            return
        ui.navigate.reload()


def _different(page: Page) -> str:
    """Returns as HTML the flags that were given and that not all of the runs have alike, a row each, by the sections of
    `swift rlhf --help`; folded below them those that follow from them or from a default."""
    runs = page.chosen
    specs = flag_specs(RlhfArguments)
    places = {name: place for place, name in enumerate(specs)}
    given: list[dict[str, str]] = []
    others: list[dict[str, str]] = []
    different = different_flags(runs)
    for name in sorted(different, key=lambda name: places.get(name, len(places))):
        rows = given if was_given(name, runs) else others
        section = specs[name].group if name in specs else "Others"
        row = {"section": section, "flag": f"--{name}"}
        names = [page.names[run.name] for run in runs]
        rows.append(row | dict(zip(names, different[name], strict=True)))
    number = f"{len(given)} flag{'s differ' if len(given) > 1 else ' differs'}"
    text = _by_section(given) if given else ""
    if others:
        more = f"<summary>{len(others)} more by default</summary>"
        text += f"<details>{more}{_by_section(others)}</details>"
    summary = number if given else "no flag differs"
    return f"<details><summary>{summary}</summary>{text}</details>"


def _by_section(rows: Sequence[Mapping[str, str]]) -> str:
    """Returns the table, with each section named once."""
    shown: list[dict[str, str]] = []
    before = ""
    for row in rows:
        named = "" if row["section"] == before else row["section"]
        before = row["section"]
        shown.append({**row, "section": named})
    return table(shown)
