"""The tables of a sweep: its runs, and in the end its points."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from swift_r1.lab.report.blocks import Note, Section, Table
from swift_r1.lab.runs.progress import progress_of
from swift_r1.lab.sweep.judging import Ranked
from swift_r1.lab.sweep.running import State, Sweep, SweepRun
from swift_r1.runtime.terminal import duration

_NAME = 40  # columns for the name of a run or point, at least, where it needs them
_STYLES: dict[State, str] = {
    "running": "bold",
    "stopping": "bold",
    "failed": "red",
    "interrupted": "yellow",
    "stopped": "yellow",
    "waiting": "dim",
    "ended": "green",
}


def change(sweep: Sweep, run: SweepRun) -> Text:
    """Returns a line about the state that a run has come to."""
    now = progress_of(run.folder, run.log) if run.log.last_step and run.state != "running" else {}
    where = str(run.output) if run.state == "failed" else ""
    more = filter(None, (run.why, now.get("progress"), now.get("time"), where))
    done = sweep.count("ended", "stopped", "failed")
    return Text(f"[{done}/{len(sweep.runs)}] {'; '.join((f'{run.plan.name}: {run.state}', *more))}")


def runs_table(sweep: Sweep) -> RichTable:
    """Returns a table of all runs, those first that live or have failed."""
    left = sweep.seconds_left()
    rest = (
        ""
        if left is None or not sweep.count("waiting", "running")
        else f", about {duration(left)} left"
    )
    states: tuple[State, ...] = ("ended", "stopped", "failed", "running", "waiting")
    counts = ", ".join(f"{number} {state}" for state in states if (number := sweep.count(state)))
    table = RichTable(
        title=f"{counts}{rest}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    longest = max((len(run.plan.name) for run in sweep.runs), default=0)
    table.add_column("run", overflow="fold", min_width=min(longest, _NAME))
    for name in ("state", "progress"):
        table.add_column(name, no_wrap=True)
    for name in (sweep.args.metric, "time"):
        table.add_column(name, justify="right", overflow="fold")
    order = list(_STYLES)
    # of too many the last ones are not seen
    for run in sorted(sweep.runs, key=lambda run: order.index(run.state)):
        now = progress_of(run.folder, run.log) if run.plan.folder.is_dir() else {}
        value = run.value(sweep.args.metric, sweep.args.over)
        shown = "" if math.isnan(value) else f"{value:.4g}"
        words = (
            run.plan.name,
            run.state,
            now.get("progress", "").split(",")[0],
            shown,
            now.get("time", ""),
        )
        table.add_row(*map(Text, words), style=_STYLES[run.state])
    return table


def section(sweep: Sweep, order: Sequence[Ranked]) -> Section:
    """Returns the points and how sure their order is, as a report says it."""
    metric = sweep.args.metric
    over = sweep.args.over
    runs = sweep.runs
    rows = []
    reasons = []
    unranked = list(dict.fromkeys(run.plan.point for run in runs))
    for one in order:
        interval = "" if one.half_width is None else f" ± {one.half_width:.2g}"
        spread = f"{min(one.values):.4g} to {max(one.values):.4g}"
        rows.append(
            [one.point, f"{one.mean:.4g}{interval}", spread, str(len(one.values)), one.against_best]
        )
        unranked.remove(one.point)
    for point in unranked:
        own = [run for run in runs if run.plan.point == point]
        ended = sum(run.state == "ended" for run in own)
        why = sweep.stopped.get(point) or next((run.why for run in own if run.why), "")
        what = (
            "stopped"
            if point in sweep.stopped
            else "not all have ended"
            if ended < len(own)
            else f"no {metric}"
        )
        rows.append([point, "", "", f"{ended} of {len(own)}", what])
        if why:
            reasons.append(Note(f"{point}: {what}: {why}."))
    text = (
        f"The mean is of {metric} over the last {over} steps of each run; ± is half of its 95 % interval over seeds "
        "(Student). Worse than the best: by Welch's test at 5 %, divided by the number of comparisons. "
    )
    table = Table(["point", "mean", "lowest to highest", "seeds", "against the best"], rows)
    return Section("The sweep", [table, *reasons, Note(text + _verdict(order))])


def _verdict(order: Sequence[Ranked]) -> str:
    if not order:
        return "No point has ended with all of its seeds, so none is best."
    best = order[0]
    alike = [one.point for one in order[1:] if one.against_best != "worse"]
    if alike and best.half_width is None:
        return f"Best: {best.point}, by one seed each, so perhaps by chance."
    if alike:
        return f"Best: {best.point}, which these seeds do not tell apart from {', '.join(alike)}."
    return f"Best: {best.point}."


def print_section(found: Section, console: Console) -> None:
    for block in found.blocks:
        if isinstance(block, Table):
            table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
            longest = max((len(row[0]) for row in block.rows), default=0)
            for place, name in enumerate(block.head):
                least = 0 if place else min(longest, _NAME)
                table.add_column(
                    name,
                    overflow="fold",
                    justify="right" if 0 < place < 4 else "left",
                    min_width=least,
                )
            for row in block.rows:
                table.add_row(*map(Text, row))
            console.print(table)
        elif isinstance(block, Note):
            console.print(Text(block.text), soft_wrap=True)
