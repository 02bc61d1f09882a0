"""A group side by side: the prompt as the model saw it, and what each completion got, and why."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from nicegui import ui

from swift_r1.errors import UsageError
from swift_r1.lab.runs.query import FAILURE
from swift_r1.lab.view.completion_html import (
    Row,
    about_prompt,
    card,
    data_columns,
    is_long,
    kind_tag,
    reasons_of,
)
from swift_r1.lab.view.elements import (
    next_item_keys,
    nothing,
    recorded,
    rich,
    table_of,
    tokens_link,
)
from swift_r1.lab.view.episode_html import episode_tree
from swift_r1.lab.view.message_html import Look, prompt_block, shown
from swift_r1.lab.view.shell import Page, opened, view_page
from swift_r1.record.episodes import recorded_calls
from swift_r1.record.token_reader import TokenRecord


@view_page("/group", "Group")
async def group(page: Page) -> None:
    table = await table_of(page)
    of = page.text("of") or None
    steps = await asyncio.to_thread(table.steps)
    if not steps:
        raise UsageError(nothing(page, "completions"))
    step = page.whole("step", steps[-1])
    number = page.whole("group", 0)
    rows = await asyncio.to_thread(table.group, step, number)
    request = page.text("request")
    if request:  # evaluations of several data sets number their groups alike
        rows = [row for row in rows if row.get("request_id") == request]
    if page.text("sort") == "reward":
        rows.sort(key=reward_of, reverse=True)
    with ui.element("div").classes("view-row"):
        _neighbours(page, steps, step, number)
        if rows:
            prompt = {"prompt": rows[0].get("prompt_id"), "of": of}
            ui.link("this prompt in every step", page.link("/completions", **prompt))
            _choice(page, "sort", {"": "as sampled", "reward": "by reward"})
    if not rows:
        raise UsageError(f"step {step} has no group {number}")
    first = rows[0]
    look = Look(words=page.text("q"))
    prompt_id = str(first.get("prompt_id"))
    known = {"step": step, "group": first.get("group"), "prompt": prompt_id}
    rich(about_prompt(known | data_columns(first)))
    rich(prompt_block(first, look))
    rich(_summary(rows))
    invalid = await asyncio.to_thread(page.run.invalid_rewards, step, prompt_id)
    there = await asyncio.to_thread(recorded, opened(TokenRecord, page.run.path), step, of)
    has_calls = any(recorded_calls(row) for row in rows)
    times = await asyncio.to_thread(page.run.episode_times, step) if has_calls else {}
    whole = page.text("whole")
    cards = []
    for row in rows:
        links = {}
        if (row.get("request_id"), row["number"]) in there:
            links["tokens"] = tokens_link(page, row)
        shown_whole = whole == str(row["number"])
        if is_long(row) and not shown_whole:
            place = page.link("/group", **page.query | {"whole": row["number"]})
            links["whole text"] = f"{place}#n{row['number']}"
        of_card = replace(look, whole=shown_whole)
        tree = episode_tree(row, times.get((row.get("request_id"), row["number"]), {}), of_card)
        cards.append(card(row, reasons_of(row, invalid), links, of_card, tree))
    rich(f'<div class="cards">{"".join(cards)}</div>')
    next_item_keys("completion or turn" if has_calls else "completion")


def reward_of(row: Row) -> float:
    """Returns a row's reward to sort by; those without one come last."""
    reward = row.get("reward")
    return reward if isinstance(reward, int | float) else -math.inf


def _summary(rows: Sequence[Row]) -> str:
    """Returns how many completions of each class there are, and their mean reward."""
    counts = Counter(str(row.get(FAILURE)) for row in rows)
    known = [value for value in map(reward_of, rows) if value > -math.inf]
    parts = [f"{count} {kind_tag(kind)}" for kind, count in counts.most_common()]
    if known:
        parts.append(f"mean reward {shown(math.fsum(known) / len(known))}")
    return f'<p class="said">{len(rows)} completions: {" · ".join(parts)}</p>'


def _choice(page: Page, name: str, options: dict[str, str]) -> None:
    """A parameter of the address that has a few values."""

    def to(value: str | None) -> None:
        page.set(**{name: value or None})
        ui.navigate.reload()

    value = page.text(name) if page.text(name) in options else ""
    choice = ui.toggle(options, value=value).props("dense no-caps flat")
    choice.on_value_change(lambda event: to(event.value))


def _neighbours(page: Page, steps: Sequence[int], step: int, number: int) -> None:
    """Links to the groups and the steps before and after."""
    place = steps.index(step) if step in steps else len(steps) - 1
    kept = {name: page.text(name) or None for name in ("of", "sort")}
    for text, title, key, other, group_number in (
        ("‹ step", "step before", "[", steps[max(0, place - 1)], number),
        ("‹ group", "group before", "ArrowLeft", step, max(0, number - 1)),
        ("group ›", "group after", "ArrowRight", step, number + 1),
        ("step ›", "step after", "]", steps[min(len(steps) - 1, place + 1)], number),
    ):
        link = ui.link(text, page.link("/group", step=other, group=group_number, **kept))
        link.props(f'data-key="{key}" title="{title}"')
