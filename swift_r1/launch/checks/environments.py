"""What `swift check --env` shows: the environment is loaded and played, with a script in the model's place, and its
tasks are proved where they have solutions of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from swift_r1.errors import UsageError
from swift_r1.plugins.environments.base import ENV_ROW, Proof, adapter
from swift_r1.plugins.environments.process import try_environment
from swift_r1.plugins.environments.scripted import MOST_TURNS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_LONGEST = 600  # characters of a message that are shown
_SHOWN = 7  # messages of an episode that are shown
_PROOFS = 40  # of tasks that are as they should be
_AT_ONCE = 4  # tasks that are proved: their sandboxes wait more than they work


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode that was played.

    Attributes:
        script: what answered in the model's place.
        result: what the agent returned: `reward` and its parts; None where it raised `error`.
        first: the messages of the model's first turn; empty where the model was never asked.
        messages: all of them, as they were in the end.
        tools: as OpenAI describes them.
    """

    script: str
    seconds: float
    turns: int
    result: Mapping[str, Any] | None
    error: str | None
    first: Sequence[Mapping[str, Any]]
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class EnvironmentReport:
    """How an environment did. `notes` are worth a look and break nothing, `faults` would break a run; `proofs` are of
    tasks with solutions of their own."""

    name: str
    version: str = ""
    proofs: list[Proof] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def check_environment(
    spec: str, args: Mapping[str, Any], kept: Sequence[str], num_rows: int, seconds: float
) -> EnvironmentReport:
    """Proves the environment's tasks; loads it in a process of its own, reads rows, and plays episodes of the first of
    them, all within so many seconds."""
    report = EnvironmentReport(spec)
    try:
        report.proofs = _proofs(spec, args)
    except UsageError as error:
        report.faults += error.faults
    report.faults += [fault for proof in report.proofs for fault in proof.faults]
    if report.faults:
        return report
    lines, fault = try_environment(spec, args, kept, num_rows, seconds)
    report.faults += [fault] if fault is not None else []
    if lines:
        about, *episodes = lines
        report.version = about["version"]
        report.rows = about["rows"]
        report.episodes = [Episode(**line) for line in episodes]
    report.faults += _faults(report)
    report.notes += _notes(report.episodes)
    return report


def _proofs(spec: str, args: Mapping[str, Any]) -> list[Proof]:
    """Proves each task of an environment, in their order. Raises UsageError."""
    from swift_r1.record.console import progress_bar
    from swift_r1.runtime.terminal import Terminal

    provers = adapter(spec, args).provers()
    if not provers:
        return []
    with progress_bar(Terminal(stderr=True)) as bar, ThreadPoolExecutor(_AT_ONCE) as pool:
        task = bar.add_task("tasks", total=len(provers))
        begun = [pool.submit(prover) for prover in provers]
        for _ in as_completed(begun):
            bar.advance(task)
        return [one.result() for one in begun]


def _faults(report: EnvironmentReport) -> Iterator[str]:
    for episode in report.episodes:
        if episode.error is not None:
            yield f"--env {report.name}: an episode ({episode.script}) raises {episode.error}"
        elif not episode.turns:
            yield f"--env {report.name}: an episode ({episode.script}) ends without asking the model"
        elif episode.result is None or episode.result.get("reward") is None:
            yield f"--env {report.name}: an episode ({episode.script}) has no reward"


def _notes(episodes: Sequence[Episode]) -> Iterator[str]:
    begun = [one.first for one in episodes if one.turns]
    if begun and any(first != begun[0] for first in begun):
        yield "episodes of one row begin differently: completions of a group are compared as if they began alike"
    if any(one.turns == MOST_TURNS for one in episodes):
        yield f"an episode was cut off after {MOST_TURNS} turns: --max_turns limits those of a run"
    rewards = {one.result["reward"] for one in episodes if one.result is not None}
    if len(episodes) > 1 and len(rewards) == 1:
        yield f"all episodes have the reward {rewards.pop()}: what a script does here may be too little to tell"


def show_environment(report: EnvironmentReport, console: Console) -> None:
    """Prints the report."""
    from rich.table import Table

    version = f" ({report.version})" if report.version else ""
    console.print(f"environment {report.name}{version}")
    if report.proofs:
        console.print(_proofs_table(report.proofs))
    if report.rows:
        table = Table("the first row", "", show_lines=True)
        for message in report.rows[0]["messages"]:
            table.add_row(message["role"], message_text(message))
        for name, value in report.rows[0].get(ENV_ROW, {}).items():
            if name != "prompt":
                table.add_row(name, cut(json.dumps(value, ensure_ascii=False)), style="dim")
        console.print(table)
    if report.episodes and report.episodes[0].tools:
        table = Table("tool", "arguments", "what the model reads about it")
        for tool in report.episodes[0].tools:
            function = tool["function"]
            table.add_row(
                function["name"],
                _arguments(function),
                cut(function.get("description") or ""),
            )
        console.print(table)
    if report.episodes:
        one = report.episodes[0]
        console.print(messages_table(f"an episode: {one.script}", one.messages))
        console.print(_numbers(report.episodes))
    for note in report.notes:
        console.print(note, style="yellow", soft_wrap=True)


def _proofs_table(proofs: Sequence[Proof]) -> Table:
    """Returns a table of all tasks that are not as they should be, and the first ones that are."""
    from rich.table import Table

    table = Table("task", "its own solution", "no solution", "seconds", "")
    wrong = [proof for proof in proofs if proof.faults]
    right = [proof for proof in proofs if not proof.faults]
    for proof in wrong + right[:_PROOFS]:
        numbers = (_value(proof.oracle), _value(proof.empty), f"{proof.seconds:.2f}")
        table.add_row(
            proof.task,
            *numbers,
            "wrong" if proof.faults else "right",
            style="red" if proof.faults else "",
        )
    more = len(right) - _PROOFS
    if more > 0:
        table.add_row(f"... {more} more", "", "", "", "right", style="dim")
    return table


def _numbers(episodes: Sequence[Episode]) -> Table:
    """Returns a column for each episode: its reward, the parts of that, and what else the agent returned."""
    from rich.table import Table

    table = Table("played with", *(episode.script for episode in episodes))
    names = dict.fromkeys(name for episode in episodes for name in episode.result or {})
    for name in ["reward"] * ("reward" in names) + [name for name in names if name != "reward"]:
        values = ((episode.result or {}).get(name, "") for episode in episodes)
        table.add_row(
            name,
            *(_value(value) for value in values),
            style="bold" * (name == "reward"),
        )
    table.add_section()
    table.add_row("turns of the model", *(str(episode.turns) for episode in episodes))
    table.add_row("seconds", *(f"{episode.seconds:.2f}" for episode in episodes))
    return table


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value[:5]))}{', ...' if len(value) > 5 else ''}]"
    return "none" if value is None else str(value)


def _arguments(function: Mapping[str, Any]) -> str:

    schema = function.get("parameters") or {}
    required = schema.get("required", ())
    lines = (
        f"{name}{'' if name in required else '?'}: {_type(about)}"
        for name, about in schema.get("properties", {}).items()
    )
    return "\n".join(lines)


def _type(about: Mapping[str, Any]) -> str:
    if "enum" in about:
        return " | ".join(map(str, about["enum"]))
    options = about.get("anyOf") or ()
    if "$ref" in about:
        return str(about["$ref"]).rpartition("/")[2]
    return " | ".join(map(_type, options)) if options else str(about.get("type", "any"))


def messages_table(title: str, messages: Sequence[Mapping[str, Any]]) -> Table:
    """Returns a table of the first messages of an episode."""
    from rich.table import Table

    table = Table(title, "", show_lines=True)
    for message in messages[:_SHOWN]:
        table.add_row(str(message.get("role")), message_text(message))
    more = len(messages) - _SHOWN
    if more > 0:
        table.add_row("", f"... {more} more messages", style="dim")
    return table


def message_text(message: Mapping[str, Any]) -> str:
    calls = [
        f"{call['function']['name']}({call['function']['arguments']})"
        for call in message.get("tool_calls") or ()
    ]
    return cut("\n".join(filter(None, [message.get("content") or "", *calls])))


def cut(text: str) -> str:
    return (
        text
        if len(text) <= _LONGEST
        else f"{text[:_LONGEST]} ... [{len(text) - _LONGEST} more characters]"
    )
