"""The frame of every page, with runs, navigation, theme and keys; what the address says, and follows; the timer that
looks for what a growing run has written.

A page is a function of `Page`, registered by `@view_page("/time", "Time", go="t")` in a module of `view/pages/`. What a
control changes goes into the address with `page.set`, so that a link shows what its sender saw. An element with
`data-key="j ArrowRight"` is clicked by those keys, one with `data-search` is focused by `/`; the list of keys (`?`)
is made of these elements and their titles.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

from fastapi import FastAPI, Request, Response
from nicegui import Client, ui
from starlette.staticfiles import StaticFiles

from swift_r1.errors import UsageError
from swift_r1.lab.report.colours import SERIES_DARK, SERIES_LIGHT
from swift_r1.lab.runs.names import names_of
from swift_r1.record.folder import RunFolder, find_runs
from swift_r1.runtime.processes import run_folder_is_held

T = TypeVar("T")
logger = logging.getLogger(__name__)
FOLLOW_S = 2.0
"""Seconds between two looks at a run that grows."""
_MOST_OPENED = 32  # readers of runs that are kept, the last used ones
_MOST_COMPARED = 6  # runs that are shown together without being asked for one by one
_STATIC = Path(__file__).parent / "static"
FAVICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" rx="3" fill="#0072b2"/>'
    '<path d="M2 12 6 8l3 2 5-7" fill="none" stroke="#fff" stroke-width="2"/></svg>'
)


@dataclass(frozen=True, slots=True)
class _Link:
    path: str
    title: str
    go: str


_navigation: list[_Link] = []
_folders: Sequence[str] = ()
_thread = ThreadPoolExecutor(1, "swift-view-reading")
_opened: OrderedDict[tuple[Callable[..., Any], Path], Any] = OrderedDict()


def set_runs(folders: Sequence[str]) -> None:
    """The folders to look for runs in, again with every page: a new run is found."""
    global _folders
    _folders = tuple(folders)


def opened(reader: Callable[[Path], T], path: Path) -> T:
    """`reader(path)`, made once for all pages. Of many the one that was asked for longest ago is let go: it lives on
    as long as an open page has it."""
    key = (reader, path)
    if key not in _opened:
        _opened[key] = reader(path)
        if len(_opened) > _MOST_OPENED:
            _opened.popitem(last=False)
    _opened.move_to_end(key)
    found: T = _opened[key]
    return found


async def in_order(work: Callable[..., T], *args: Any) -> T:
    """`work(*args)` in the one thread that reads, after what was asked before: readers need no locks, and the page
    answers meanwhile."""
    return await asyncio.get_running_loop().run_in_executor(_thread, work, *args)


class Latest:
    """The latest state of one part of a page, read in threads; None for what was asked for again meanwhile."""

    def __init__(self) -> None:
        self._asked = 0

    async def __call__(self, work: Callable[..., T], *args: Any) -> T | None:
        self._asked += 1
        mine = self._asked
        try:
            found = await asyncio.to_thread(work, *args)
        except Exception:
            if mine == self._asked:
                raise
            logger.info("what was asked for again meanwhile had failed", exc_info=True)
            return None
        return found if mine == self._asked else None


@dataclass(eq=False)
class Page:
    """One view of one browser tab: the chosen runs, and what the address says beside them.

    Attributes:
        runs: all that were found, the newest first.
        chosen: those that `?run=` names, in its order; without it those that `swift view` was given, the newest first,
            or the newest alone where it was given none.
        query: the other parameters of the address.
        names: by `RunFolder.name` what each run is called here (`lab/runs/names.py`).
    """

    path: str
    runs: list[RunFolder]
    chosen: list[RunFolder]
    query: dict[str, str]
    names: dict[str, str] = field(init=False)
    _callbacks: list[Callable[[], Any]] = field(default_factory=list)
    _problems: dict[Hashable, list[str]] = field(default_factory=dict)
    _problem_lines: ui.column | None = None
    _following: ui.button | None = None

    def __post_init__(self) -> None:
        self.names = {}
        for runs in (self.runs, self.chosen):  # the chosen are told apart from one another
            self.names |= zip((run.name for run in runs), names_of(runs), strict=True)

    @property
    def run(self) -> RunFolder:
        """Returns the first chosen run, which a page of one run shows."""
        return self.chosen[0]

    def text(self, name: str, default: str = "") -> str:
        return self.query.get(name, default)

    def number(self, name: str, default: float) -> float:
        """Returns a parameter as a number; what is none, or a very large one, is the default."""
        try:
            value = float(self.query[name])
        except (KeyError, ValueError):
            return default
        return value if abs(value) < 2**53 else default

    def whole(self, name: str, default: int) -> int:
        return int(self.number(name, default))

    def flag(self, name: str, default: bool = False) -> bool:
        return self.query.get(name, "1" if default else "0") not in ("0", "false", "")

    def set(self, **values: str | float | bool | None) -> None:
        """Changes parameters of the address (None: leaves them out), without a load or an entry in the history."""
        for name, value in values.items():
            if value is None:
                self.query.pop(name, None)
            else:
                self.query[name] = str(int(value)) if isinstance(value, bool) else f"{value}"
        ui.run_javascript(
            f"view.address({json.dumps({name: self.query.get(name) for name in values})})"
        )

    def link(self, path: str, **values: object) -> str:
        """Returns the address of another page for the chosen runs; parameters that are None are left out."""
        given = [(name, value) for name, value in values.items() if value is not None]
        return f"{path}?{urlencode([*(('run', run.name) for run in self.chosen), *given], errors='replace')}"

    def link_of(self, run: RunFolder, path: str, **values: object) -> str:
        """Returns the same with `run`, one of the chosen, before the others."""
        others = [("run", other.name) for other in self.chosen if other is not run]
        return (
            f"{path}?{urlencode([('run', run.name), *others, *values.items()], errors='replace')}"
        )

    def follow(self, callback: Callable[[], Awaitable[None] | None]) -> None:
        """Calls `callback` every `FOLLOW_S` seconds, unless the page is paused."""
        self._callbacks.append(callback)

    def problems(self, reader: Hashable, lines: Sequence[str]) -> None:
        """Says, a line each, what `reader` could not read or show; no longer what it said before."""
        if self._problem_lines is None or self._problems.get(reader, []) == list(lines):
            return
        self._problems[reader] = list(lines)
        self._problem_lines.clear()
        with self._problem_lines:
            for line in dict.fromkeys(chain.from_iterable(self._problems.values())):
                ui.label(line).classes("view-problem")

    def _problems_of_runs(self) -> None:
        for run in self.chosen:
            self.problems(run, [f"{self.names[run.name]}: {line}" for line in run.problems])

    async def _tick(self) -> None:
        self._show_following()
        gone = [run for run in self.chosen if not run.path.is_dir()]
        self.problems(
            "gone", [f"{run.path} was removed: this is what was read of it before" for run in gone]
        )
        if gone or not self.flag("follow", True):
            return
        for callback in self._callbacks:
            result = callback()
            if inspect.isawaitable(result):
                await result
        self._problems_of_runs()

    def _show_following(self) -> None:
        """Says whether the page follows the runs, and by a click stops or goes on."""
        assert self._following is not None
        follows = self.flag("follow", True)
        is_live = any(run_folder_is_held(run.path) for run in self.chosen)
        self._following.text = ("● following" if is_live else "ended") if follows else "▮▮ paused"


def view_page(
    path: str,
    title: str,
    go: str = "",
    compares: bool = False,
) -> Callable[[Callable[[Page], Any]], Callable[[Page], Any]]:
    """Registers a page. With `go`, a letter, it is in the navigation, and `g` and that letter go there. It shows the
    first chosen run, which its heading then names, or `compares` all of them. The decorated function builds it; it may
    be a coroutine, and raise UsageError for an address that names nothing."""

    def register(build: Callable[[Page], Any]) -> Callable[[Page], Any]:
        if go:
            _navigation.append(_Link(path, title, go))

        @ui.page(path, title=f"{title} · swift view", response_timeout=30.0)
        async def shown(request: Request) -> None:
            try:
                page = await asyncio.to_thread(_page, path, request)
            except UsageError as error:
                ui.context.client.status_code = 404
                _not_found(error.faults)
                return
            of_one = compares or len(page.chosen) == 1
            _frame(page, title if of_one else f"{title}: {page.names[page.run.name]}")
            with ui.column().classes("view-main"):
                try:
                    result = build(page)
                    if inspect.isawaitable(result):
                        await result
                except UsageError as error:
                    ui.label(str(error)).classes("view-problem")
            page.problems(
                "folders", [f"{folder}: there is no such folder any more" for folder in _gone()]
            )
            page._problems_of_runs()
            ui.timer(FOLLOW_S, page._tick)

        return build

    return register


def add_static(app: FastAPI) -> None:
    """The page's own style and script, and the series' colours as `--series-0` ..., which follow the theme."""
    app.mount("/static", StaticFiles(directory=_STATIC), name="view")
    light, dark = (
        "".join(f"--series-{number}:{colour};" for number, colour in enumerate(colours))
        for colours in (SERIES_LIGHT, SERIES_DARK)
    )
    ui.add_head_html(
        f'<style>:root{{{light}}}body.body--dark{{{dark}}}</style><link rel="stylesheet" href="/static/shell.css">'
        '<script src="/static/shell.js"></script>',
        shared=True,
    )


def _gone() -> list[str]:
    """Returns the folders to look for runs in that were removed since the start."""
    return [folder for folder in _folders if not Path(folder).expanduser().exists()]


def _found_runs() -> list[RunFolder]:
    """Returns the runs that are there, the newest first. Raises UsageError: there is none."""
    gone = _gone()
    return find_runs([folder for folder in _folders if folder not in gone] or _folders)[::-1]


def _page(path: str, request: Request) -> Page:
    """Returns the page that an address shows. Raises UsageError: there is no run, or none of a name in it."""
    runs = _found_runs()
    by_name = {run.name: run for run in runs}
    names = request.query_params.getlist("run")
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise UsageError(
            f"there is no run {', '.join(map(repr, unknown))} here: {', '.join(by_name)}"
        )
    query = {name: value for name, value in request.query_params.items() if name != "run"}
    # those that were named are meant to be compared
    given = runs[: _MOST_COMPARED if _folders else 1]
    return Page(path, runs, [by_name[name] for name in dict.fromkeys(names)] or given, query)


def _not_found(faults: Sequence[str]) -> None:
    """Builds the page where there is nothing to show: the frame, and why."""
    try:
        runs = _found_runs()
    except UsageError:
        runs = []
    page = Page("", runs, [], {})
    _frame(page, "Not found")
    page.problems("not found", faults)


async def no_such_page(request: Request, error: Exception) -> Response:
    """Answers for an address that is no page, within the frame of those that are."""
    with Client(ui.page(""), request=request) as client:
        _not_found([f"There is no page {request.url.path}."])
    return client.build_response(request, 404)


def _frame(page: Page, title: str) -> None:
    with ui.element("header").classes("view-header"):
        with ui.element("nav").props('aria-label="pages"'):
            for link in _navigation:
                shown = ui.link(link.title, page.link(link.path)).props(
                    f'data-go="{link.go}" title="g {link.go}"'
                )
                if link.path == page.path:
                    shown.props('aria-current="page"')
        with ui.element("div").classes("view-tools"):
            _run_choice(page)
            follow = ui.button().props("flat dense no-caps").classes("view-follow")
            follow.props('data-key="p" title="follow the run while it trains, or pause"')
            page._following = follow
            page._show_following()

            def toggle() -> None:
                page.set(follow=not page.flag("follow", True))
                page._show_following()

            follow.on_click(toggle)
            ui.html(
                '<button class="view-theme" data-key="t" title="theme: as the system, light, dark" '
                'aria-label="theme: as the system, light, dark"></button>'
                '<button class="view-keys" data-key="?" title="these keys" aria-label="keys">?</button>',
                sanitize=False,
            )
    page._problem_lines = ui.column().classes("view-problems")
    style = "view-title" if page.path != "/" else "view-title-hidden"  # the headline says more
    ui.label(title).classes(style).props('role="heading" aria-level="1"')


def _run_choice(page: Page) -> None:
    names = [run.name for run in page.chosen]
    choice = ui.select(
        {run.name: page.names[run.name] for run in page.runs},
        value=names,
        multiple=True,
        with_input=len(page.runs) > _MOST_COMPARED,
        label="runs",
    )
    choice.props(
        'dense options-dense outlined title="Runs shown. Single-run pages show the first."'
    )
    choice.classes("view-runs")

    def show() -> None:
        if choice.value and choice.value != names:
            ui.run_javascript(f"view.choose({json.dumps(choice.value)})")

    choice.on("popup-hide", show)
