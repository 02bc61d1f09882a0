"""The completions in a report: how many fail, how the same prompts were answered over time, the best and the worst."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import dropwhile
from typing import Any

from swift_r1.lab.report.blocks import Block, Passage, Passages, Table
from swift_r1.lab.report.parts import spread
from swift_r1.lab.runs.completions import CompletionTable
from swift_r1.lab.runs.failures import FAILURES
from swift_r1.lab.runs.pictures import pictures_of
from swift_r1.lab.runs.query import CompletionQuery

# of those that are shown over time
_PROMPTS = 4
_VERSIONS = 4
_SHOWN = 3  # best ones, and worst ones
_LAST = 0.2  # of the steps: from there the best and the worst are
_LOOKED_AT = 500  # completions, to find some of different prompts


def failures(completions: CompletionTable) -> list[Block]:
    """Returns how many completions of each class there were in the first fifth of the steps and in the last."""
    by_step = completions.failure_classes()
    count = math.ceil(len(by_step) * _LAST)
    parts = [by_step[:count], by_step[-count:]] if by_step else []
    rows = []
    for kind in FAILURES:
        shares = [
            sum(row[kind] for row in part) / sum(row[one] for row in part for one in FAILURES)
            for part in parts
        ]
        if any(shares):
            rows.append([kind, *(f"{share:.0%}" for share in shares)])
    return [Table(["completions", "first fifth", "last fifth"], rows)] if rows else []


def extremes(completions: CompletionTable, best: bool) -> list[Block]:
    """Returns the completions of the run's end with the highest reward, or the lowest if that is another; of equal ones
    those that are most unlike their group. One of a prompt."""
    steps = completions.steps()
    last = (steps[int(len(steps) * (1 - _LAST))], steps[-1]) if steps else (0, 0)

    def first_reward(descending: bool) -> Any:
        query = CompletionQuery(last, order_by="reward", descending=descending)
        rows = completions.page(query, limit=1)
        return rows[0].get("reward") if rows else None

    top = first_reward(best)
    other = first_reward(not best)
    if top is None or (top == other and not best):
        return []
    query = CompletionQuery(
        last,
        where=(("reward", "=", top),),
        order_by="advantage",
        descending=best,
    )
    found: dict[str, Block] = {}
    for row in completions.page(query, limit=_LOOKED_AT):
        found.setdefault(str(row.get("prompt_id")), _alone(row))
    return list(found.values())[:_SHOWN]


def _alone(row: Mapping[str, Any]) -> Passages:
    said = [
        f"{name} {_number(row[name])}"
        for name in ("reward", "advantage")
        if row.get(name) is not None
    ]
    title = ", ".join([f"{row.get('prompt_id', 'prompt')} at step {row['step']}", *said])
    names = [name for name in row if name.startswith("rewards/")]
    rewards = [f"{name.removeprefix('rewards/')} {_number(row[name])}" for name in names]
    more = ", ".join([*rewards, str(row.get("finish_reason", ""))]).rstrip(", ")
    return _passages(title, [Passage(more, spoken(row))], row)


def _passages(title: str, passages: Sequence[Passage], row: Mapping[str, Any]) -> Passages:
    """Returns passages with the prompt of a row and its images."""
    return Passages(title, passages, str(row.get("prompt", "")), pictures_of(row))


def same_prompts(evaluated: CompletionTable) -> list[Block]:
    """Returns the first completions of the first held-out prompts at some evaluations, the first and the last among
    them."""
    steps = evaluated.steps()
    if not steps:
        return []
    first = evaluated.page(CompletionQuery((steps[0], steps[0])), limit=_LOOKED_AT)
    prompt_ids = dict.fromkeys(
        row["prompt_id"] for row in first if isinstance(row.get("prompt_id"), str)
    )
    found: list[Block] = []
    for prompt_id in list(prompt_ids)[:_PROMPTS]:
        rows = []
        for step in spread(steps, _VERSIONS):
            rows += evaluated.page(CompletionQuery((step, step), prompt_id=prompt_id), limit=1)
        passages = [
            Passage(f"step {row['step']}, reward {_number(row.get('reward'))}", spoken(row))
            for row in rows
        ]
        if rows:
            found.append(_passages(prompt_id, passages, rows[0]))
    return found


def spoken(row: Mapping[str, Any]) -> str:
    """Returns what followed the prompt: the completion, or of several turns a line for each message from the model's
    first one on, with the tools that it calls."""
    messages = row.get("messages")
    objects = (
        [message for message in messages if isinstance(message, dict)]
        if isinstance(messages, list)
        else []
    )
    turns = list(dropwhile(lambda message: message.get("role") != "assistant", objects))
    if len(turns) < 2:
        return str(row.get("completion", ""))
    lines = [
        f"[{message['role']}] {' '.join(_parts(message))}"
        for message in turns
        if message.get("role")
    ]
    return "\n".join(lines)


def _parts(message: Mapping[str, Any]) -> Iterator[str]:
    if message.get("content"):
        yield str(message["content"])
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            yield f"{function.get('name')}({function.get('arguments')})"


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else "none"
