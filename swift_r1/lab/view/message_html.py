"""Prompts and messages as HTML, as they are written."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swift_r1.lab.runs.pictures import Picture, pictures_of
from swift_r1.lab.view.markup import KEPT, highlighted, markup, matches
from swift_r1.runtime.visible import visible

Row = Mapping[str, Any]

VALUE = 2_000  # characters that are shown of a value
CARD = 12_000  # and of a text in a card
_THOUGHT_END = "</think>"
_LONG_THOUGHT = 600  # characters, from which on it is folded
_TURN = re.compile(
    r"(?:<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>)(?P<role>\w+)(?:<\|end_header_id\|>)?\s*"
    r"(?P<content>.*?)(?=<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|$)",
    re.DOTALL,
)
"""A message in the chat templates of Qwen (ChatML), Llama 3 and Gemma."""


@dataclass(frozen=True, slots=True)
class Look:
    """How texts are shown."""

    whole: bool = False  # else a long one is cut
    words: str = ""  # that are marked


AS_WRITTEN = Look()


def shown(value: Any) -> str:
    """Returns the value in a few characters: numbers to four digits, None as –."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else "invalid"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def facts(values: Mapping[str, Any]) -> str:
    """Returns the names and values, one below the other."""
    lines = (
        f"<dt>{markup(name)}</dt><dd>{markup(shown(value), VALUE)}</dd>"
        for name, value in values.items()
    )
    return f'<dl class="facts">{"".join(lines)}</dl>'


def passage(text: str, look: Look = AS_WRITTEN, answer: tuple[int, int] | None = None) -> str:
    """Returns what a model wrote; a long thought, which no answer is read from, is folded unless it holds the words."""
    kept = text[: KEPT if look.whole else CARD]
    if answer is not None and answer[1] > len(kept):
        answer = None
    end = kept.find(_THOUGHT_END) + len(_THOUGHT_END)
    start = end if end > _LONG_THOUGHT else 0
    after = None if answer is None else (answer[0] - start, answer[1] - start)
    left = len(text) - len(kept)
    more = f"<b class=unseen>… {left:,} more characters</b>" if left else ""
    said = _block(kept[start:], look, after, more)
    if not start:
        return said
    thought = _block(kept[:start], look, None)
    seen = " open" if matches(kept[:start], look.words) else ""
    return f'<details class="thought"{seen}><summary>thought, {start:,} characters</summary>{thought}</details>{said}'


def _block(text: str, look: Look, answer: tuple[int, int] | None, more: str = "") -> str:
    return f'<pre class="text">{highlighted(text, look.words, answer)}{more}</pre>'


def prompt_block(row: Row, look: Look = AS_WRITTEN) -> str:
    """Returns the prompt with its images: what the user asked last, and folded all as the model saw it."""
    return pictures(row) + _prompt(shown(row.get("prompt")), look)


def _prompt(text: str, look: Look) -> str:
    whole = f'<pre class="text prompt">{highlighted(text, look.words)}</pre>'
    asked = question(text)
    if asked == text:
        return whole
    seen = " open" if matches(text, look.words) and not matches(asked, look.words) else ""
    return (
        f'<pre class="text prompt">{highlighted(asked, look.words)}</pre>'
        f'<details class="thought"{seen}><summary>as the model saw it, {len(text):,} characters</summary>{whole}'
        "</details>"
    )


def question(prompt: str) -> str:
    """Returns what the user asked last, without the chat template around it; the prompt where no template is known."""
    asked = [found["content"] for found in _TURN.finditer(prompt) if found["role"] == "user"]
    return asked[-1] if asked else prompt


def pictures(row: Row) -> str:
    """Returns the images of the row's prompt, side by side; nothing where it has none."""
    found = pictures_of(row)
    return f'<div class="pictures">{"".join(map(_picture, found))}</div>' if found else ""


def _picture(one: Picture) -> str:
    title = html.escape(visible(one.title))
    if one.url is None:
        return f'<span class="unseen">{title}</span>'
    return f'<img src="{one.url}" alt="{title}" title="{title}">'


def turns(messages: Sequence[Any], look: Look = AS_WRITTEN) -> str:
    """Returns the messages of a conversation, each with its role; the tools that it calls, and their answers."""
    parts = []
    for message in messages:
        message = message if isinstance(message, dict) else {"content": message}
        role = shown(message.get("role"))
        kind = role if role in ("system", "user", "assistant", "tool") else "user"
        content = passage(shown(message.get("content")), look)
        more = {
            name: value
            for name, value in message.items()
            if name not in ("role", "content") and value
        }
        parts.append(
            f'<div class="turn {kind}"><b>{markup(role)}</b>{content}'
            f"{facts(more) if more else ''}</div>"
        )
    return "".join(parts)
