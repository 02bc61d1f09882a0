"""A group side by side: the prompt as the model saw it, and what each completion got, and why."""

from __future__ import annotations

import asyncio

from nicegui import ui

from swift_r1.errors import UsageError
from swift_r1.lab.view.completion_html import card, data_columns, facts, is_long, reasons_of
from swift_r1.lab.view.elements import next_item_keys, recorded, rich, table_of, tokens_link
from swift_r1.lab.view.markup import markup
from swift_r1.lab.view.shell import Page, opened, view_page
from swift_r1.record.token_reader import TokenRecord


@view_page("/group", "Group")
async def group(page: Page) -> None:
    table = await table_of(page)
    of = page.text("of") or None
    steps = await asyncio.to_thread(table.steps)
    if not steps:
        raise UsageError(f"{page.run.name} has no completions yet")
    step = page.whole("step", steps[-1])
    number = page.whole("group", 0)
    rows = await asyncio.to_thread(table.group, step, number)
    request = page.text("request")
    if request:  # evaluations of several data sets number their groups alike
        rows = [row for row in rows if row.get("request_id") == request]
    _steps(page, steps, step, number)
    if not rows:
        raise UsageError(f"step {step} has no group {number}")
    first = rows[0]
    prompt_id = str(first.get("prompt_id"))
    with ui.element("div").classes("view-row"):
        ui.link("this prompt over time", page.link("/prompt", prompt=prompt_id, of=of))
        ui.link("ask it again", page.link("/try", prompt=prompt_id, of=of))
    known = {
        "step": step,
        "group": number,
        "prompt_id": prompt_id,
        "completions": len(rows),
    }
    rich(facts(known | data_columns(first)))
    rich(f'<pre class="text prompt">{markup(str(first.get("prompt")))}</pre>')
    invalid = await asyncio.to_thread(page.run.invalid_rewards, step, prompt_id)
    there = await asyncio.to_thread(recorded, opened(TokenRecord, page.run.path), step, of)
    whole = page.text("whole")
    cards = []
    for row in rows:
        links = {}
        if (row.get("request_id"), row["number"]) in there:
            links["tokens"] = tokens_link(page, row, of)
        if is_long(row) and whole != str(row["number"]):
            place = page.link(
                "/group",
                step=step,
                group=number,
                of=of,
                request=request or None,
                whole=row["number"],
            )
            links["whole text"] = f"{place}#n{row['number']}"
        cards.append(card(row, reasons_of(row, invalid), links, whole == str(row["number"])))
    rich(f'<div class="cards">{"".join(cards)}</div>')
    next_item_keys()


def _steps(page: Page, steps: list[int], step: int, number: int) -> None:
    """Links to the groups and the steps before and after."""
    place = steps.index(step) if step in steps else len(steps) - 1
    of = page.text("of") or None
    with ui.element("div").classes("view-row"):
        for text, title, key, to_step, to_group in (
            ("‹ step", "step before", "[", steps[max(0, place - 1)], number),
            ("‹ group", "group before", "ArrowLeft", step, max(0, number - 1)),
            ("group ›", "group after", "ArrowRight", step, number + 1),
            ("step ›", "step after", "]", steps[min(len(steps) - 1, place + 1)], number),
        ):
            link = ui.link(text, page.link("/group", step=to_step, group=to_group, of=of))
            link.props(f'data-key="{key}" title="{title}"')
