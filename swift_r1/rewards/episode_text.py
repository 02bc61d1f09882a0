"""An episode as a text for a language model that judges it: who said what, calls of tools and their answers included."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Messages = list[dict[str, Any]]

NOTE = "note"
"""The role of what we say about the messages that follow."""


def episode_messages(steps: Sequence[Mapping[str, Any]]) -> tuple[Messages, Messages]:
    """Returns what an episode was asked, and what followed, as messages whose `content` says all of them: the calls of
    tools too. `steps` are those of `record.episodes.steps_of`. Where a turn does not go on behind the one before it, a
    message of the role `note` says so."""
    task: Messages = []
    course: Messages = []
    tools: dict[str, str] = {}  # by the id of a call
    for number, step in enumerate(steps):
        read = [_plain(message, tools) for message in step["read"]]
        if number == 0:
            task = read
            read = []
        elif not (step["kind"] == "extends" and step["parent"] == number - 1):
            course.append({"role": NOTE, "content": _note(step, number)})
        course += read
        if step["said"] is not None:
            course.append(_plain(step["said"], tools))
    return task, course


def _note(step: Mapping[str, Any], number: int) -> str:
    if step["parent"] is None:
        return f"turn {number + 1} begins another conversation"
    return f"turn {number + 1} goes on behind turn {step['parent'] + 1}"


def _plain(message: Mapping[str, Any], tools: dict[str, str]) -> dict[str, Any]:
    """Returns a message with all that it says as its text; takes note of its calls of tools."""
    role = str(message.get("role"))
    if role == "tool":
        name = message.get("name") or tools.get(str(message.get("tool_call_id")), "")
        role = f"tool {name}".strip()
    parts = [f"(thinks) {message['reasoning_content']}"] if message.get("reasoning_content") else []
    parts += _texts(message.get("content"))
    for call in message.get("tool_calls") or ():
        function = call["function"]
        tools[str(call.get("id"))] = function["name"]
        parts.append(f"(calls) {function['name']}({_as_text(function['arguments'])})")
    return {"role": role, "content": "\n".join(parts)}


def _texts(content: Any) -> Iterator[str]:
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text", f"({part.get('type')})") if isinstance(part, Mapping) else part
        if text:
            yield str(text)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def told(messages: Sequence[Mapping[str, Any]]) -> str:
    """Returns messages as one text, each with who said it; the content alone of a single one."""
    if len(messages) == 1:
        return str(messages[0].get("content"))
    return "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in messages)


def without_middle(text: str, longest: int) -> str:
    """Returns a text; of one of more than `longest` characters its beginning and its end, with a mark between them."""
    left_out = len(text) - longest
    if left_out <= 0:
        return text
    head = longest - longest // 2
    return f"{text[:head]}\n[... {left_out:,} characters are left out here ...]\n{text[head + left_out :]}"
