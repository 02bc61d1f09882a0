"""`swift view --text`: runs in the terminal; also over ssh, in 80 columns, and without colours when piped."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from swift_r1.errors import EXIT_OK, UsageError
from swift_r1.lab.diagnosis.verdict import brief, headline
from swift_r1.lab.diagnosis.watch import Diagnosis
from swift_r1.lab.report.completions import spoken
from swift_r1.lab.report.parts import facts, sparkline
from swift_r1.lab.runs.completions import CompletionTable
from swift_r1.lab.runs.names import names_of
from swift_r1.lab.runs.progress import progress_of
from swift_r1.lab.runs.query import FAILURE, CompletionQuery
from swift_r1.lab.runs.timeline import Timeline
from swift_r1.lab.view.message_html import question
from swift_r1.record.folder import COMPLETIONS, RunFolder
from swift_r1.record.metric_log import MetricLog
from swift_r1.runtime.terminal import Terminal
from swift_r1.runtime.visible import visible

_METRICS = (
    *(
        "reward_std",
        "frac_reward_zero_std",
        "completions/mean_length",
        "completions/clipped_ratio",
        "completions/repeated",
        "policy/moved",
        "kl",
        "entropy",
    ),
    *(
        "clip_ratio/low",
        "clip_ratio/high",
        "rollout/logp_diff",
        "grad_norm",
        "loss",
        "token_accuracy",
        "perplexity",
        "tokens_per_second",
        "time/step",
    ),
    *("agent/failed", "agent/sequences"),
)
_STATE = ("run", "verdict", "status", "progress", "time", "reward")  # of one of several runs
_LEFT_OUT = ("run", "versions")  # of the newest
_NUMBERS = ("first", "last", "reward", "advantage", "step")  # columns
_MARKS = 6  # the last events
# shown where no step is named
_GROUPS = 3
_READ = 64  # groups, of which those are chosen whose rewards differ most
_COMPLETIONS = 8
_LONGEST = 10_000  # characters of a text that are read


def show_text(runs: Sequence[RunFolder], step: int | None) -> int:
    """Prints an overview of all runs, and of the newest its curves and groups: those of `step`, else of the last step.
    Returns the exit code. Raises UsageError where the run has no such step."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8
    console = Terminal(highlight=False)
    logs = [Diagnosis(run.path) for run in runs]
    for log in logs:
        log.refresh()
    newest = runs[-1]
    log = logs[-1]
    with CompletionTable(newest.path / COMPLETIONS) as table:
        table.refresh()
        query = _asked(table, step)
        if len(runs) > 1:
            states = [
                progress_of(run, log) | {"run": name, "verdict": brief(log.verdict, log.past)}
                for run, log, name in zip(runs, logs, names_of(runs), strict=True)
            ]
            rows = [[_line(state.get(name, "")) for name in _STATE] for state in states]
            console.print(_table(_STATE, rows))
            console.print(f"\n{_line(newest.name)}")
        _overview(console, newest, log)
        if not newest.supervised:
            _groups(console, table, query, few=step is None)
        for problem in dict.fromkeys([*newest.problems, *log.problems, *table.problems]):
            console.print(_line(f"! {problem}"), style="yellow")
    return EXIT_OK


def _shortened(steps: Sequence[int]) -> str:
    """Returns the steps as text, only the first and the last ones where there are many."""
    names = [str(step) for step in steps] or ["none"]
    return ", ".join(names if len(names) <= 8 else [*names[:3], "...", *names[-3:]])


def _asked(table: CompletionTable, step: int | None) -> CompletionQuery:
    """Returns which completions to show. Raises UsageError: there are none of that step."""
    steps = table.steps()
    if step is not None and step not in steps:
        raise UsageError(
            f"--step {step}: no completions at this step; recorded steps: {_shortened(steps)}"
        )
    shown = step if step is not None else max(steps, default=0)
    return CompletionQuery(steps=(shown, shown))


def _overview(console: Console, run: RunFolder, log: Diagnosis) -> None:
    about = (
        _judged(log)
        | progress_of(run, log)
        | {"folder": str(run.path)}
        | facts(run)
        | {"command": shlex.join(run.command)}
    )
    rows = [
        [_line(name), _line(text)] for name, text in about.items() if text and name not in _LEFT_OUT
    ]
    console.print(_table(["", ""], rows, head=False))
    _show(console, ["metric", f"to step {log.last_step:,}", "first", "last"], _metrics(log))
    timeline = Timeline(run.path)
    timeline.refresh()
    marks = timeline.marks[-_MARKS:]
    rows = [[_time(mark.time), str(mark.step), mark.kind, _line(mark.text)] for mark in marks]
    _show(console, ["event", "step", "", ""], rows)


def _judged(log: Diagnosis) -> dict[str, str]:
    """Returns the verdict and its first cause, by what they are called."""
    verdict = log.verdict
    found = {"verdict": headline(verdict, log.past)}
    if verdict is None:
        return found
    for one in verdict.causes[:1]:
        found |= {"why": f"{one.name}: {one.evidence}", "try": one.advice}
    if len(verdict.causes) > 1:
        found["see also"] = ", ".join(one.name for one in verdict.causes[1:])
    return found


def _show(console: Console, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table below an empty line; nothing without rows."""
    if rows:
        console.print()
        console.print(_table(names, rows))


def _metrics(log: MetricLog) -> list[list[str]]:
    rows = []
    by_function = [f"rewards/{name}/mean" for name in log.rewards()]
    evaluated = [f"eval/{name}/{log.estimate(name)}" for name in log.benchmarks()]
    for name in ("reward", *log.rewards_of_tasks(), *by_function, *evaluated, *_METRICS):
        known = [value for value in log.get(name).values if not math.isnan(value)]
        if known:
            rows.append(
                [
                    _line(name),
                    sparkline(log.get(name).values),
                    f"{known[0]:.4g}",
                    f"{known[-1]:.4g}",
                ]
            )
    return rows


def _groups(
    console: Console,
    table: CompletionTable,
    query: CompletionQuery,
    few: bool,
) -> None:
    groups = table.groups(query)
    if not groups:
        console.print("\nno completions yet")
    read = [table.group(step, group, _LONGEST) for step, group in groups[: _READ if few else None]]
    found = [rows for rows in read if rows]  # a resume may have cut the file
    if few:
        found = sorted(found, key=_spread, reverse=True)[:_GROUPS]
    for rows in found:
        console.print()
        _print_group(console, rows[: _COMPLETIONS if few else len(rows)], len(rows))
    if few and len(groups) > _GROUPS:
        console.print(f"\n{len(groups) - _GROUPS} more groups: --step {groups[0][0]}")


def _spread(rows: Sequence[dict[str, Any]]) -> float:
    """Returns the difference between a group's best and worst reward: what there was to learn."""
    rewards = [row["reward"] for row in rows if isinstance(row.get("reward"), int | float)]
    return max(rewards, default=0.0) - min(rewards, default=0.0)


def _print_group(console: Console, rows: Sequence[dict[str, Any]], count: int) -> None:
    first = rows[0]
    head = Text(
        f"step {first['step']}, group {first['group']}, {_line(str(first.get('prompt_id')))}: ",
        "bold",
    )
    head.append(_line(question(str(first.get("prompt", "")))), "not bold")
    head.truncate(console.width, overflow="ellipsis")
    console.print(head)
    names = ["", "reward", "advantage", ""]
    cells = []
    for row in rows:
        reward = _number(row.get("reward"))
        advantage = _number(row.get("advantage"))
        cells.append([str(row["number"]), reward, advantage, str(row[FAILURE])])
    room = console.width - sum(
        max(map(len, column)) + 2 for column in zip(names, *cells, strict=True)
    )
    for row, own in zip(rows, cells, strict=True):
        text = Text(_line(spoken(row)))
        text.truncate(max(8, room), overflow="ellipsis")
        own.append(text.plain)
    console.print(_table([*names, "completion"], cells))
    if count > len(rows):
        console.print(f"{count - len(rows)} more completions")


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], head: bool = True) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=head)
    for name in names:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _time(seconds: float) -> str:
    """Writes a time in this machine's time zone; nothing for a time of a damaged file."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return ""


def _number(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else "-"


def _line(text: str) -> str:
    """Writes a text in one line, without anything that could act on the terminal."""
    return visible(" ".join(text.split()))
