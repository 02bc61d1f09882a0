"""The report of an evaluation (`report.json`, a table), and `swift eval --compare RUN_A RUN_B`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift_r1.errors import UsageError, for_each
from swift_r1.lab.evaluation.store import REPORT, SETTINGS, read_rows
from swift_r1.runtime.files import read_text
from swift_r1.training.evaluation.results import Result, graded_of, summarize
from swift_r1.training.evaluation.statistics import (
    RESAMPLES,
    Difference,
    MeanEstimate,
    mean_of,
    paired_difference,
)

if TYPE_CHECKING:
    from rich.table import Table

INTERVAL = (
    "95 %: Wilson's score interval, with the effective number of completions from the standard error clustered by "
    "question (docs/evaluation.md)"
)
MEAN = "mean"


def report(
    settings: Mapping[str, Any], results: Mapping[str, Result], versions: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the content of `report.json`; `mean` is the plain mean of avg@n over several benchmarks."""
    mean = _mean(results)
    return {
        "settings": settings,
        "versions": dict(versions),
        "interval": INTERVAL,
        "benchmarks": {name: one.to_json() for name, one in results.items()},
        "mean": None if mean is None else asdict(mean),
    }


def results_table(results: Mapping[str, Result], model: str) -> Table:
    """Returns a table of one line per benchmark, shares in percent; `cut` is the share that reached its limit. Where
    rewards are given in parts, so that their mean is not the share of right completions, it has a column of its own."""
    counts = {result.n for result in results.values()}
    n = str(*counts) if len(counts) == 1 else "n"
    kinds = ("pass", "maj") if max(counts, default=1) > 1 else ()
    in_parts = any(
        result.mean_reward is not None
        and not math.isclose(result.mean_reward, result.average.value, abs_tol=1e-9)
        for result in results.values()
    )
    columns = ["questions", f"avg@{n}", "95 %", *(f"{kind}@{n}" for kind in kinds)]
    if in_parts:
        columns.append("reward")
    table = _table(model, [*columns, "length", "cut"])
    for name, result in results.items():
        questions = str(result.questions) if result.n == 1 else f"{result.questions} x {result.n}"
        cells = [name, questions, percent(result.average.value), interval(result.average)]
        for kind in kinds:
            estimate = result.estimates.get(f"{kind}@{result.n}")
            cells.append("" if estimate is None else percent(estimate.value))
        if in_parts:
            cells.append("" if result.mean_reward is None else f"{result.mean_reward:.3f}")
        table.add_row(*cells, f"{result.mean_length:.0f}", percent(result.truncated))
    mean = _mean(results)
    if mean is not None:
        table.add_section()
        table.add_row(MEAN, "", percent(mean.value), interval(mean))
    return table


@dataclass(frozen=True, slots=True)
class Compared:
    """One benchmark, or the mean of several: avg@n of both runs, and the second less the first."""

    first: float
    second: float
    difference: Difference


def compare(first: Path, second: Path, seed: int) -> dict[str, Compared]:
    """Compares two runs on each benchmark that both have, and on the mean where there are several. Raises UsageError: a
    folder holds no finished evaluation, they share no benchmark, or a benchmark has other questions."""
    runs = [_read(first), _read(second)]
    shared = [name for name in runs[0] if name in runs[1]]
    if not shared:
        names = " and ".join(", ".join(run) or "none" for run in runs)
        raise UsageError(f"{first} and {second} share no benchmark: {names}")
    both = {name: (runs[0][name], runs[1][name]) for name in shared}
    for_each(shared, lambda name: _check_questions(name, *both[name]))
    pairs = {}
    means = {}
    for name, ((_, one), (_, other)) in both.items():
        # In a fixed order: the file's is that in which completions came, and resampling must not depend on it.
        questions = sorted(one.average_values)
        pairs[name] = [(one.average_values[key], other.average_values[key]) for key in questions]
        means[name] = [one.average.value, other.average.value]
    differences = {name: paired_difference([pairs[name]], seed) for name in shared}
    if len(shared) > 1:
        means[MEAN] = [sum(two[run] for two in means.values()) / len(shared) for run in (0, 1)]
        differences[MEAN] = paired_difference(list(pairs.values()), seed)
    return {name: Compared(two[0], two[1], differences[name]) for name, two in means.items()}


def comparison_json(
    first: Path,
    second: Path,
    seed: int,
    compared: Mapping[str, Compared],
) -> dict[str, Any]:
    return {
        "first": str(first),
        "second": str(second),
        "method": f"paired by question, {RESAMPLES} resamples, seed {seed}: percentile interval, sign-flip p-value",
        "benchmarks": {name: asdict(one) for name, one in compared.items()},
    }


def comparison_table(first: Path, second: Path, compared: Mapping[str, Compared]) -> Table:
    table = _table(
        f"{second} less {first}", ("questions", "first", "second", "difference", "95 %", "p")
    )
    for name, one in compared.items():
        gain = one.difference
        if name == MEAN:
            table.add_section()
        table.add_row(
            name,
            str(gain.questions),
            percent(one.first),
            percent(one.second),
            percent(gain.value, "+"),
            interval(gain, "+"),
            f"{gain.p_value:.4f}",
        )
    return table


def _mean(results: Mapping[str, Result]) -> MeanEstimate | None:
    """Returns the plain mean of avg@n over the benchmarks; None of one alone."""
    return mean_of([one.average for one in results.values()]) if len(results) > 1 else None


def _table(title: str, columns: Sequence[str]) -> Table:
    """Returns a table with a first column for the benchmarks, then those named."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    table.add_column("benchmark", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def percent(share: float, sign: str = "") -> str:
    return f"{100 * share:{sign}.1f}"


def interval(one: MeanEstimate | Difference, sign: str = "") -> str:
    return f"{percent(one.low, sign)} to {percent(one.high, sign)}"


def _read(folder: Path) -> dict[str, tuple[str, Result]]:
    """Returns the hash of the questions and the figures of each benchmark."""
    try:
        settings = json.loads(read_text(folder / SETTINGS))
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise UsageError(
            f"{folder} is not the folder of an evaluation: {SETTINGS}: {cause}"
        ) from error
    if not (folder / REPORT).is_file():
        raise UsageError(
            f"the evaluation in {folder} is not finished: give its command again to continue it"
        )
    rows = read_rows(folder)
    found = {}
    for name, task in settings["tasks"].items():
        graded = [graded_of(row) for row in rows if row["benchmark"] == name]
        found[name] = (task["sha256"], summarize(graded, task["reward"]))
    return found


def _check_questions(name: str, first: tuple[str, Result], second: tuple[str, Result]) -> None:
    """Raises UsageError where the two were not asked the same."""
    if first[0] == second[0]:
        return
    ids = [set(result.average_values) for _, result in (first, second)]
    if ids[0] != ids[1]:
        raise UsageError(
            f"{name}: the runs were asked {len(ids[0])} and {len(ids[1])} questions, {len(ids[0] & ids[1])} shared"
        )
    raise UsageError(
        f"{name}: the questions of the two runs, or their gold answers, are not the same"
    )
