"""The elements that the pages of completions and tokens have in common."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nicegui import ui

from swift_r1.lab.runs.completions import CompletionTable
from swift_r1.lab.view.coloured import token_css
from swift_r1.lab.view.shell import Page, opened
from swift_r1.record.folder import COMPLETIONS, EVAL_COMPLETIONS
from swift_r1.record.token_reader import RecordedCompletion, TokenRecord

ui.add_head_html(
    f'<link rel="stylesheet" href="/static/completions.css"><style>{token_css()}</style>',
    shared=True,
)
_NEXT = """() => {
  const all = [...document.querySelectorAll('[data-item]')].filter((one) => one.checkVisibility());
  const at = all.findLastIndex((one) => one.contains(document.activeElement));
  const to = all[Math.min(all.length - 1, Math.max(0, at + (%d)))];
  to?.focus(); to?.scrollIntoView({ block: 'nearest', inline: 'nearest' });
}"""


def _trained(run: Path) -> CompletionTable:
    return CompletionTable(run / COMPLETIONS)


def _evaluated(run: Path) -> CompletionTable:
    return CompletionTable(run / EVAL_COMPLETIONS)


async def table_of(page: Page, seconds: float = math.inf) -> CompletionTable:
    """Returns the completions of the page's first run, those of training, or where `of` in the address is "eval" those
    of evaluations; with what was written since, as far as it can be read in so many seconds."""
    table = opened(_evaluated if page.text("of") == "eval" else _trained, page.run.path)
    await asyncio.to_thread(table.refresh, seconds)
    return table


SORTED = "(event) => { const name = event.target.closest('[data-sort]')?.dataset.sort; if (name) emit(name); }"
"""For clicks on a table: emits the column of a heading (`rows_table`)."""


def sort_again(page: Page, name: str) -> dict[str, Any]:
    """Returns the parameters `sort` and `desc` after a click on a heading: the highest first, then the other way."""
    return {"sort": name, "desc": name != page.text("sort") or not page.flag("desc")}


def nothing(page: Page, what: str, some: bool = False) -> str:
    """Returns what stands in the place of rows; `some` if there are others."""
    if some:
        return f"No {what} match"
    return f"No {what} yet" if page.run.status == "running" else f"This run recorded no {what}"


def busy_bar() -> ui.linear_progress:
    """A bar at the top of the window, for work that takes longer than a moment."""
    bar = ui.linear_progress(show_value=False).props('indeterminate aria-label="reading"')
    bar.classes("view-busy").set_visibility(False)
    return bar


class Pager:
    """Page numbers; `turn` gets the one that was chosen, from 0. `keys` for one of those of a page."""

    def __init__(self, turn: Callable[[int], Any], keys: bool = False) -> None:
        self.numbers = ui.pagination(
            1,
            1,
            direction_links=True,
            on_change=lambda event: turn(int(event.value or 1) - 1),
        ).props("boundary-numbers max-pages=6")
        self.numbers.set_visibility(False)
        for key, step, title in (
            ("ArrowLeft [", -1, "previous page"),
            ("ArrowRight ]", 1, "next page"),
        ):
            if keys:
                hidden_key(key, title).on_click(lambda step=step: self._by(step))

    def show(self, number: int, pages: int) -> None:
        self.numbers.max = max(1, pages)
        self.numbers.value = number + 1
        self.numbers.set_visibility(pages > 1)

    def _by(self, step: int) -> None:
        self.numbers.value = min(self.numbers.max, max(1, int(self.numbers.value or 1) + step))


def hidden_key(key: str, title: str) -> ui.button:
    """A button that only keys press."""
    button = ui.button(title).props(f'flat dense no-caps data-key="{key}" title="{title}"')
    return button.classes("key-only")


def of_choice(page: Page) -> None:
    """Whether the page is about completions of training or of evaluations."""
    choice = ui.toggle({"": "training", "eval": "evaluations"}, value=page.text("of")).props(
        "dense no-caps flat"
    )

    def to(value: str | None) -> None:
        page.set(of=value, page=None)  # where it is not said, a page may choose
        ui.navigate.reload()

    choice.on_value_change(lambda event: to(event.value))


def next_item_keys(what: str = "completion") -> None:
    """`j` and `k` go to the next and the last completion (or `what` they are) of a page; each has `data-item`."""
    for key, step, title in (("j", 1, "next"), ("k", -1, "previous")):
        hidden_key(key, f"{title} {what}").on("click", js_handler=_NEXT % step)


def rich(html: str) -> ui.html:
    """HTML of ours, in which all that came from a run was made harmless (`markup`)."""
    return ui.html(html, sanitize=False).classes("rich")


def completions_of_round(record: TokenRecord, round_step: int) -> list[RecordedCompletion]:
    """Returns the recorded completions of a round, each of their sequences once, without their tokens."""
    by_sequence: dict[tuple[Any, ...], RecordedCompletion] = {}
    for step in record.steps():
        rows = record.completions(step) if step >= round_step else []
        if rows and min(row.round_step or 0 for row in rows) > round_step:
            break
        of_this = [row for row in reversed(rows) if row.round_step == round_step]
        by_sequence |= {(row.request_id, row.number, row.sequence): row for row in of_this}
    return sorted(
        by_sequence.values(), key=lambda row: (row.group or 0, row.number or 0, row.sequence or 0)
    )


def recorded(record: TokenRecord, step: int, of: str | None) -> set[tuple[str | None, int | None]]:
    """Request and number of the completions of a step (`of` as in `table_of`) whose tokens are recorded: none of
    evaluations."""
    return (
        {(row.request_id, row.number) for row in completions_of_round(record, step)}
        if of is None
        else set()
    )


def tokens_link(page: Page, row: Mapping[str, Any]) -> str:
    return page.link("/tokens", step=row["step"], request=row["request_id"], number=row["number"])
