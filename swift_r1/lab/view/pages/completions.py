"""The completions of a run: searched, filtered, sorted, a page at a time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from nicegui import ui
from nicegui.events import GenericEventArguments

from swift_r1.errors import UsageError
from swift_r1.lab.runs.completions import CompletionTable
from swift_r1.lab.runs.query import (
    FAILURE,
    CompletionQuery,
    Condition,
    condition_parts,
    read_conditions,
)
from swift_r1.lab.view.completion_html import (
    Row,
    reward_columns,
    rows_table,
    short,
)
from swift_r1.lab.view.elements import (
    SORTED,
    Pager,
    busy_bar,
    next_item_keys,
    nothing,
    of_choice,
    sort_again,
    table_of,
)
from swift_r1.lab.view.shell import Latest, Page, view_page

T = TypeVar("T")
ROWS = 50
_READ_S = 0.3  # of a long file, before what was read is shown
_MORE_S = 2.0  # of it at once, after that
_LAST_STEP = 2**63 - 1  # that a column of steps can hold
_NOTHING = "() => {}"
_CHIPS = {"wrong": "class!=right", "cut off": "finish_reason=length"}


@view_page("/completions", "Completions", go="c")
async def completions(page: Page) -> None:
    shown = _Completions(page, await table_of(page, seconds=_READ_S))
    # what must read all lines may take longer than a browser waits for an answer
    if not (page.text("q") or page.text("where")):
        await shown.show(" so far")


class _Completions:
    """The controls, and the table that follows them and the address."""

    def __init__(self, page: Page, table: CompletionTable) -> None:
        self.page = page
        self.table = table
        self.state = table.state  # that is shown
        self.latest = Latest()
        self.fields: dict[str, ui.input] = {}
        with ui.element("div").classes("view-row"):
            of_choice(page)
            self._text("q", "search in prompts and completions").props("data-search").classes(
                "grow"
            )
            self.chips = {
                condition: ui.button(title, on_click=partial(self._flip, condition)).props(
                    f'dense no-caps rounded title="{condition}"'
                )
                for title, condition in _CHIPS.items()
            }
            self._mark_chips()
        with ui.element("details").props("open" if self._filtered() else "") as self.more:
            ui.html("more filters", sanitize=False, tag="summary")
            with ui.element("form").classes("view-row").on("submit.prevent", js_handler=_NOTHING):
                self._text("where", "where: reward>=0.5; nums contains 25").classes("grow")
                self._text("step", "step, or 10-20").classes("narrow")
                self._text("prompt", "prompt id").classes("narrow")
        self.busy = busy_bar()
        with ui.element("div").classes("view-row"):
            self.said = ui.label().props('role="status"').classes("said")
            above = Pager(self._turn, keys=True)
        self.rows = ui.html("", sanitize=False).classes("view-scroll")
        self.rows.on("click", self._sorted, js_handler=SORTED)
        self.pagers = (above, Pager(self._turn))
        next_item_keys()
        ui.timer(0.05, self._rest, once=True)
        page.follow(self._grown)

    async def _rest(self) -> None:
        """Reads on after the first view of a long file."""
        while await asyncio.to_thread(self.table.refresh, _MORE_S):
            await self.show(" so far")
        await self.show()

    async def show(self, more: str = "") -> None:
        """Shows what the address asks for; `more` is said of how many there are. A fault is said at its field, and what
        was shown stays."""
        self.state = self.table.state
        query = self._query()
        if query is None:
            self.more.props("open")
            return
        self.busy.set_visibility(True)
        found = await self.latest(self._found, query)
        if found is None:
            return
        self.busy.set_visibility(False)
        number, count, rows = found
        links = {"completion": self._group, "prompt_id": self._prompt}
        self.rows.set_content(
            rows_table(
                rows,
                self._columns(query),
                query.order_by,
                query.descending,
                links,
                self.page.text("q"),
            )
            if rows
            else ""
        )
        first = number * ROWS + 1
        self.said.set_text(
            f"{first:,} to {first + len(rows) - 1:,} of {count:,}{more}"
            if rows
            else nothing(self.page, "completions", bool(self.table.steps()))
        )
        for pager in self.pagers:
            pager.show(number, math.ceil(count / ROWS))
        self.page.problems(self.table, self.table.problems)

    def _found(self, query: CompletionQuery) -> tuple[int, int, list[dict[str, Any]]]:
        """Returns which page is shown, how many rows there are, and those of the page."""
        count = self.table.count(query)
        number = max(0, min(self.page.whole("page", 0), (count - 1) // ROWS))
        return number, count, self.table.page(query, number * ROWS, ROWS)

    def _query(self) -> CompletionQuery | None:
        """Returns what the address asks for; None, said at its field, if it cannot be read."""
        text = self.page.text
        steps = self._read("step", _steps)
        where = self._read("where", self._conditions)
        if any(field.error for field in self.fields.values()):
            return None
        return CompletionQuery(
            steps=steps,
            prompt_id=text("prompt") or None,
            text=text("q") or None,
            where=where or (),
            order_by=text("sort") or None,
            descending=self.page.flag("desc"),
        )

    def _read(self, name: str, read: Callable[[str], T]) -> T | None:
        try:
            found = read(self.page.text(name))
        except UsageError as error:
            self.fields[name].error = str(error)
            return None
        self.fields[name].error = None
        return found

    def _conditions(self, text: str) -> list[Condition]:
        """Reads conditions on columns by their names, or those of the headings."""
        known = self.table.columns
        names = {short(name): name for name in known} | {name: name for name in known}
        found = [(names.get(column, column), *rest) for column, *rest in read_conditions(text)]
        unknown = [column for column, *_ in found if known and column not in names.values()]
        if unknown:
            raise UsageError(f"no column {unknown[0]!r}: {', '.join(map(short, known))}")
        return found

    def _columns(self, query: CompletionQuery) -> list[str]:
        """Returns the columns that are always shown, and those that the query is about."""
        asked = [query.order_by, *(column for column, _, _ in query.where)]
        known = self.table.columns
        own = ["step", "group", "prompt_id", "prompt", "completion", "reward"]
        own += [*reward_columns(known), "advantage", "tokens", FAILURE]
        if self.page.text("of") == "eval":
            own.remove("advantage")
        return list(dict.fromkeys([*own, *(name for name in asked if name)]))

    def _group(self, row: Row) -> str:
        of = self.page.text("of") or None
        address = self.page.link(
            "/group",
            step=row.get("step"),
            group=row.get("group"),
            of=of,
            request=row.get("request_id") if of else None,
            q=self.page.text("q") or None,
        )
        return address if row.get("number") is None else f"{address}#n{row['number']}"

    def _prompt(self, row: Row) -> str:
        of = self.page.text("of") or None
        return self.page.link("/completions", prompt=row.get("prompt_id"), of=of)

    async def _change(self, **values: Any) -> None:
        """A control was changed: the first page of what is asked for now."""
        self.page.set(page=None, **{name: value or None for name, value in values.items()})
        self._mark_chips()
        await self.show()

    async def _turn(self, number: int) -> None:
        if number != self.page.whole("page", 0):
            self.page.set(page=number or None)
            await self.show()

    async def _sorted(self, event: GenericEventArguments) -> None:
        await self._change(**sort_again(self.page, str(event.args)))

    async def _grown(self) -> None:
        """New rows are shown where they belong; a reader of a later page is left alone."""
        await asyncio.to_thread(self.table.refresh)
        if self.table.state != self.state and not self.page.whole("page", 0):
            await self.show()

    def _filtered(self) -> bool:
        return any(self.page.text(name) for name in ("where", "step", "prompt"))

    def _text(self, name: str, label: str) -> ui.input:
        field = ui.input(label, value=self.page.text(name)).props(
            "dense outlined clearable debounce=250"
        )
        self.fields[name] = field.without_auto_validation()
        return field.on_value_change(lambda event: self._change(**{name: event.value}))

    def _flip(self, condition: str) -> None:
        """Adds the condition of a chip to `where`, or takes it out."""
        parts = self._parts()
        rest = [part for part in parts if part != condition]
        self.fields["where"].value = "; ".join(
            rest if len(rest) < len(parts) else [*rest, condition]
        )

    def _parts(self) -> list[str]:
        return [part.strip() for part in condition_parts(self.page.text("where"))]

    def _mark_chips(self) -> None:
        for condition, chip in self.chips.items():
            on = condition in self._parts()
            chip.props(f"aria-pressed={str(on).lower()} {'unelevated' if on else 'outline'}")
            chip.props(remove="outline" if on else "unelevated")


def _steps(text: str) -> tuple[int, int] | None:
    """`12` or `10-20`. Raises UsageError for anything else."""
    if not text.strip():
        return None
    first, _, last = text.partition("-")
    try:
        return min(int(first), _LAST_STEP), min(int(last or first), _LAST_STEP)
    except ValueError:
        raise UsageError(f"step {text!r}: write a number, or two with - between them") from None
