"""The report for people: one table of rewards, the prompts, and what is wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from swift_r1.checking.run import CheckReport


def show(report: CheckReport, console: Console) -> None:
    """Prints the report."""
    for plugin in report.plugins:
        kinds = {
            "rewards": plugin.orms,
            "datasets": plugin.datasets,
            "schedulers": plugin.schedulers,
            "environments": plugin.envs,
            "other": plugin.others,
        }
        text = "; ".join(f"{kind} {', '.join(names)}" for kind, names in kinds.items() if names)
        console.print(f"plugin {escape(plugin.path)}: {escape(text) or 'registered nothing'}")
    for data in report.datasets:
        tokens = "" if data.prompt_tokens is None else f", {data.prompt_tokens} tokens"
        columns = ", ".join(data.columns) or "none"
        console.print(f"dataset {escape(data.name)}: {data.rows} rows, columns {escape(columns)}; prompt{tokens}:")
        # Exactly as it is: not wrapped, nothing in it is markup.
        console.print(data.prompt, style="dim", soft_wrap=True, markup=False, highlight=False, emoji=False)
        for problem in data.problems:
            console.print(f"  {escape(problem)}", style="yellow" if data.ok else "red", soft_wrap=True)
    if report.rewards:
        console.print(_rewards(report))
    for one in report.rewards:
        for problem in one.problems:
            console.print(f"{escape(one.name)}: {escape(problem)}", style="yellow" if one.ok else "red", soft_wrap=True)
    for fault in report.faults:
        console.print(escape(fault), style="red", soft_wrap=True)
    console.print("all good" if report.ok else "this would break a run", style="green" if report.ok else "red")


def _rewards(report: CheckReport) -> Table:
    kinds = list(dict.fromkeys(kind for one in report.rewards for kind in one.values))
    table = Table(Column("reward", no_wrap=True), *kinds, "right > wrong", "ms a group")
    for one in report.rewards:
        values = [_shown(one.values.get(kind, ())) for kind in kinds]
        tells = {True: "yes", False: "no", None: "?"}[one.tells_right]
        style = "red" if not one.ok else "yellow" if one.problems else ""
        table.add_row(escape(one.name), *values, tells, f"{one.milliseconds:.1f}", style=style)
    return table


def _shown(values: Sequence[float | None]) -> str:
    """One value, or the range over the rows."""
    texts = list(
        dict.fromkeys("none" if value is None else "invalid" if math.isnan(value) else f"{value:g}" for value in values)
    )
    if len(texts) < 3:
        return ", ".join(texts)
    numbers = sorted(value for value in values if value is not None and not math.isnan(value))
    return f"{numbers[0]:g}..{numbers[-1]:g}" if numbers else ", ".join(texts)
