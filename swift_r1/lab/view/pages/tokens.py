"""A completion's tokens, each with the colour of what the loss saw or did."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from nicegui import ui

from swift_r1.errors import UsageError
from swift_r1.lab.view.coloured import (
    COLOURINGS,
    classes,
    legend_html,
    numbers_json,
    scale_of,
    tokens_html,
    values_of,
)
from swift_r1.lab.view.completion_html import about_prompt
from swift_r1.lab.view.elements import completions_of_round, rich
from swift_r1.lab.view.markup import markup
from swift_r1.lab.view.shell import Page, opened, view_page
from swift_r1.record.token_reader import RecordedCompletion, TokenRecord

_PAGE_TOKENS = (
    "no tokens are recorded: `--log_tokens sample` (the default) or `all` records those of a run"
)
_REPEATED = re.compile(r"(<[^<>\s]{1,40}>)\1{7,}")  # the tokens of an image


@view_page("/tokens", "Tokens", go="k")
async def tokens(page: Page) -> None:
    record = opened(TokenRecord, page.run.path)
    there = await asyncio.to_thread(_listed, page, record)
    if not there:
        raise UsageError(f"{page.names[page.run.name]}: {_missing(page, record)}")
    place = _place(page, there)
    completion = there[place]
    rows = await asyncio.to_thread(
        record.completion, completion.round_step or 0, str(completion.request_id), completion.number
    )
    rows = [row for row in rows if row.sequence == completion.sequence]
    if not rows:
        raise UsageError(
            "the record of this completion cannot be read: its file went, or is damaged"
        )
    row = next((row for row in rows if row.step == page.whole("at", rows[0].step)), rows[0])
    with ui.element("div").classes("view-row"):
        _step_choice(page, record, row)
        _neighbours(page, there, place)
        step = completion.step if completion.round_step is None else completion.round_step
        ui.link("its group", page.link("/group", step=step, group=completion.group))
        ui.link("this prompt in every step", page.link("/completions", prompt=completion.prompt_id))
    _Tokens(page, record, row, [other.step for other in rows])
    page.problems(record, record.problems)


def _listed(page: Page, record: TokenRecord) -> list[RecordedCompletion]:
    """Returns the recorded completions of the step that the address names, or of the last one."""
    steps = record.steps()
    if not steps:
        return []
    if page.text("step"):
        return completions_of_round(record, page.whole("step", 0))
    return record.completions(steps[-1])


def _missing(page: Page, record: TokenRecord) -> str:
    """Returns why there are no tokens at the address."""
    known = record.steps()
    if not known:
        return _PAGE_TOKENS
    return (
        f"step {page.text('step')} has no recorded tokens; recorded: {known[0]} to {known[-1]}"
        f" ({len(known)} of them)"
    )


def _step_choice(page: Page, record: TokenRecord, row: RecordedCompletion) -> None:
    """A choice of recorded steps."""
    steps = {step: f"step {step}" for step in record.steps()}
    choice = ui.select(steps, label="step", value=row.step, with_input=True)

    def to(step: int) -> None:
        rows = record.completions(step)
        place: dict[str, object] = {
            "step": rows[0].round_step if rows else step,
            "at": step if rows else None,
            "colour": page.text("colour") or None,
        }
        ui.navigate.to(page.link("/tokens", **place))

    choice.props("dense outlined options-dense").classes("narrow")
    choice.on_value_change(lambda event: to(event.value) if event.value else None)


def _place(page: Page, there: Sequence[RecordedCompletion]) -> int:
    """Returns the place of the completion that the address names. Raises UsageError: it is not recorded."""
    if not page.text("request"):
        return 0
    wanted = page.text("request"), page.whole("number", 0), page.whole("sequence", 0)
    for place, completion in enumerate(there):
        if (completion.request_id, completion.number, completion.sequence or 0) == wanted:
            return place
    raise UsageError(
        f"completion {wanted[1]} of {wanted[0]} is not in the record: see --log_tokens"
    )


def _neighbours(page: Page, there: Sequence[RecordedCompletion], place: int) -> None:
    """Links to the completions before and after, and a choice of all."""

    def address(completion: RecordedCompletion) -> str:
        kept = {"colour": page.text("colour") or None, "step": str(completion.round_step)}
        where = {
            "request": completion.request_id,
            "number": completion.number,
            "sequence": completion.sequence or None,
        }
        return page.link("/tokens", **kept, **where)

    for text, keys, to in (
        ("‹ previous", "k ArrowLeft", place - 1),
        ("next ›", "j ArrowRight", place + 1),
    ):
        if 0 <= to < len(there):
            link = ui.link(text, address(there[to]))
            link.props(f'data-key="{keys}" title="{text.strip("‹› ")} completion"')
    completion = there[place]
    step = completion.step if completion.round_step is None else completion.round_step
    names = {
        at: f"group {completion.group}, completion {completion.number}"
        for at, completion in enumerate(there)
    }
    label = f"Completion {place + 1} of {len(there)} recorded at step {step}"
    choice = ui.select(names, label=label, value=place)
    choice.props("dense outlined options-dense").classes("source")
    choice.on_value_change(lambda event: ui.navigate.to(address(there[event.value])))


def _odd(row: RecordedCompletion, count: int) -> list[str]:
    """Returns the columns of tokens that have more or fewer entries than there are tokens."""
    columns = {name: value for name, value in vars(row).items() if isinstance(value, list)}
    return [
        name
        for name, value in columns.items()
        if name != "prompt_token_ids" and len(value) != count
    ]


class _TokenText(ui.element, component="tokens.js"):
    """Tokens as `tokens_html` has them; `numbers` as `numbers_json`."""

    def __init__(self, html: str, numbers: str) -> None:
        super().__init__()
        self._props["html"], self._props["numbers"] = html, numbers

    def recolour(self, classes: Sequence[str]) -> None:
        """The tokens' classes, one text each."""
        self.run_method("recolour", ",".join(classes))


class _Tokens:
    """One recorded completion with its colours and their legend."""

    def __init__(
        self,
        page: Page,
        record: TokenRecord,
        row: RecordedCompletion,
        steps: Sequence[int],
    ) -> None:
        self.page = page
        self.record = record
        self.ids = list(row.token_ids or [])
        self.row = vars(row) | dict.fromkeys(odd := _odd(row, len(self.ids)))
        if odd:
            said = f"the record has other than {len(self.ids)} {', '.join(odd)} of this completion: left out"
            page.problems("columns", [said])
        known = [name for name in COLOURINGS if values_of(self.row, name) is not None]
        asked = page.text("colour")
        self.colour = asked if asked in known else next(iter(known), None)
        if len(steps) > 1:
            self._steps(row.step, steps)
        facts = {
            "prompt": row.prompt_id,
            "group": row.group,
            "completion": row.number,
            "optimizer step": row.step,
        }
        facts |= {"sequence": row.sequence} if row.sequence else {}
        rich(about_prompt(facts | {"tokens": len(self.ids)}))
        prompt = _REPEATED.sub(
            lambda found: f"{found[1]} x {len(found[0]) // len(found[1])} ",
            record.text(row.prompt_token_ids or []),
        )
        rich(
            f'<details open><summary>prompt</summary><pre class="text prompt">{markup(prompt)}</pre></details>'
        )
        with ui.element("div").classes("view-row"):
            if known:
                titles = {name: COLOURINGS[name].title for name in known}
                choice = ui.select(titles, label="colour", value=self.colour).classes("narrow")
                choice.props("dense outlined options-dense")
                choice.on_value_change(lambda event: self._recolour(str(event.value)))
        self.legend = rich("")
        pieces = record.pieces(self.ids)
        special = [record.is_special(token) for token in self.ids]
        html = tokens_html(pieces, special, self._classes())
        self.block = _TokenText(html, numbers_json(self.row, pieces))

    def _classes(self) -> list[str]:
        values = None if self.colour is None else values_of(self.row, self.colour)
        scale = None if values is None or self.colour is None else scale_of(self.colour, values)
        self.legend.set_content("" if scale is None else legend_html(scale))
        return classes(values, scale, self.row["mask"] or [True] * len(self.ids))

    def _recolour(self, colour: str) -> None:
        self.colour = colour
        self.page.set(colour=colour)
        self.block.recolour(self._classes())

    def _steps(self, step: int, steps: Sequence[int]) -> None:
        """Several optimizer steps trained on the completion: each saw other numbers."""
        choice = ui.select(list(steps), label="optimizer step", value=step).classes("narrow")
        choice.props("dense outlined options-dense")

        def to(value: Any) -> None:
            self.page.set(at=value)
            ui.navigate.reload()

        choice.on_value_change(lambda event: to(event.value))
