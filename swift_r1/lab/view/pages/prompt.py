"""A prompt over time: the completions of one weight version beside those of the next, with what has changed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from nicegui import ui
from nicegui.events import GenericEventArguments

from swift_r1.errors import UsageError
from swift_r1.lab.report.parts import spread
from swift_r1.lab.runs.curves import Curve
from swift_r1.lab.view.charts import chart, line_options
from swift_r1.lab.view.completion_html import (
    about_prompt,
    card_of,
    data_columns,
    rows_table,
)
from swift_r1.lab.view.elements import (
    SORTED,
    Pager,
    busy_bar,
    next_item_keys,
    nothing,
    of_choice,
    recorded,
    rich,
    sort_again,
    table_of,
    tokens_link,
)
from swift_r1.lab.view.markup import markup, word_diff
from swift_r1.lab.view.message_html import prompt_block, shown
from swift_r1.lab.view.shell import Latest, Page, opened, view_page
from swift_r1.record.token_reader import TokenRecord

COLUMNS = 12  # that are shown at once, unless all are asked for
_LISTED = 50
_TEXT = 12_000  # characters of a completion
_PLAIN = ("prompt",)
_HEADS = ("prompt_id", "prompt", "steps", "completions", "first", "last", "change", "mean")
_ONCE = (
    "prompt_id",
    "prompt",
    "completions",
    "mean",
)  # of prompts that were in one step: no change


@view_page("/prompt", "Prompts", go="p", compares=True)
async def prompt(page: Page) -> None:
    if page.text("prompt"):
        await _over_time(page, page.text("prompt"))
    else:
        await _list(page)


async def _list(page: Page) -> None:
    """The prompts to choose from, with their rewards at the first and the last step that they were in, if several; those of
    evaluations, which come again and again, unless the address says otherwise."""
    if "of" not in page.query:
        evaluated = await asyncio.to_thread((await table_of(page, "eval")).steps)
        page.query["of"] = "eval" if evaluated else ""
    table = await table_of(page)
    with ui.element("div").classes("view-row"):
        of_choice(page)
        field = ui.input("search in prompts", value=page.text("q")).classes("grow")
        field.props("dense outlined clearable debounce=250 data-search")
    busy = busy_bar()
    said = ui.label().props('role="status"').classes("said")
    found = ui.html("", sanitize=False).classes("view-scroll")
    pager = Pager(lambda number: changed(page=number), keys=True)
    latest = Latest()

    def read() -> tuple[int, list[dict[str, Any]]]:
        order = page.text("sort", "steps"), page.flag("desc", True)
        offset = page.whole("page", 0) * _LISTED
        return table.prompts(page.text("q"), _LISTED, offset, *order)

    async def show() -> None:
        busy.set_visibility(True)
        answer = await latest(read)
        if answer is None:
            return
        busy.set_visibility(False)
        count, rows = answer
        several = any(row["steps"] > 1 for row in rows)
        heads = _HEADS if several else _ONCE
        sort = page.text("sort", "steps"), page.flag("desc", True)
        links = {
            "prompt_id": lambda row: page.link(
                "/prompt", prompt=row["prompt_id"], of=page.text("of")
            )
        }
        found.set_content(
            rows_table(rows, heads, *sort, links, page.text("q"), _PLAIN) if rows else ""
        )
        said.set_text(
            f"{count:,} prompts of {page.names[page.run.name]}, and their mean reward"
            + (" at the first and the last step" if several else ": each was in one step")
            if count
            else nothing(page, "prompts", bool(page.text("q")))
        )
        pager.show(page.whole("page", 0), math.ceil(count / _LISTED))

    async def changed(**values: Any) -> None:
        page.set(**{"page": None} | {name: value or None for name, value in values.items()})
        await show()

    async def sorted_by(event: GenericEventArguments) -> None:
        wanted = sort_again(page, str(event.args))
        page.set(page=None, **wanted)
        await show()

    field.on_value_change(lambda event: changed(q=event.value))
    found.on("click", sorted_by, js_handler=SORTED)
    next_item_keys()
    await show()


async def _over_time(page: Page, prompt_id: str) -> None:
    groups: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for of in ("eval",) if page.text("of") == "eval" else ("", "eval"):
        for run in page.chosen:
            table = await table_of(page, of, run=run)
            groups[run.name] = in_groups(await asyncio.to_thread(table.of_prompt, prompt_id))
        if any(groups.values()):
            break
    else:
        names = ", ".join(page.names[run.name] for run in page.chosen)
        raise UsageError(f"{names}: no completions of {prompt_id!r}")
    runs = [run for run in page.chosen if groups[run.name]]
    most = max(len(rows) for run in runs for rows in groups[run.name].values())
    number = max(0, min(page.whole("number", 0), most - 1))
    with ui.element("div").classes("view-row"):
        ui.link("all prompts", page.link("/prompt", of=of))
        choice = ui.select(list(range(most)), label="completion", value=number)
        choice.props("dense outlined options-dense").classes("narrow")
    lines = []
    for colour, run in enumerate(runs):
        means = [(float(step), mean_reward(rows)) for step, rows in groups[run.name].items()]
        lines.append(Curve(page.names[run.name], colour, "reward", colour, 0, means))
        first = next(iter(groups[run.name].values()))[0]
        if run is runs[0]:
            rich(about_prompt({"prompt": prompt_id} | data_columns(first)))
            rich(prompt_block(first))
    every = sorted(set(chain.from_iterable(groups.values())))
    if len(every) > 1:
        options = line_options("mean reward", lines)
        chart(options, f"mean reward of {prompt_id} over the steps", height=180)
    steps = every if page.flag("all") else spread(every, COLUMNS)
    if len(steps) < len(every):
        everything = page.link("/prompt", prompt=prompt_id, of=of or None, all=1)
        ui.link(f"{len(steps)} of {len(every)} steps are shown; show all", everything)
    once = len(every) == 1  # all its completions are shown beside each other, instead of steps
    columns_shown = most if once else len(steps)
    choice.set_visibility(not once)
    columns = rich("")
    latest = Latest()

    def read() -> str:
        number = page.whole("number", 0)
        parts = []
        for run in runs:
            others = [one for one in page.chosen if one is not run]
            own = replace(page, chosen=[run, *others])  # its links lead to this run
            found = [(step, groups[run.name].get(step, ())) for step in steps]
            if once:
                found = [(step, [row]) for step, rows in found for row in rows]
            heading = (
                f'<h2 class="of-run">{markup(page.names[run.name])}</h2>'
                if len(page.chosen) > 1
                else ""
            )
            parts.append(heading + side_by_side(found, number, own, of))
        return "".join(parts)

    async def show() -> None:
        html = await latest(read)
        if html is not None:
            columns.set_content(
                f'<div class="versions" style="--columns: {columns_shown}">{html}</div>'
            )

    async def changed(**values: Any) -> None:
        page.set(**{name: value or None for name, value in values.items()})
        await show()

    choice.on_value_change(lambda event: changed(number=event.value))
    next_item_keys()
    await show()


def in_groups(rows: Iterable[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Returns a prompt's completions by step, in their order in the group."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(int(row["step"]), []).append(row)
    for group in found.values():
        group.sort(key=_number)
    return dict(sorted(found.items()))


def _number(row: Mapping[str, Any]) -> int:
    number = row.get("number")
    return number if isinstance(number, int) else 0  # of older runs: as they stand in the file


def mean_reward(rows: Iterable[dict[str, Any]]) -> float | None:
    rewards = [row.get("reward") for row in rows]
    known = [value for value in rewards if isinstance(value, int | float) and math.isfinite(value)]
    return sum(known) / len(known) if known else None


def side_by_side(
    groups: Sequence[tuple[int, Sequence[dict[str, Any]]]],
    number: int,
    page: Page,
    of: str,
) -> str:
    """Returns a card for each step: completion `number` of its group, and its difference from that of the step before; an
    empty one where the run has no such group."""
    record = opened(TokenRecord, page.run.path)
    parts = []
    before: tuple[int, str] | None = None
    for step, rows in groups:
        if not rows:
            parts.append(
                f'<article class="card"><h2>step {step}</h2><p class="said">none</p></article>'
            )
            continue
        row = rows[min(number, len(rows) - 1)]
        text = str(row.get("completion"))[:_TEXT]
        said = markup(text) if before is None or before[0] == step else word_diff(before[1], text)
        address = page.link(
            "/group",
            step=step,
            group=row.get("group"),
            of=of or None,
            request=row.get("request_id"),
        )
        links = {f"step {step}": address}
        if (row.get("request_id"), row.get("number")) in recorded(record, step, of or None):
            links["tokens"] = tokens_link(page, row)
        body = f'<pre class="text">{said}</pre>'
        parts.append(card_of(row, links, f"weights {shown(row.get('weight_version'))}", body))
        before = step, text
    return "".join(parts)
