"""An episode as a tree: its calls of the model, a branch under the call that it goes back to, tools under theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swift_r1.lab.view.markup import excerpt, markup, matches
from swift_r1.lab.view.message_html import VALUE, Look, passage, shown, turns
from swift_r1.record.episodes import Message, conversations_of, recorded_calls, steps_of

Row = Mapping[str, Any]
Step = Mapping[str, Any]

_DEEPEST = 6  # levels that are moved in
_EXCERPT = 140  # characters


@dataclass(frozen=True, slots=True)
class _Node:
    """A call in the order in which the tree shows them."""

    number: int
    depth: int


def episode_tree(row: Row, times: Row, look: Look) -> str:
    """Returns the tree of a line of `completions.jsonl` with what `episode_times.jsonl` has of it; empty where the calls
    were not recorded. What holds the searched words is unfolded."""
    calls = recorded_calls(row)
    steps = steps_of(calls, conversations_of(row))
    tools = _Tools(row, times, steps)
    nodes = [
        f'<li class="d{min(node.depth, _DEEPEST)}">'
        f"{_call(node.number, steps, row, times, tools, look)}</li>"
        for node in _in_order(steps)
    ]
    return f'<ol class="tree">{"".join(nodes)}</ol>' if nodes else ""


def _in_order(steps: Sequence[Step]) -> Iterator[_Node]:
    """Yields each call, behind it what branches off there, one level deeper, and then the call that extends it."""
    children: dict[int | None, list[int]] = {}
    for number, step in enumerate(steps):
        children.setdefault(step["parent"], []).append(number)
    waiting = [_Node(number, 0) for number in reversed(children.get(None, []))]
    while waiting:
        node = waiting.pop()
        yield node
        behind = children.get(node.number, [])
        along = next((child for child in behind if steps[child]["kind"] == "extends"), None)
        if along is not None:
            waiting.append(_Node(along, node.depth))
        waiting += [_Node(child, node.depth + 1) for child in reversed(behind) if child != along]


def _call(
    number: int,
    steps: Sequence[Step],
    row: Row,
    times: Row,
    tools: _Tools,
    look: Look,
) -> str:
    step = steps[number]
    said = step["said"] or {}
    calls = [tools.answered(call) for call in tool_calls(said)]
    facts = [f"<b>turn {number + 1}</b>", *map(markup, _facts(number, step, row, times))]
    facts += [f"calls {markup(call.name)}" for call in calls]
    text = shown(said.get("content") or "")
    read = [
        message
        for message in step["read"]
        if not (message.get("role") == "tool" and shown(message.get("tool_call_id")) in tools.known)
    ]
    own = {name: value for name, value in said.items() if name != "tool_calls"}
    body = turns(read, look) + (turns([own], look) if own else "")
    body += "".join(_tool(call, look) for call in calls)
    is_open = bool(matches(text, look.words))
    return (
        f"<details{' open' if is_open else ''}><summary data-item>{' · '.join(facts)}"
        f'<span class="said">{excerpt(" ".join(text.split()), look.words, _EXCERPT)}</span></summary>{body}</details>'
    )


def _facts(number: int, step: Step, row: Row, times: Row) -> Iterator[str]:
    """Yields what is said of a call in its line."""
    before = step["parent"]
    if step["kind"] != "extends" and before is not None:
        yield f"{step['kind']}: goes back to turn {before + 1}"
    elif step["kind"] != "extends" and number > 0:
        yield f"{step['kind']}: another conversation"
    yield f"{step['tokens']:,} tok"
    if step["finish_reason"] == "length":
        yield "cut off"
    for name, title, form in (
        ("turn_rewards", "reward", "{:.4g}"),
        ("turn_advantages", "adv", "{:+.3g}"),
    ):
        value = _at(row.get(name), number)
        if value is not None:
            yield f"{title} {form.format(value)}"
    seconds = _at(times.get("calls"), number)
    if seconds is not None:
        yield f"{seconds:.2g} s"


def _at(values: Any, number: int) -> float | None:
    """Returns a number of a list; None where it has none there."""
    value = values[number] if isinstance(values, list) and number < len(values) else None
    return float(value) if isinstance(value, int | float) else None


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """A call of a tool: its answer is None where nobody read one; `outcome` and `seconds` where they are known."""

    id: str
    name: str
    arguments: str
    answer: str | None = None
    outcome: str = ""
    seconds: float | None = None


def tool_calls(message: Message) -> list[AnsweredCall]:
    """Returns the calls of tools in a message; what does not look like one is left out."""
    calls = message.get("tool_calls")
    found = []
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            name = shown(function.get("name"))
            found.append(
                AnsweredCall(shown(call.get("id")), name, shown(function.get("arguments")))
            )
    return found


class _Tools:
    """The answers of the tools of an episode, and what else is known of their calls."""

    def __init__(self, row: Row, times: Row, steps: Sequence[Step]) -> None:
        self._answers = {
            shown(message.get("tool_call_id")): shown(message.get("content"))
            for step in steps
            for message in step["read"]
            if message.get("role") == "tool"
        }
        self.known = {call.id for step in steps for call in tool_calls(step["said"] or {})}
        made = row.get("tool_calls")
        self._made = [
            (one, _at(times.get("tools"), number))
            for number, one in enumerate(made if isinstance(made, list) else ())
            if isinstance(one, dict)
        ]

    def answered(self, call: AnsweredCall) -> AnsweredCall:
        """Returns the call with its answer. Equal calls are answered in the order in which they were made."""
        for place, (one, seconds) in enumerate(self._made):
            if (shown(one.get("name")), shown(one.get("arguments"))) == (call.name, call.arguments):
                del self._made[place]
                outcome = shown(one.get("outcome"))
                return AnsweredCall(
                    call.id, call.name, call.arguments, self._answers.get(call.id), outcome, seconds
                )
        return AnsweredCall(call.id, call.name, call.arguments, self._answers.get(call.id))


def _tool(call: AnsweredCall, look: Look) -> str:
    facts = [f"<b>{markup(call.name)}</b>", markup(call.arguments, VALUE)]
    if call.outcome not in ("", "answer"):
        facts.append(markup(call.outcome))
    if call.seconds is not None:
        facts.append(f"{call.seconds:.2g} s")
    answer = "<p class=said>no answer was read</p>"
    if call.answer is not None:
        answer = passage(call.answer, look)
    is_open = bool(matches(call.answer or "", look.words))
    return (
        f'<details class="turn tool"{" open" if is_open else ""}><summary data-item>'
        f"{' · '.join(facts)}</summary>{answer}</details>"
    )
