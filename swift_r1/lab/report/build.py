"""A report of runs: those that differ by their seed alone are one, with a band; each is set against the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from swift_r1.lab.diagnosis.trend import NORMAL_95
from swift_r1.lab.diagnosis.verdict import headline
from swift_r1.lab.diagnosis.watch import Diagnosis
from swift_r1.lab.report import completions, evaluations, parts
from swift_r1.lab.report.blocks import Block, Figure, Figures, Note, Report, Section, Table
from swift_r1.lab.report.evaluations import Measured, right_shares
from swift_r1.lab.report.figures import Curve, curves
from swift_r1.lab.runs.completions import CompletionTable
from swift_r1.lab.runs.query import CompletionQuery
from swift_r1.record.folder import COMPLETIONS, EVAL_COMPLETIONS, RunFolder
from swift_r1.record.metric_log import Series, over_seeds, same_but_seed

_PANELS = {
    "reward": "Reward",
    "reward_std": "Standard deviation of the reward",
    "frac_reward_zero_std": "Share of groups without a signal",
    "completions/mean_length": "Mean length, in tokens",
    "completions/clipped_ratio": "Share of completions that were cut off",
    "entropy": "Entropy",
    "completions/repeated": "Share of completions that equal another of their prompt",
    "policy/moved": "Mean change of a token's log-prob since the start, in nats",
    "kl": "KL to the reference policy",
    "kl/pull": "Pull of the KL, against an advantage of 1",
    "teacher_kl": "KL to the teacher",
    "clip_ratio/low": "Share of tokens clipped below",
    "clip_ratio/high": "Share of tokens clipped above",
    "rollout/logp_diff": "Log-probs: trainer against engine",
    "grad_norm": "Norm of the gradient",
    "loss": "Loss",
    "token_accuracy": "Share of learned tokens that were the likeliest",
    "perplexity": "Perplexity",
    "value_loss": "Loss of the critic",
    "explained_variance": "Variance that the critic explains",
    "rollout/staleness/mean": "Staleness, in rounds",
    "tokens_per_second": "Tokens per second",
}
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


def build(folders: Sequence[RunFolder], first: Sequence[Section] = ()) -> Report:
    """Reads all that the report says, after the sections that come `first`. Raises UsageError without the package
    duckdb."""
    with ExitStack() as tables:
        runs = [_open(folder, tables) for folder in folders]
        alike: dict[str, list[Opened]] = {}
        for run in runs:
            key = same_but_seed(run.folder.args) if run.folder.args else run.folder.name
            alike.setdefault(key, []).append(run)
        groups = {_name(group): group for group in alike.values()}
        sections = {
            "Verdict": _verdicts(runs),
            "What was run": _what(groups),
            "Signs of trouble": _diagnoses(runs),
            "Curves": _figures(_curves(groups)),
            "Evaluation": [*_figures(_accuracies(groups)), *evaluations.blocks(*_measured(groups))],
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
        }
        problems = [text for run in runs for text in run.problems]
    title = f"Report: {', '.join(groups)}"
    own = [Section(name, blocks) for name, blocks in sections.items() if blocks]
    return Report(title, [*first, *own], problems)


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
        own = parts.facts(group[0].folder)
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
        command = parts.command(run.folder)
        if command:
            found += [Note(f"The command of {run.folder.name}:"), *command]
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


def _verdicts(runs: Sequence[Opened]) -> list[Block]:
    """Returns whether each run learns, by how much, and what keeps it from it, as `swift why` says it."""
    found: list[Block] = []
    for run in runs:
        verdict = run.log.verdict
        lines = [headline(verdict, run.log)]
        if verdict is not None:
            lines += [f"Why: {one.line}" for one in verdict.causes]
            lines += [trend.text for trend in verdict.trends]
        if len(runs) > 1:
            lines[0] = f"{run.folder.name}: {lines[0]}"
        found += map(Note, lines)
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


def _curves(groups: Mapping[str, Sequence[Opened]]) -> list[Figure]:
    panels = {"reward": _PANELS["reward"]}
    for name in sorted(
        {name for group in groups.values() for run in group for name in run.log.rewards()}
    ):
        panels[f"rewards/{name}/mean"] = f"Reward: {name}"
    found = []
    for metric, title in (panels | _PANELS).items():
        drawn = []
        for number, (name, group) in enumerate(groups.items()):
            label = name if len(groups) > 1 else ""
            drawn.append(_curve(label, number, [run.log for run in group], metric))
        shown = [curve for curve in drawn if curve.steps]
        if shown:
            found.append(curves(title, shown))
    return found


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
            found.append(curves(f"{metric.capitalize()} on {benchmark}", shown, intervals))
    return found


def _measured(groups: Mapping[str, Sequence[Opened]]) -> tuple[list[Measured], list[str]]:
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
    return found, list(groups)


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
