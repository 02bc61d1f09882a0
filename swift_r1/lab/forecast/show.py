"""A forecast as tables for people and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from swift_r1.lab.diagnosis.trend import NORMAL_95
from swift_r1.lab.forecast.outlook import Outlook
from swift_r1.lab.forecast.verdict import SHOWN, ForecastVerdict, interval, percent
from swift_r1.record.metrics import standard_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_MOST_PROMPTS = 40  # rows of their table


def to_json(found: Outlook, verdict: ForecastVerdict, memory: str) -> dict[str, Any]:
    content: dict[str, Any] = standard_json(asdict(verdict) | asdict(found) | {"memory": memory})
    return content


def show(found: Outlook, verdict: ForecastVerdict, memory: str, console: Console) -> None:
    """Prints what `to_json` has, of many prompts the first."""
    from rich.text import Text

    for table in (_prompts(found), _rewards(found), _all(found)):
        console.print(table)
    left = len(found.prompts) - _MOST_PROMPTS
    lines = [f"{left} more prompts are in the JSON of --json"] if left > 0 else []
    lines += (
        [f"an optimizer step runs out of memory: {found.cost.fault}"]
        if found.cost.fault is not None
        else []
    )
    lines += [f"memory: {memory}", *_outcome(found), "", f"Verdict: {verdict.text}"]
    for number, one in enumerate(verdict.changes):
        if number < SHOWN or one.commands:
            shown = (f"$ {command}" for command in one.commands)
            lines.append("\n  ".join((f"- {one.evidence}", one.advice, *shown)))
    console.print(Text("\n".join(lines)), soft_wrap=True)


def _outcome(found: Outlook) -> Iterator[str]:
    """Yields what the run's rounds will tell, and what bounds the rise."""
    power = found.power
    if power.rounds is not None:
        planned = f"the {power.planned} planned"
        told = (
            f"{planned} are too few for a verdict"
            if math.isnan(power.least)
            else f"{planned} tell one of {power.least:.2g}"
        )
        yield (
            f"power: the mean reward of a round ({power.reward:.3g}) is known to +-{NORMAL_95 * power.error:.2g} (95 %); "
            f"{power.rounds} rounds tell a rise of {power.rise:.2g}, {told}"
        )
    if found.own_signal.value:
        yield (
            f"rise: to {power.best:.3g} if each prompt got the best of its {found.completions} completions every time; "
            "beyond that the model must find what it has not written here, and no forecast knows how fast it rises"
        )


def _prompts(found: Outlook) -> Table:
    table = _table("Prompts", "prompt", "pass", "95 %", "reward", "signal", "cut off", "tokens")
    for one in found.prompts[:_MOST_PROMPTS]:
        passed = f"{one.passed}/{one.completions}"
        between = f"{100 * one.low:.0f} to {100 * one.high:.0f}"
        cut = percent(one.truncated)
        signal = percent(one.signal)
        table.add_row(
            one.prompt_id,
            passed,
            between,
            _number(one.reward),
            signal,
            cut,
            f"{one.tokens:.0f}",
        )
    return table


def _rewards(found: Outlook) -> Table:
    table = _table(
        "Rewards",
        "function",
        "mean",
        "least",
        "largest",
        "above 0",
        "differs in",
        "no opinion",
        "invalid",
        "chance",
    )
    for one in found.rewards:
        shares = [
            percent(share) for share in (one.positive, one.differing, one.silent, one.invalid)
        ]
        shares.append("" if one.noise is None else percent(one.noise))
        table.add_row(one.name, *map(_number, (one.mean, one.least, one.largest)), *shares)
    return table


def _all(found: Outlook) -> Table:
    table = _table("In all", "what", "value", "95 % interval, or a note")
    for name, value, between in _lines(found):
        table.add_row(name, value, between.removeprefix("95 %: "))
    return table


def _lines(found: Outlook) -> Iterator[tuple[str, str, str]]:
    count = len(found.prompts)
    yield (
        f"pass ({found.rewards[0].name} of 1 or more)",
        percent(found.passes.value),
        interval(found.passes),
    )
    yield "prompts of which none pass", percent(found.share_of_prompts("none")), f"of {count}"
    yield "prompts of which all pass", percent(found.share_of_prompts("all")), f"of {count}"
    for size, one in found.signal.items():
        name = f"groups of {size} with a signal" + " (the run's)" * (size == found.own_size)
        if one is None:
            yield name, "?", f"{found.completions} completions per prompt are too few"
        else:
            yield name, percent(one.value), interval(one)
    yield (
        f"the run's by {found.rewards[0].name} alone",
        percent(found.task_signal.value),
        interval(found.task_signal),
    )
    yield (
        "optimizer steps without any",
        percent(found.silent_steps),
        f"{found.groups_per_step:g} groups each",
    )
    yield "cut off", percent(found.truncated.value), interval(found.truncated)
    if found.markers:
        yield f"without {' or '.join(found.markers)}", percent(found.unmarked), ""
    yield "repeated word for word", percent(found.repeated), ""
    cost = found.cost
    parts = ", ".join(f"{name} {seconds:.2g}" for name, seconds in cost.seconds.items())
    yield "seconds a step", "?" if cost.step is None else f"{cost.step:.3g}", parts
    yield "tokens of completions per step", f"{cost.tokens:,.0f}", ""
    if cost.hours is not None:
        yield "hours for the plan", f"{cost.hours:.2g}", "without start, evaluations, checkpoints"


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3g}"


def _table(title: str, first: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    table.add_column(first)
    for name in columns:
        table.add_column(name, justify="right")
    return table
