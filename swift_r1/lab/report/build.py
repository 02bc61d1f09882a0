"""A report of runs: those that differ by their seed alone are one, with a band; each is set against the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from swift_r1.lab.diagnosis.past import DETECTORS
from swift_r1.lab.diagnosis.trend import NORMAL_95
from swift_r1.lab.diagnosis.verdict import headline
from swift_r1.lab.diagnosis.watch import Diagnosis
from swift_r1.lab.report import completions, evaluations, parts
from swift_r1.lab.report.blocks import (
    Block,
    CodeBlock,
    Figure,
    Figures,
    Note,
    Report,
    Section,
    Table,
)
from swift_r1.lab.report.evaluations import Measured, right_shares
from swift_r1.lab.report.figures import Curve, curves
from swift_r1.lab.runs.completions import CompletionTable
from swift_r1.lab.runs.query import CompletionQuery
from swift_r1.record.folder import COMPLETIONS, EVAL_COMPLETIONS, RunFolder
from swift_r1.record.glossary import metric as glossary_entry
from swift_r1.record.glossary.titles import TITLES, evaluation_title, reward_title
from swift_r1.record.metric_log import Series, over_seeds, same_but_seed
from swift_r1.runtime.terminal import duration

# events that are counted
_HAPPENED = ("resumed", "skipped", "server_lost", "server_joined", "server_left")
_POINTS = 300  # of a curve, at most
# completions of one evaluation; characters of their texts, of which the ids are read
_MOST = 200_000
_LONGEST = 1_000


@dataclass(frozen=True)
class Opened:
    """A run and all that is read of it."""

    folder: RunFolder
    log: Diagnosis
    trained: CompletionTable
    evaluated: CompletionTable

    @property
    def problems(self) -> list[str]:
        found = (
            *self.folder.problems,
            *self.log.problems,
            *self.trained.problems,
            *self.evaluated.problems,
        )
        return [f"{self.folder.name}: {text}" for text in dict.fromkeys(found)]


def build(folders: Sequence[RunFolder]) -> Report:
    """Reads all that the report says. Raises UsageError without the package duckdb."""
    with ExitStack() as tables:
        runs = [_open(folder, tables) for folder in folders]
        alike: dict[str, list[Opened]] = {}
        for run in runs:
            key = same_but_seed(run.folder.args) if run.folder.args else run.folder.name
            alike.setdefault(key, []).append(run)
        groups = {_name(group): group for group in alike.values()}
        measured = _measured(groups)
        sections = {
            "Verdict": _verdicts(runs),
            "Signs of trouble": _diagnoses(runs),
            "Curves": _curves(groups),
            "Evaluation": [
                *_figures(_accuracies(groups)),
                *evaluations.blocks(measured, list(groups)),
            ],
            "The same prompts over time": _of_each(
                groups, lambda run: completions.same_prompts(run.evaluated)
            ),
            "What fails": _figures(
                [
                    figure
                    for run in runs
                    for figure in completions.over_time(run.folder.name, run.trained)
                ],
            ),
            "Best completions": _of_each(
                groups, lambda run: completions.extremes(run.trained, best=True)
            ),
            "Worst completions": _of_each(
                groups, lambda run: completions.extremes(run.trained, best=False)
            ),
            "Cost": _cost(runs),
            "What was run": _what(groups),
        }
        summary = [
            _summary(run, own, len(runs))
            for run, own in zip(_ordered(groups), measured, strict=True)
        ]
        problems = [text for run in runs for text in run.problems]
    title = f"Report: {', '.join(groups)}"
    own = [Section(name, blocks) for name, blocks in sections.items() if blocks]
    return Report(title, own, summary, problems)


def _open(folder: RunFolder, tables: ExitStack) -> Opened:
    log = Diagnosis(folder.path)
    log.refresh()
    trained = tables.enter_context(CompletionTable(folder.path / COMPLETIONS))
    evaluated = tables.enter_context(CompletionTable(folder.path / EVAL_COMPLETIONS))
    trained.refresh()
    evaluated.refresh()
    return Opened(folder, log, trained, evaluated)


def _name(group: Sequence[Opened]) -> str:
    first = group[0].folder.name
    return first if len(group) == 1 else f"{first} and {len(group) - 1} more"


def _what(groups: Mapping[str, Sequence[Opened]]) -> list[Block]:
    """Returns a column for each group, and the commands."""
    columns = []
    for group in groups.values():
        first = group[0].folder
        own = {
            name: parts.without_folders(first, text) for name, text in parts.facts(first).items()
        }
        if len(group) > 1:
            own["seeds"] = ", ".join(
                f"{run.folder.args.get('seed')} ({run.folder.name})" for run in group
            )
        own["state"] = ", ".join(_state(run) for run in group)
        columns.append(own)
    names = dict.fromkeys(name for own in columns for name in own)
    rows = [[name, *(own.get(name, "") for own in columns)] for name in names]
    found: list[Block] = [Table(["run", *groups], rows, len(groups) + 1)]
    for run, *_ in groups.values():
        for block in parts.command(run.folder):
            text = parts.without_folders(run.folder, block.text)
            found.append(CodeBlock(text, f"The command of {run.folder.name}"))
    return found


def _state(run: Opened) -> str:
    planned = run.folder.plan.get("total_steps")
    kinds = [event.get("kind") for event in run.folder.events]
    happened = [
        f"{kind.replace('_', ' ')} {kinds.count(kind)} x" for kind in _HAPPENED if kind in kinds
    ]
    state = f"{run.folder.status} at step {run.log.last_step}"
    if planned:
        state += f" of {planned}"
    if happened:
        state += f" ({', '.join(happened)})"
    return state


def _ordered(groups: Mapping[str, Sequence[Opened]]) -> list[Opened]:
    return [run for group in groups.values() for run in group]


def _summary(run: Opened, measured: Measured, runs: int) -> str:
    """Returns what came of a run: its reward and the accuracies with their intervals, its length, and what is wrong."""
    log = run.log
    said = [headline(log.verdict, log)]
    said += evaluations.gains(measured)
    steps = f"{log.last_step} steps"
    seconds = run.folder.summary.get("seconds")
    said.append(f"{steps} in {duration(seconds)}" if isinstance(seconds, int | float) else steps)
    signs = list(log.findings)
    looked = len(DETECTORS) - len(log.not_judged) - len(log.too_early)
    said.append(
        f"signs of trouble: {', '.join(signs)}"
        if signs
        else f"no signs of trouble ({looked} of {len(DETECTORS)} looked for)"
    )
    name = f"{run.folder.name}: " if runs > 1 else ""
    return name + " · ".join(said)


def _verdicts(runs: Sequence[Opened]) -> list[Block]:
    """Returns what keeps each run from learning, and how its rewards and evaluations changed, as `swift why` says
    it."""
    found: list[Block] = []
    for run in runs:
        verdict = run.log.verdict
        if verdict is None:
            continue
        name = f"{run.folder.name}: " if len(runs) > 1 else ""
        found += [Note(f"{name}Why: {one.line}") for one in verdict.causes]
        found += [Note(f"{name}{trend.text}") for trend in verdict.trends]
    return found


def _diagnoses(runs: Sequence[Opened]) -> list[Block]:
    """Returns a table of the signs of trouble in each run, as `swift why` says them."""
    rows = []
    for run in runs:
        for finding in run.log.findings.values():
            first, last = finding.steps
            rows.append(
                [
                    run.folder.name,
                    finding.name,
                    f"{first} to {last}",
                    finding.evidence,
                    finding.advice,
                ]
            )
    return [Table(["run", "sign", "steps", "evidence", "try"], rows, 5)] if rows else []


def _figures(found: Sequence[Figure]) -> list[Block]:
    return [Figures(found)] if found else []


def _curves(groups: Mapping[str, Sequence[Opened]]) -> list[Block]:
    """Returns the curves, and in a line those that never change, but for the rewards."""
    rewards = sorted({name for run in _ordered(groups) for name in run.log.rewards()})
    panels = {"reward": TITLES["reward"]}
    if len(rewards) > 1:
        panels |= {f"rewards/{name}/mean": reward_title(name) for name in rewards}
    found = []
    constant = []
    for metric, title in (panels | TITLES).items():
        drawn = []
        for number, (name, group) in enumerate(groups.items()):
            label = name if len(groups) > 1 else ""
            drawn.append(_curve(label, number, [run.log for run in group], metric))
        shown = [curve for curve in drawn if curve.steps]
        values = {value for curve in shown for value in curve.values}
        if len(values) == 1 and len(shown[0].steps) > 1 and metric not in panels:
            constant.append(f"{title} {values.pop():.4g}")
        elif shown:
            known = glossary_entry(metric)
            found.append(curves(title, shown, known.unit if known is not None else ""))
    return _figures(found) + ([Note(f"Constant: {', '.join(constant)}.")] if constant else [])


def _curve(name: str, number: int, seeds: Sequence[Diagnosis], metric: str) -> Curve:
    """Returns the mean over the seeds, with a band from the lowest to the highest, or of one run with the 95 % interval
    of each point where its standard error is logged; means of neighbours where there are many."""
    rows = over_seeds([log.get(metric) for log in seeds])
    error = "reward_stderr" if metric == "reward" else metric.replace("/mean", "/stderr")
    errors = seeds[0].get(error) if error != metric else Series()
    widths = dict(zip(errors.steps, errors.values, strict=True))
    band = len(seeds) > 1
    if not band and all(step in widths for step, *_ in rows):
        band = True
        halves = [NORMAL_95 * widths[step] for step, *_ in rows]
        rows = [
            (step, value, value - half, value + half)
            for (step, value, *_), half in zip(rows, halves, strict=True)
        ]
    means = []
    for part in parts.joined(rows, _POINTS):
        means.append([sum(column) / len(part) for column in zip(*part, strict=True)])
    steps, values, low, high = ([row[place] for row in means] for place in range(4))
    return Curve(name, number, steps, values, low if band else None, high if band else None)


def _accuracies(groups: Mapping[str, Sequence[Opened]]) -> list[Figure]:
    """Draws the accuracy on each benchmark, of learned answers the perplexity; a run alone has its intervals, several
    seeds a band from the lowest to the highest."""
    found = []
    logs = [run.log for group in groups.values() for run in group]
    for benchmark, metric in sorted(
        {(name, log.estimate(name)) for log in logs for name in log.benchmarks()}
    ):
        if metric not in ("accuracy", "perplexity"):
            continue
        drawn = []
        for number, (name, group) in enumerate(groups.items()):
            curve = _curve(name, number, [run.log for run in group], f"eval/{benchmark}/{metric}")
            if len(group) == 1 and benchmark in group[0].log.benchmarks():
                points = group[0].log.evaluations(benchmark, metric)
                low = [one.low for one in points if one.low is not None]
                high = [one.high for one in points if one.high is not None]
                if len(low) == len(high) == len(points):
                    curve = Curve(
                        name,
                        number,
                        [one.step for one in points],
                        [one.value for one in points],
                        low,
                        high,
                    )
            drawn.append(curve if len(groups) > 1 else replace(curve, label=""))
        intervals = all(len(group) == 1 for group in groups.values())
        shown = [one for one in drawn if one.steps]
        if shown:
            found.append(curves(evaluation_title(benchmark), shown, metric, intervals))
    return found


def _measured(groups: Mapping[str, Sequence[Opened]]) -> list[Measured]:
    found = []
    for number, group in enumerate(groups.values()):
        for run in group:
            known = {name: run.log.evaluations(name, "accuracy") for name in run.log.benchmarks()}
            steps = sorted({one.step for own in known.values() for one in own})
            ends = []
            for step in steps[:1] + steps[-1:]:
                rows = run.evaluated.page(CompletionQuery((step, step)), 0, _MOST, _LONGEST)
                ends.append(right_shares(rows, list(known)))
            first, last = ends or ({}, {})
            found.append(Measured(run.folder.name, number, known, first, last))
    return found


def _of_each(
    groups: Mapping[str, Sequence[Opened]], blocks: Callable[[Opened], list[Block]]
) -> list[Block]:
    """Returns the blocks of the first run of each group, under its name where there are several."""
    found: list[Block] = []
    for group in groups.values():
        own = blocks(group[0])
        if own and len(groups) > 1:
            found.append(Note(f"Of {group[0].folder.name}:"))
        found += own
    return found


def _cost(runs: Sequence[Opened]) -> list[Block]:
    found = {run.folder.name: parts.cost(run.folder, run.log) for run in runs}
    head = list(dict.fromkeys(name for own in found.values() for name in own))
    rows = [[name, *(own.get(one, "") for one in head)] for name, own in found.items() if own]
    return [Table(["run", *head], rows)] if rows else []
