"""A report of runs: those that differ by their seed alone are one, with a band; each is set against the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from swift_r1.lab.diagnosis.past import DETECTORS
from swift_r1.lab.diagnosis.verdict import headline
from swift_r1.lab.diagnosis.watch import Diagnosis
from swift_r1.lab.report import completions, parts
from swift_r1.lab.report.blocks import (
    Block,
    CodeBlock,
    Figures,
    Note,
    Report,
    Section,
    Table,
)
from swift_r1.lab.report.figures import figure
from swift_r1.lab.runs.completions import CompletionTable
from swift_r1.lab.runs.curves import RunGroup, about, constant, curves, groups_of, panels
from swift_r1.lab.runs.names import names_of
from swift_r1.record.folder import COMPLETIONS, EVAL_COMPLETIONS, RunFolder
from swift_r1.record.metric_log import BenchmarkEstimate
from swift_r1.runtime.terminal import duration

# events that are counted
_HAPPENED = ("resumed", "skipped", "server_lost", "server_joined", "server_left")


@dataclass(frozen=True)
class Opened:
    """A run and all that is read of it."""

    folder: RunFolder
    log: Diagnosis
    trained: CompletionTable
    evaluated: CompletionTable

    @property
    def problems(self) -> list[str]:
        problems = (
            *self.folder.problems,
            *self.log.problems,
            *self.trained.problems,
            *self.evaluated.problems,
        )
        return [f"{self.folder.name}: {text}" for text in dict.fromkeys(problems)]


def build(folders: Sequence[RunFolder]) -> Report:
    """Reads all that the report says. Raises UsageError without the package duckdb."""
    with ExitStack() as tables:
        runs = [_open(folder, tables) for folder in folders]
        of_folder = {run.folder: run for run in runs}
        alike = groups_of(folders, [run.log for run in runs], names_of(folders))
        groups = {group.name: [of_folder[folder] for folder in group.runs] for group in alike}
        sections: dict[str, Sequence[Block]] = {
            "Verdict": _verdicts(runs),
            "Signs of trouble": _diagnoses(runs),
            "Curves": _curves(alike),
            "Evaluation": _evaluations(_ordered(groups)),
            "The same prompts over time": _of_each(
                groups, lambda run: completions.same_prompts(run.evaluated)
            ),
            "What fails": _of_each(groups, lambda run: completions.failures(run.trained)),
            "Best completions": _of_each(
                groups, lambda run: completions.extremes(run.trained, best=True)
            ),
            "Worst completions": _of_each(
                groups, lambda run: completions.extremes(run.trained, best=False)
            ),
            "Cost": _cost(runs),
            "What was run": _what(groups),
        }
        summary = [_summary(run, len(runs)) for run in _ordered(groups)]
        problems = [text for run in runs for text in run.problems]
    title = f"Report: {', '.join(groups)}"
    filled = [Section(name, blocks) for name, blocks in sections.items() if blocks]
    return Report(title, filled, summary, problems)


def _open(folder: RunFolder, tables: ExitStack) -> Opened:
    log = Diagnosis(folder.path)
    log.refresh()
    trained = tables.enter_context(CompletionTable(folder.path / COMPLETIONS))
    evaluated = tables.enter_context(CompletionTable(folder.path / EVAL_COMPLETIONS))
    trained.refresh()
    evaluated.refresh()
    return Opened(folder, log, trained, evaluated)


def _what(groups: Mapping[str, Sequence[Opened]]) -> list[Block]:
    """Returns a column for each group, and the commands."""
    columns = []
    for group in groups.values():
        first = group[0].folder
        facts = {
            name: parts.without_folders(first, text) for name, text in parts.facts(first).items()
        }
        if len(group) > 1:
            facts["seeds"] = ", ".join(
                f"{run.folder.args.get('seed')} ({run.folder.name})" for run in group
            )
        facts["state"] = ", ".join(_state(run) for run in group)
        columns.append(facts)
    names = dict.fromkeys(name for facts in columns for name in facts)
    rows = [[name, *(facts.get(name, "") for facts in columns)] for name in names]
    blocks: list[Block] = [Table(["run", *groups], rows, len(groups) + 1)]
    for run, *_ in groups.values():
        for block in parts.command(run.folder):
            text = parts.without_folders(run.folder, block.text)
            blocks.append(CodeBlock(text, f"The command of {run.folder.name}"))
    return blocks


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


def _summary(run: Opened, runs: int) -> str:
    """Returns what came of a run: its reward with its interval, its evaluations, its length, and what is wrong."""
    log = run.log
    said = [headline(log.verdict, log.past)]
    said += [
        f"{name} on {benchmark} {first.value:.3f} to {last.value:.3f}"
        for benchmark, name, first, last in _ends(run)
    ]
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
    notes: list[Block] = []
    for run in runs:
        verdict = run.log.verdict
        if verdict is None:
            continue
        name = f"{run.folder.name}: " if len(runs) > 1 else ""
        notes += [Note(f"{name}Why: {cause.line}") for cause in verdict.causes]
        notes += [Note(f"{name}{trend.text}") for trend in verdict.trends]
    return notes


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


def _curves(groups: Sequence[RunGroup]) -> list[Block]:
    """Returns the charts of the page, and in a line the metrics that never change."""
    still = {panel: constant(panel, groups) for panel in panels(groups)}
    drawn = [
        figure(panel.title, curves(panel, groups), about(panel, groups))
        for panel, text in still.items()
        if not text
    ]
    texts = [text for text in still.values() if text]
    figures: list[Block] = [Figures(drawn)] if drawn else []
    return figures + ([Note(f"Constant: {'; '.join(texts)}.")] if texts else [])


def _ends(run: Opened) -> Iterator[tuple[str, str, BenchmarkEstimate, BenchmarkEstimate]]:
    """Yields each benchmark, its estimate's name, and that estimate at the first evaluation and at the last."""
    for benchmark in sorted(run.log.benchmarks()):
        name = run.log.estimate(benchmark)
        estimates = run.log.evaluations(benchmark, name)
        if estimates:
            yield benchmark, name, estimates[0], estimates[-1]


def _evaluations(runs: Sequence[Opened]) -> list[Block]:
    """Returns a table of the first and the last evaluation of each run, by benchmark."""
    rows = []
    for run in runs:
        for benchmark, name, first, last in _ends(run):
            shown = [f"{one.value:.3f} (step {one.step})" for one in (first, last)]
            known = last.low is not None and last.high is not None
            bounds = f"{last.low:.3f} to {last.high:.3f}" if known else ""
            rows.append([benchmark, run.folder.name, name, *shown, bounds])
    head = ["benchmark", "run", "estimate", "first", "last", "95 % of last"]
    return [Table(head, sorted(rows), texts=3)] if rows else []


def _of_each(
    groups: Mapping[str, Sequence[Opened]], blocks: Callable[[Opened], list[Block]]
) -> list[Block]:
    """Returns the blocks of the first run of each group, under its name where there are several."""
    of_groups: list[Block] = []
    for group in groups.values():
        of_run = blocks(group[0])
        if of_run and len(groups) > 1:
            of_groups.append(Note(f"Of {group[0].folder.name}:"))
        of_groups += of_run
    return of_groups


def _cost(runs: Sequence[Opened]) -> list[Block]:
    costs = {run.folder.name: parts.cost(run.folder, run.log) for run in runs}
    head = list(dict.fromkeys(what for cost in costs.values() for what in cost))
    rows = [[name, *(cost.get(what, "") for what in head)] for name, cost in costs.items() if cost]
    return [Table(["run", *head], rows)] if rows else []
