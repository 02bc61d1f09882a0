"""Evaluations of runs against each other: what was right of each question, and whether a difference is more than luck.

`swift eval` has the same figures of models alone (`evaluation/report.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from swift_r1.evaluation.report import interval, p_text, percent
from swift_r1.evaluation.results import RIGHT
from swift_r1.evaluation.statistics import RESAMPLES, Difference, paired_bootstrap
from swift_r1.report.blocks import Note, Table

SEED = 0  # of the resampling, so that the figures of the same files are the same
Shares = Mapping[str, float]  # of each question, by `prompt_id`, the share of its completions that are right

_EXPLAINED = (
    "Accuracies in percent: the mean over questions of the share of their completions that are right. Intervals are of "
    "95 %, clustered by question. Gains and differences: paired bootstrap over the questions that both answered, "
    f"{RESAMPLES:,} resamples, of which `p` is the two-sided share that says otherwise."
)


@dataclass(frozen=True)
class Accuracy:
    """One benchmark at one step, as logging.jsonl has it: from 0 to 1; the interval is None in older runs."""

    step: int
    value: float
    low: float | None
    high: float | None


def accuracies(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Accuracy]]:
    """Of each benchmark, from the lines of logging.jsonl; a step that a resumed run came to again counts once."""
    found: dict[str, dict[int, Accuracy]] = defaultdict(dict)
    for row in rows:
        for key, value in row.items():
            if key.startswith("eval/") and key.endswith("/accuracy") and isinstance(value, int | float):
                prefix = key.removesuffix("accuracy")
                low, high = (_bound(row, prefix, end) for end in ("/low", "/high"))
                found[prefix.removeprefix("eval/").rstrip("/")][row["step"]] = Accuracy(row["step"], value, low, high)
    return {name: [own[step] for step in sorted(own)] for name, own in sorted(found.items())}


def _bound(row: Mapping[str, Any], prefix: str, end: str) -> float | None:
    return next((value for key, value in row.items() if key.startswith(f"{prefix}avg@") and key.endswith(end)), None)


def right_shares(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Shares]:
    """Of each of the benchmarks `names`, from the rows of eval_completions.jsonl of one step."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        # The first reward function says what is right.
        reward = next((value for key, value in row.items() if key.startswith("rewards/")), None)
        name = row.get("benchmark") or _held_out(row["prompt_id"], names)
        values[name][row["prompt_id"]].append(float(reward is not None and reward >= RIGHT))
    return {
        name: {prompt: sum(own) / len(own) for prompt, own in sorted(questions.items())}
        for name, questions in values.items()
    }


def _held_out(prompt_id: str, names: Sequence[str]) -> str:
    """The data set of a held-out prompt, whose id begins with its name."""
    return max((name for name in names if prompt_id.startswith(name)), key=len, default=prompt_id)


def mean_shares(runs: Sequence[Shares]) -> Shares:
    """Over seeds: of each question that all were asked."""
    shared = sorted(set.intersection(*(set(one) for one in runs)))
    return {prompt: sum(one[prompt] for one in runs) / len(runs) for prompt in shared}


def difference(first: Shares, second: Shares) -> Difference | None:
    """Second less first on the questions that both answered; None without any."""
    shared = sorted(first.keys() & second.keys())
    return paired_bootstrap([[(first[key], second[key]) for key in shared]], SEED) if shared else None


@dataclass(frozen=True)
class Measured:
    """The evaluations of a run; `first` and `last` are by benchmark, empty where eval_completions.jsonl lacks them."""

    name: str
    group: int
    accuracies: Mapping[str, Sequence[Accuracy]]
    first: Mapping[str, Shares]
    last: Mapping[str, Shares]


def accuracy_table(runs: Sequence[Measured]) -> Table:
    """A line per benchmark and run: its first and last evaluation, and what was gained between them."""
    rows = []
    for benchmark in _benchmarks(runs):
        for run in runs:
            if not (own := run.accuracies.get(benchmark)):
                continue
            first, last = own[0], own[-1]
            gain = difference(run.first.get(benchmark, {}), run.last.get(benchmark, {})) if len(own) > 1 else None
            rows.append(
                [
                    *(benchmark, run.name, f"{percent(first.value)} (step {first.step})"),
                    f"{percent(last.value)} (step {last.step})",
                    "" if last.low is None or last.high is None else f"{percent(last.low)} to {percent(last.high)}",
                    *(_difference(gain) if gain else ["", "", ""]),
                ]
            )
    head = ["benchmark", "run", "first", "last", "95 % of last", "gain", "95 % of gain", "p"]
    return Table(head, rows, texts=2)


def difference_table(runs: Sequence[Measured], names: Sequence[str]) -> Table | None:
    """The last evaluations of every two groups of seeds, `names`, on the questions that both answered; None where there
    are none to compare."""
    rows = []
    for benchmark in _benchmarks(runs):
        for one, other in combinations(range(len(names)), 2):
            groups = [
                [shares for run in runs if run.group == group and (shares := run.last.get(benchmark))]
                for group in (one, other)
            ]
            found = difference(*(mean_shares(group) for group in groups)) if all(groups) else None
            if found is not None:
                rows.append([benchmark, f"{names[other]} less {names[one]}", str(found.questions), *_difference(found)])
    head = ["benchmark", "last evaluations", "questions", "difference", "95 %", "p"]
    return Table(head, rows, texts=2) if rows else None


def blocks(runs: Sequence[Measured], names: Sequence[str]) -> list[Note | Table]:
    """What the tables say, under the words for it; empty where nothing was evaluated."""
    if not _benchmarks(runs):
        return []
    compared = difference_table(runs, names)
    return [Note(_EXPLAINED), accuracy_table(runs), *([] if compared is None else [compared])]


def _benchmarks(runs: Sequence[Measured]) -> list[str]:
    return sorted({name for run in runs for name in run.accuracies})


def _difference(one: Difference) -> list[str]:
    return [percent(one.value, "+"), interval(one, "+"), p_text(one)]
