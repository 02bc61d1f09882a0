"""What the pages of completions and tokens have in common."""

from __future__ import annotations

from pathlib import Path

from nicegui import ui

from swift_r1.runs.completions import CompletionTable
from swift_r1.view.coloured import token_css
from swift_r1.view.shell import Page, opened

STYLE = f'<link rel="stylesheet" href="/static/completions.css"><style>{token_css()}</style>'
_NEXT = """() => {
  const all = [...document.querySelectorAll('[data-item]')];
  const at = all.findIndex((one) => one.contains(document.activeElement));
  const to = all[Math.min(all.length - 1, Math.max(0, at + (%d)))];
  to?.focus(); to?.scrollIntoView({ block: 'nearest', inline: 'nearest' });
}"""


def trained(run: Path) -> CompletionTable:
    return CompletionTable(run / "completions.jsonl")


def evaluated(run: Path) -> CompletionTable:
    return CompletionTable(run / "eval_completions.jsonl")


def table_of(page: Page) -> CompletionTable:
    """The completions of the page's run that `of` in the address names: those of training, or `of=eval` those of
    evaluations; with what was written since."""
    found = opened(evaluated if page.text("of") == "eval" else trained, page.run.path)
    found.refresh()
    return found


def next_item_keys() -> None:
    """`j` and `k` go to the next and the last completion of a page (each has `data-item`)."""
    for key, step, title in (("j", 1, "next completion"), ("k", -1, "previous completion")):
        button = ui.button(title).props(f'flat dense no-caps data-key="{key}" title="{title}"').classes("key-only")
        button.on("click", js_handler=_NEXT % step)


def rich(html: str) -> ui.html:
    """HTML of ours, in which all that came from a run was made harmless (`markup`)."""
    return ui.html(html, sanitize=False).classes("rich")
