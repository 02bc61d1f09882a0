"""A prompt over time: the completions of one weight version beside those of the next, with what has changed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nicegui import ui

from swift_r1.errors import UsageError
from swift_r1.lab.report.parts import spread
from swift_r1.lab.view.charts import Line, chart, line_options
from swift_r1.lab.view.completion_html import shown
from swift_r1.lab.view.elements import next_item_keys, recorded, rich, table_of, tokens_link
from swift_r1.lab.view.markup import markup, word_diff
from swift_r1.lab.view.shell import Latest, Page, opened, view_page
from swift_r1.record.token_reader import TokenRecord

COLUMNS = 12  # that are shown at once, unless all are asked for
_LISTED = 100
_TEXT = 12_000  # characters of a completion


@view_page("/prompt", "Prompts", go="p")
async def prompt(page: Page) -> None:
    if page.text("prompt"):
        await _over_time(page, page.text("prompt"))
    else:
        await _list(page)


async def _list(page: Page) -> None:
    """The prompts to choose from, those of evaluations (probes first) before those of training."""
    search = page.text("q")
    field = ui.input("search in prompts", value=search).props(
        "dense outlined clearable debounce=250 data-search"
    )
    found = ui.column().classes("view-scroll")
    tables = {
        "evaluated": (await table_of(page, "eval"), "eval"),
        "trained": (await table_of(page, ""), None),
    }
    record = opened(TokenRecord, page.run.path)
    latest = Latest()

    def read() -> dict[str, str]:
        probes = {
            str(one.prompt_id)
            for step in record.probe_steps()[-1:]
            for one in record.probes_at(step)
        }
        lists = {}
        for title, (table, of) in tables.items():
            rows = sorted(
                table.prompts(page.text("q"), _LISTED),
                key=lambda row: row["prompt_id"] not in probes,
            )
            if rows:
                more = f", the first {_LISTED}" if len(rows) == _LISTED else ""
                lists[title + more] = _prompts(page, rows, probes, of)
        return lists

    async def show() -> None:
        lists = await latest(read)
        if lists is None:
            return
        found.clear()
        with found:
            for title, html in lists.items():
                ui.label(title).classes("said")
                rich(html)

    async def changed(text: str | None) -> None:
        page.set(q=text or None)
        await show()

    field.on_value_change(lambda event: changed(event.value))
    next_item_keys()
    await show()


def _prompts(
    page: Page,
    rows: Sequence[dict[str, Any]],
    probes: set[str],
    of: str | None,
) -> str:
    lines = []
    for row in rows:
        href = markup(page.link("/prompt", prompt=row["prompt_id"], of=of))
        probe = " (probe)" if row["prompt_id"] in probes else ""
        cells = "".join(
            f'<td class="short number" data-name="{name}">{shown(row[name])}</td>'
            for name in ("steps", "first", "last", "completions", "reward")
        )
        name = f'<a data-item href="{href}">{markup(row["prompt_id"])}</a>{probe}'
        text = f'<td class="long" data-name="prompt">{markup(str(row["prompt"])[-160:])}</td>'
        lines.append(f'<tr><td class="short" data-name="prompt_id">{name}</td>{text}{cells}</tr>')
    heads = "".join(
        f"<th>{name}</th>" for name in ("prompt_id", "prompt (its end)", "steps", "first", "last")
    )
    return (
        f'<table class="rows"><thead><tr>{heads}<th>completions</th><th>mean reward</th></tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


async def _over_time(page: Page, prompt_id: str) -> None:
    rows: list[dict[str, Any]] = []
    for of in ("eval",) if page.text("of") == "eval" else ("", "eval"):
        rows = await asyncio.to_thread((await table_of(page, of)).of_prompt, prompt_id)
        if rows:
            break
    if not rows:
        raise UsageError(f"{page.run.name} has no completions of {prompt_id!r}")
    by_step = in_groups(rows)
    most = max(len(group) for group in by_step.values())
    number = max(0, min(page.whole("number", 0), most - 1))
    with ui.element("div").classes("view-row"):
        ui.link("all prompts", page.link("/prompt"))
        ui.link("ask it again", page.link("/try", prompt=prompt_id, of=of or None))
        choice = ui.select(list(range(most)), label="completion of each group", value=number)
        choice.props("dense outlined options-dense").classes("narrow")
        gone = ui.checkbox("Show removed text", value=page.flag("gone")).props("dense")
    rich(f'<pre class="text prompt">{markup(str(rows[0].get("prompt")))}</pre>')
    means = [(float(step), mean_reward(group)) for step, group in by_step.items()]
    options = line_options("mean reward", [Line("reward", means)])
    chart(options, f"mean reward of {prompt_id} over the steps", height=180)
    steps = list(by_step) if page.flag("all") else spread(list(by_step), COLUMNS)
    if len(steps) < len(by_step):
        everything = page.link("/prompt", prompt=prompt_id, of=of or None, all=1)
        ui.link(f"{len(steps)} of {len(by_step)} steps are shown; show all", everything)
    columns = rich("")
    latest = Latest()
    record = opened(TokenRecord, page.run.path)

    async def show() -> None:
        groups = [(step, by_step[step]) for step in steps]
        number = page.whole("number", 0)
        html = await latest(side_by_side, groups, number, page, of, record)
        if html is not None:
            columns.set_content(
                f'<div class="versions{"" if page.flag("gone") else " without-gone"}">{html}</div>'
            )

    async def changed(**values: Any) -> None:
        page.set(**{name: value or None for name, value in values.items()})
        await show()

    choice.on_value_change(lambda event: changed(number=event.value))
    gone.on_value_change(lambda event: changed(gone=event.value))
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
    record: TokenRecord,
) -> str:
    """Returns a column for each step: completion `number` of its group, and its difference from the column before."""
    parts = []
    before = None
    for step, rows in groups:
        row = rows[min(number, len(rows) - 1)]
        text = str(row.get("completion"))[:_TEXT]
        said = markup(text) if before is None else word_diff(before, text)
        address = page.link(
            "/group",
            step=step,
            group=row.get("group"),
            of=of or None,
            request=row.get("request_id"),
        )
        head = f'<a href="{markup(address)}">step {step}</a>, weight version {markup(shown(row.get("weight_version")))}'
        if (row.get("request_id"), row.get("number")) in recorded(record, step, of or None):
            head += f', <a href="{markup(tokens_link(page, row, of or None))}">tokens</a>'
        got = markup(f"reward {shown(row.get('reward'))}, {shown(row.get('finish_reason'))}")
        parts.append(
            f'<article class="card" data-item tabindex="-1"><h3>{head}</h3><p>{got}</p>'
            f'<pre class="text">{said}</pre></article>'
        )
        before = text
    return "".join(parts)
