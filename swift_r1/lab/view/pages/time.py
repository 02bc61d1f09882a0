"""What the time of each process, server and pool of workers went into, and how much of it was waited."""

from __future__ import annotations

from collections.abc import Mapping

from nicegui import ui

from swift_r1.lab.runs.timeline import Timeline
from swift_r1.lab.view.markup import table
from swift_r1.lab.view.shell import Page, in_order, opened, view_page
from swift_r1.record.folder import RunFolder

_PHASES = ("generate", "reward", "train", "sync", "evaluate", "save", "wait")  # the first columns


@view_page("/time", "Time", go="t", compares=True)
async def time_page(page: Page) -> None:
    for run in page.chosen:
        if len(page.chosen) > 1:
            ui.label(page.names[run.name]).classes("view-run-name").props(
                'role="heading" aria-level="2"'
            )
        await _TimeOfRun(page, run).build()


class _TimeOfRun:
    """The page's part on one run."""

    def __init__(self, page: Page, run: RunFolder) -> None:
        self.page = page
        self.run = run
        self.timeline = opened(Timeline, run.path)
        self.seen: object = ()  # nothing yet, not even that there is nothing

    async def build(self) -> None:
        self.idle = ui.label().classes("view-idle")
        self.table = ui.html("", sanitize=False).classes("view-scroll")
        await self._look()
        self.page.follow(self._look)

    async def _look(self) -> None:
        """Shows what is new."""
        await in_order(self.timeline.refresh)
        name = self.page.names[self.run.name]
        self.page.problems(self.timeline, [f"{name}: {line}" for line in self.timeline.problems])
        if self.timeline.extent == self.seen:
            return
        self.seen = self.timeline.extent
        lanes = {lane: self.timeline.totals(lane) for lane in self.timeline.lanes}
        if not lanes or self.timeline.extent is None:
            live = RunFolder(self.run.path, self.run.name).status == "running"
            self.idle.text = (
                "No times yet: the first appear with step 1."
                if live
                else "This run recorded no times."
            )
            return
        start, end = self.timeline.extent
        whole = end - start
        lane, seconds = next(iter(lanes.items()))
        self.idle.text = f"{lane} was idle for {idle(seconds, whole)} % of {whole:,.0f} s"
        present = {name for seconds in lanes.values() for name in seconds}
        names = [*(name for name in _PHASES if name in present), *sorted(present - {*_PHASES})]
        self.table.content = table(
            [
                {"share of the time, %": lane, "idle": idle(seconds, whole)}
                | {name: _percent(seconds.get(name, 0.0), whole) for name in names}
                for lane, seconds in lanes.items()
            ]
        )


def idle(seconds: Mapping[str, float], whole: float) -> str:
    """Returns the share of a time in which a lane did nothing but wait, in percent."""
    busy = sum(value for name, value in seconds.items() if name != "wait")
    return _percent(max(0.0, whole - busy), whole)


def _percent(seconds: float, whole: float) -> str:
    return f"{100 * seconds / (whole or 1):.1f}"
