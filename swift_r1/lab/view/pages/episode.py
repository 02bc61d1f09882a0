"""An episode as a tree: its turns, branches and tools, with tokens, seconds, rewards and advantages."""

from __future__ import annotations

import asyncio

from nicegui import ui

from swift_r1.errors import UsageError
from swift_r1.lab.view.completion_html import about_prompt, card, data_columns, reasons_of
from swift_r1.lab.view.elements import next_item_keys, rich, table_of
from swift_r1.lab.view.episode_html import episode_tree
from swift_r1.lab.view.message_html import Look
from swift_r1.lab.view.shell import Page, view_page


@view_page("/episode", "Episode")
async def episode(page: Page) -> None:
    table = await table_of(page)
    step = page.whole("step", 0)
    group = page.whole("group", 0)
    number = page.whole("number", 0)
    rows = await asyncio.to_thread(table.group, step, group)
    request = page.text("request")
    if request:  # evaluations of several data sets number their groups alike
        rows = [row for row in rows if row.get("request_id") == request]
    numbers = [row["number"] for row in rows]
    if number not in numbers:
        raise UsageError(f"step {step} has no completion {number} in group {group}")
    place = numbers.index(number)
    row = rows[place]
    unfolded = page.flag("unfolded")
    look = Look(words=page.text("q"))
    kept = {name: page.text(name) or None for name in ("of", "request")}
    with ui.element("div").classes("view-row"):
        for text, title, key, to in (
            ("‹ episode", "episode before", "ArrowLeft", max(0, place - 1)),
            ("episode ›", "episode after", "ArrowRight", min(len(rows) - 1, place + 1)),
        ):
            address = page.link("/episode", step=step, group=group, number=numbers[to], **kept)
            ui.link(text, address).props(f'data-key="{key}" title="{title}"')
        back = {"of": kept["of"], "request": kept["request"]}
        ui.link("its group", page.link("/group", step=step, group=group, **back))
        other = page.query | {"unfolded": None if unfolded else "1"}
        fold = ui.link("fold all" if unfolded else "unfold all", page.link("/episode", **other))
        fold.props('data-key="u" title="fold or unfold all"')
    prompt_id = str(row.get("prompt_id"))
    rich(about_prompt({"step": step, "group": group, "prompt": prompt_id} | data_columns(row)))
    invalid = await asyncio.to_thread(page.run.invalid_rewards, step, prompt_id)
    times = await asyncio.to_thread(page.run.episode_times, row)
    tree = episode_tree(row, times, look, unfolded)
    rich(card(row, reasons_of(row, invalid), {}, look, tree))
    next_item_keys("turn or tool")
