"""The completions of a run: searched, filtered, sorted, a page at a time."""

from __future__ import annotations

import asyncio
from typing import Any

from nicegui import ui
from nicegui.events import GenericEventArguments

from swift_r1.errors import UsageError
from swift_r1.lab.runs.completions import CompletionTable
from swift_r1.lab.runs.query import FAILURE, LENGTH, CompletionQuery, read_conditions
from swift_r1.lab.view.completion_html import Row, length_column, reward_columns, rows_table
from swift_r1.lab.view.elements import next_item_keys, of_choice, table_of
from swift_r1.lab.view.shell import Latest, Page, view_page

ROWS = 50
_READ_S = 0.3  # of a long file at once, before what was read is shown
_LAST_STEP = 2**63 - 1  # that a column of steps can hold
_REASONS = ("stop", "length", "abort")


@view_page("/completions", "Completions", go="c")
async def completions(page: Page) -> None:
    await _Completions(page, await table_of(page, seconds=_READ_S)).show(" so far")


class _Completions:
    """The controls, and the table that follows them and the address."""

    def __init__(self, page: Page, table: CompletionTable) -> None:
        self.page = page
        self.table = table
        self.latest = Latest()
        of_choice(page)
        with ui.element("form").classes("view-row").on("submit.prevent", js_handler="() => {}"):
            self._text("q", "search in prompts and completions").props("data-search")
            self._text("where", "where: reward>=0.5; nums contains 25").classes("grow")
            self._text("step", "step, or 10-20").classes("narrow")
            self._text("prompt", "prompt id").classes("narrow")
            self._choice("finish", "finish reason", list(_REASONS))
            self._choice("sort", "sorted by", self._sortable())
            self._switch()
        self.said = ui.label().props('role="status"').classes("said")
        self.rows = ui.html("", sanitize=False).classes("view-scroll")
        self.rows.on("click", self._sorted, js_handler=_SORTED)
        with ui.element("div").classes("view-row"):
            self.back = ui.button("‹ page", on_click=lambda: self._turn(-1)).props(
                'flat dense data-key="ArrowLeft [" title="previous page"'
            )
            self.forth = ui.button("page ›", on_click=lambda: self._turn(1)).props(
                'flat dense data-key="ArrowRight ]" title="next page"'
            )
        next_item_keys()
        ui.timer(0.05, self._rest, once=True)
        page.follow(self._grown)

    async def _rest(self) -> None:
        """Reads on after the first view of a long file."""
        while await asyncio.to_thread(self.table.refresh, _READ_S):
            await self.show(" so far")
        await self.show()

    async def show(self, more: str = "") -> None:
        """Shows what the address asks for; `more` is said of how many there are."""
        self.state = self.table.state
        try:
            found = await self.latest(self._found)
        except (UsageError, ValueError) as error:
            self.said.set_text(str(error))
            return
        if found is None:
            return
        query, number, count, rows = found
        columns = self._columns(query)
        self.rows.set_content(
            rows_table(rows, columns, query.order_by, query.descending, self._link)
        )
        first = number * ROWS + 1
        self.said.set_text(
            f"{first:,} to {first + len(rows) - 1:,} of {count:,}{more}"
            if rows
            else "No completions match"
        )
        self.back.set_enabled(number > 0)
        self.forth.set_enabled((number + 1) * ROWS < count)
        self.page.problems(self.table, self.table.problems)

    def _found(self) -> tuple[CompletionQuery, int, int, list[dict[str, Any]]]:
        """Returns what is asked for, which page of it, how many rows there are, and those of the page."""
        query = self._query()
        count = self.table.count(query)
        number = max(0, min(self.page.whole("page", 0), (count - 1) // ROWS))
        return query, number, count, self.table.page(query, number * ROWS, ROWS)

    def _query(self) -> CompletionQuery:
        text = self.page.text
        return CompletionQuery(
            steps=_steps(text("step")),
            prompt_id=text("prompt") or None,
            finish_reason=text("finish") or None,
            text=text("q") or None,
            where=read_conditions(text("where")),
            order_by=text("sort") or None,
            descending=self.page.flag("desc"),
        )

    def _columns(self, query: CompletionQuery) -> list[str]:
        """Returns the columns that are always shown, and those that the query is about."""
        asked = [query.order_by, *(column for column, _, _ in query.where)]
        known = self.table.columns
        own = [
            "step",
            "group",
            "prompt_id",
            "completion",
            "reward",
            *reward_columns(known),
            "advantage",
        ]
        own += ["finish_reason", length_column(known), FAILURE]
        return list(dict.fromkeys([*own, *(name for name in asked if name)]))

    def _link(self, row: Row) -> str:
        of = self.page.text("of") or None
        request = row.get("request_id") if of else None
        address = self.page.link(
            "/group",
            step=row.get("step"),
            group=row.get("group"),
            of=of,
            request=request,
        )
        return address if row.get("number") is None else f"{address}#n{row['number']}"

    def _sortable(self) -> list[str]:
        return list(
            dict.fromkeys(["step", "reward", "advantage", LENGTH, FAILURE, *self.table.columns])
        )

    async def _change(self, **values: Any) -> None:
        """A control was changed: the first page of what is asked for now."""
        self.page.set(page=None, **{name: value or None for name, value in values.items()})
        await self.show()

    async def _turn(self, pages: int) -> None:
        self.page.set(page=max(0, self.page.whole("page", 0) + pages) or None)
        await self.show()

    async def _sorted(self, event: GenericEventArguments) -> None:
        name = str(event.args)
        again = name == self.page.text("sort")
        await self._change(sort=name, desc=not self.page.flag("desc") if again else True)

    async def _grown(self) -> None:
        """New rows are shown where they belong; a reader of a later page is left alone."""
        await asyncio.to_thread(self.table.refresh)
        if self.table.state != self.state and not self.page.whole("page", 0):
            await self.show()

    def _text(self, name: str, label: str) -> ui.input:
        field = ui.input(label, value=self.page.text(name)).props(
            "dense outlined clearable debounce=250"
        )
        return field.on_value_change(lambda event: self._change(**{name: event.value}))

    def _choice(self, name: str, label: str, options: list[str]) -> ui.select:
        value = self.page.text(name)
        options = [*options, value] if value and value not in options else options
        field = ui.select(
            options,
            label=label,
            value=value or None,
            clearable=True,
            with_input=len(options) > 8,
        )
        field.props("dense outlined options-dense").classes("narrow")
        return field.on_value_change(lambda event: self._change(**{name: event.value}))

    def _switch(self) -> None:
        field = ui.checkbox("descending", value=self.page.flag("desc")).props("dense")
        field.on_value_change(lambda event: self._change(desc=event.value))


_SORTED = "(event) => { const name = event.target.closest('[data-sort]')?.dataset.sort; if (name) emit(name); }"


def _steps(text: str) -> tuple[int, int] | None:
    """`12` or `10-20`. Raises UsageError for anything else."""
    if not text.strip():
        return None
    first, _, last = text.partition("-")
    try:
        return min(int(first), _LAST_STEP), min(int(last or first), _LAST_STEP)
    except ValueError:
        raise UsageError(f"step {text!r}: write a number, or two with - between them") from None
