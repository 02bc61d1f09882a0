"""Evaluations of runs against each other: what was right of each question, and whether a difference is more than luck.

`swift eval` has the same figures of models alone (`lab/evaluation/report.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from swift_r1.lab.evaluation.report import interval, percent
from swift_r1.lab.report.blocks import Note, Table
from swift_r1.record.metric_log import BenchmarkEstimate
from swift_r1.rewards.types import RIGHT
from swift_r1.training.evaluation.statistics import RESAMPLES, Difference, paired_difference

SEED = 0  # of the resampling, so that the figures of the same files are the same
# of each question, by `prompt_id`, the share of its completions that are right
Shares = Mapping[str, float]

_EXPLAINED = (
    "Accuracies in percent: the mean over questions of the share of their completions that are right. Intervals are of "
    "95 %, clustered by question. Gains and differences are of the questions that both answered: intervals by paired "
    f"bootstrap, the two-sided p by swapping pairs, {RESAMPLES:,} resamples."
)


@dataclass(frozen=True)
class Measured:
    """The evaluations of a run, by benchmark; `first` and `last` lack what eval_completions.jsonl does not have."""

    name: str
    group: int  # of the runs that differ by their seed
    accuracies: Mapping[str, Sequence[BenchmarkEstimate]]
    first: Mapping[str, Shares]
    last: Mapping[str, Shares]


def blocks(runs: Sequence[Measured], names: Sequence[str]) -> list[Note | Table]:
    """Returns what was measured, and the differences between the groups `names`; empty if nothing was evaluated."""
    benchmarks = sorted({name for run in runs for name in run.accuracies})
    gains = []
    differences = []
    for benchmark in benchmarks:
        gains += [_gain(benchmark, run) for run in runs if run.accuracies.get(benchmark)]
        for one, other in combinations(range(len(names)), 2):
            found = _between(benchmark, runs, one, other)
            if found is not None:
                less = f"{names[other]} less {names[one]}"
                differences.append([benchmark, less, str(found.questions), *_difference(found)])
    tables = [
        Table(
            ["benchmark", "run", "first", "last", "95 % of last", "gain", "95 % of gain", "p"],
            gains,
            texts=2,
        ),
        Table(
            ["benchmark", "last evaluations", "questions", "difference", "95 %", "p"],
            differences,
            texts=2,
        ),
    ]
    filled = [table for table in tables if table.rows]
    return [Note(_EXPLAINED), *filled] if filled else []


def gains(run: Measured) -> list[str]:
    """Says what a run gained on each benchmark, where both ends are known."""
    found = []
    for benchmark, own in run.accuracies.items():
        gain = difference(run.first.get(benchmark, {}), run.last.get(benchmark, {}))
        if len(own) > 1 and gain is not None:
            found.append(
                f"accuracy on {benchmark} {percent(own[0].value)} to {percent(own[-1].value)} %, "
                f"{percent(gain.value, '+')} (95 %: {interval(gain, '+')})"
            )
    return found


def _gain(benchmark: str, run: Measured) -> list[str]:
    """Returns the first and the last evaluation of a run, and what was gained between them."""
    own = run.accuracies[benchmark]
    shown = [f"{percent(estimate.value)} (step {estimate.step})" for estimate in (own[0], own[-1])]
    low = own[-1].low
    high = own[-1].high
    bounds = "" if low is None or high is None else f"{percent(low)} to {percent(high)}"
    gain = None
    if len(own) > 1:
        gain = difference(run.first.get(benchmark, {}), run.last.get(benchmark, {}))
    return [benchmark, run.name, *shown, bounds, *(_difference(gain) if gain else ["", "", ""])]


def _between(
    benchmark: str,
    runs: Sequence[Measured],
    one: int,
    other: int,
) -> Difference | None:
    """Returns the last evaluations of two groups; of the seeds of each the mean."""
    first, second = (
        [run.last[benchmark] for run in runs if benchmark in run.last and run.group == group]
        for group in (one, other)
    )
    if not first or not second:
        return None
    return difference(mean_shares(first), mean_shares(second))


def difference(first: Shares, second: Shares) -> Difference | None:
    """Second less first on the questions that both answered; None without any."""
    shared = sorted(first.keys() & second.keys())
    return (
        paired_difference([[(first[key], second[key]) for key in shared]], SEED) if shared else None
    )


def mean_shares(runs: Sequence[Shares]) -> Shares:
    """Over seeds: of each question that all were asked."""
    shared = sorted(set.intersection(*(set(one) for one in runs)))
    return {prompt: sum(one[prompt] for one in runs) / len(runs) for prompt in shared}


def right_shares(rows: Iterable[Mapping[str, Any]], benchmarks: Sequence[str]) -> dict[str, Shares]:
    """Returns the shares of each of the `benchmarks`, from the rows of eval_completions.jsonl of one step."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        # The first reward function says what is right.
        reward = next((value for key, value in row.items() if key.startswith("rewards/")), None)
        prompt_id = str(row.get("prompt_id"))
        # A held-out prompt's id begins with the name of its data set.
        held_out = max(
            (name for name in benchmarks if prompt_id.startswith(name)), key=len, default=""
        )
        right = isinstance(reward, int | float) and reward >= RIGHT
        values[str(row.get("benchmark") or held_out)][prompt_id].append(float(right))
    return {
        name: {prompt: sum(own) / len(own) for prompt, own in sorted(questions.items())}
        for name, questions in values.items()
    }


def _difference(one: Difference) -> list[str]:
    return [percent(one.value, "+"), interval(one, "+"), f"{one.p_value:.4f}"]
