"""Try it: a question to the run's server or checkpoint, and the answer with its log-probs as colours."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

from nicegui import ui

from swift_r1.errors import SwiftError
from swift_r1.lab.runs.query import CompletionQuery
from swift_r1.lab.view.answer_sources import ModelAnswer, PageQuestion
from swift_r1.lab.view.coloured import (
    classes,
    legend_html,
    numbers_json,
    scale_of,
    tokens_html,
    values_of,
)
from swift_r1.lab.view.completion_html import Row, about_prompt, data_columns
from swift_r1.lab.view.elements import flag_of, rich, source_choice, table_of
from swift_r1.lab.view.message_html import shown
from swift_r1.lab.view.shell import Page, view_page
from swift_r1.lab.view.token_text import TokenText

_KEPT = ("of", "source", "n", "temperature", "max_tokens")
GRADERS = frozenset(("countdown", "gsm8k", "math", "math_tag", "math_tag_strict", "format"))
"""Reward functions of our own that need no more than the text and the data: no code of a user's runs here."""
_IN_ADDRESS = 2_000  # characters of a prompt that the address takes


@view_page("/try", "Try it", go="y")
async def ask(page: Page) -> None:
    _Form(page, await _row_of(page))


class _Form:
    """A prompt, at first one of the run's, and what to ask with it; `row` is a completion of that prompt."""

    def __init__(self, page: Page, row: Row | None) -> None:
        self.page = page
        self.row = row
        known = "" if row is None else shown(row.get("prompt"))
        self._work: asyncio.Task[list[ModelAnswer]] | None = None
        text = page.text("text") or known
        raw = page.flag("raw", bool(known) and not page.text("text"))
        with ui.element("div").classes("view-row"):
            self.source = source_choice(page, ready=True)
            ui.button("another prompt", on_click=self._another).props(
                'no-caps flat data-key="n" title="another prompt of the run"'
            )
        self.prompt = (
            ui.textarea("prompt", value=text).props("outlined autogrow data-search").classes("wide")
        )
        self.prompt.on("blur", self._written)
        with ui.element("div").classes("view-row"):
            self.raw = ui.checkbox("raw text, without the model's chat template", value=raw).props(
                "dense"
            )
            self.raw.on_value_change(lambda event: page.set(raw=event.value))
            self.n = self._number("n", "completions", 1, 1, 16)
            self.temperature = self._number(
                "temperature", "temperature", flag_of(page, "temperature", 1.0), 0, 2
            )
            longest = flag_of(page, "max_completion_length", 256)
            self.max_tokens = self._number("max_tokens", "Max tokens", longest, 1, 32_768)
        with ui.element("div").classes("view-row"):
            self.button = ui.button("ask", on_click=self._ask).props(
                'no-caps data-key="a" title="ask"'
            )
            self.stop = ui.button("stop", on_click=self._stop).props('no-caps flat title="stop"')
            self.stop.set_enabled(False)
        self.said = ui.label().props('role="status"').classes("said")
        self.answers = ui.column().classes("answers")
        ui.context.client.on_delete(self._stop)

    async def _ask(self) -> None:
        if self._work is not None and not self._work.done():
            return  # the second of two clicks
        source = self.source()
        if source is None or not self.prompt.value:
            self.said.set_text("choose a model, and write a prompt")
            return
        question = PageQuestion(
            prompt=self.prompt.value,
            chat=not self.raw.value,
            n=int(self.n.value or 1),
            temperature=float(self.temperature.value or 0),
            max_tokens=int(self.max_tokens.value or 1),
        )
        self.answers.clear()
        self.said.set_text(f"asking {source.name} …")
        self.button.set_enabled(False)
        self.stop.set_enabled(True)
        self._work = work = asyncio.create_task(source.ask(question))
        try:
            found = await work
            self.said.set_text(f"by {source.name}")
            scores = [await asyncio.to_thread(self._scores, answer.text) for answer in found]
            with self.answers:
                for number, (answer, own) in enumerate(zip(found, scores, strict=True)):
                    _show(number, answer, own)
        except SwiftError as error:
            self.said.set_text(str(error))
        except asyncio.CancelledError:
            if not work.cancelled():  # the page itself ends
                raise
            self.said.set_text("stopped")
        finally:
            self.button.set_enabled(True)
            self.stop.set_enabled(False)

    def _stop(self) -> None:
        if self._work is not None:
            self._work.cancel()

    def _scores(self, text: str) -> dict[str, float | None]:
        """Returns what the run's built-in graders give the answer to the prompt as it was; none if it was changed."""
        from swift_r1.rewards.orm import build_reward

        if self.row is None or self.prompt.value != self.row.get("prompt"):
            return {}
        columns = {name: [value] for name, value in data_columns(self.row).items()}
        names = self.page.run.args.get("reward_funcs")
        found = {}
        for name in names if isinstance(names, list) else ():
            if name in GRADERS:
                reward = build_reward(name)
                if set(reward.needs) <= set(columns):
                    [found[name]] = reward.call([text], columns)
        return found

    async def _another(self) -> None:
        table = await table_of(self.page)
        count, _ = await asyncio.to_thread(table.prompts, limit=0)
        _, rows = await asyncio.to_thread(
            table.prompts, limit=1, offset=random.randrange(max(1, count))
        )
        for row in rows:
            kept = {name: self.page.text(name) or None for name in _KEPT}
            ui.navigate.to(self.page.link("/try", prompt=row["prompt_id"], **kept))

    def _number(
        self,
        name: str,
        label: str,
        default: float,
        least: float,
        most: float,
    ) -> ui.number:
        value = min(most, max(least, self.page.number(name, default)))
        field = (
            ui.number(
                label,
                value=value,
                min=least,
                max=most,
            )
            .props("dense outlined")
            .classes("narrow")
        )
        field.on_value_change(lambda event: self.page.set(**{name: event.value}))
        return field

    def _written(self) -> None:
        text = self.prompt.value or ""
        self.page.set(text=text if 0 < len(text) <= _IN_ADDRESS else None, raw=self.raw.value)


async def _row_of(page: Page) -> Row | None:
    """Returns a completion of the prompt that the address names, or unless it has a text, of the run's first prompt."""
    prompt_id = page.text("prompt")
    if not prompt_id and page.text("text"):
        return None
    for of in ("eval", ""):
        table = await table_of(page, of)
        query = CompletionQuery(prompt_id=prompt_id or None)
        rows = await asyncio.to_thread(table.page, query, 0, 1)
        if rows:
            return rows[0]
    return None


def _show(number: int, answer: ModelAnswer, scores: Mapping[str, float | None]) -> None:
    row: dict[str, Any] = {"rollout_logps": list(answer.logps)}
    values = values_of(row, "logp") or []
    scale = scale_of("logp", values)
    html = tokens_html(answer.pieces, [False] * len(answer.pieces), classes(values, scale, None))
    ended = {"completion": number, "tokens": len(answer.pieces), "ended by": answer.finish_reason}
    rich(about_prompt({**ended, **scores}) + legend_html(scale))
    TokenText(html, numbers_json(row, answer.pieces), f"completion {number}")
