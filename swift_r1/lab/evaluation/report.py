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
from swift_r1.training.evaluation.results import Result, graded_of, summarize
from swift_r1.training.evaluation.statistics import RESAMPLES, Difference, MeanEstimate, mean_of, paired_difference

if TYPE_CHECKING:
    from rich.table import Table

INTERVAL = (
    "95 %: Wilson's score interval, with the effective number of completions from the standard error clustered by "
    "question (docs/evaluation.md)"
)
MEAN = "mean"


def report(settings: Mapping[str, Any], results: Mapping[str, Result], versions: Mapping[str, str]) -> dict[str, Any]:
    """The content of `report.json`; `mean` is the plain mean of avg@n over several benchmarks."""
    mean = _mean(results)
    return {
        "settings": settings,
        "versions": dict(versions),
        "interval": INTERVAL,
        "benchmarks": {name: one.to_json() for name, one in results.items()},
        "mean": None if mean is None else asdict(mean),
    }


def results_table(results: Mapping[str, Result], model: str) -> Table:
    """One line per benchmark, shares in percent; `cut` is the share that reached its limit. Where rewards are given in
    parts, so that their mean is not the share of right completions, it has a column of its own."""
    ns = {one.n for one in results.values()}
    n = str(ns.pop()) if len(ns) == 1 else "n"
    several = any(one.n > 1 for one in results.values())
    kinds = ("pass", "maj") if several else ()
    rewards = [(one.mean_reward, one.average.value) for one in results.values() if one.mean_reward is not None]
    in_parts = not all(math.isclose(*pair, abs_tol=1e-9) for pair in rewards)
    figures = (*(f"{kind}@{n}" for kind in kinds), *(("reward",) if in_parts else ()), "length", "cut")
    table = _table(model, ("questions", f"avg@{n}", "95 %", *figures))
    for name, one in results.items():
        estimates = [one.estimates.get(f"{kind}@{one.n}") for kind in kinds]
        table.add_row(
            name,
            str(one.questions) if one.n == 1 else f"{one.questions} x {one.n}",
            percent(one.average.value),
            interval(one.average),
            *("" if found is None else percent(found.value) for found in estimates),
            *((("" if one.mean_reward is None else f"{one.mean_reward:.3f}"),) if in_parts else ()),
            "" if one.mean_length is None else f"{one.mean_length:.0f}",
            percent(one.truncated),
        )
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
    # In a fixed order: the file's is that in which completions came, and resampling must not depend on it.
    values = {name: [result.average_values for _, result in two] for name, two in both.items()}
    pairs = {name: [(one[key], other[key]) for key in sorted(one)] for name, (one, other) in values.items()}
    means = {name: [result.average.value for _, result in two] for name, two in both.items()}
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
    table = _table(f"{second} less {first}", ("questions", "first", "second", "difference", "95 %", "p"))
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
    """The plain mean of avg@n over the benchmarks; None of one alone."""
    return mean_of([one.average for one in results.values()]) if len(results) > 1 else None


def _table(title: str, columns: Sequence[str]) -> Table:
    """A first column for the benchmarks, then those named."""
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
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise UsageError(f"{folder} is no folder of an evaluation: {SETTINGS}: {cause}") from error
    if not (folder / REPORT).is_file():
        raise UsageError(f"the evaluation in {folder} is not finished: give its command again to continue it")
    rows = read_rows(folder)
    return {
        name: (
            task["sha256"],
            summarize([graded_of(row) for row in rows if row["benchmark"] == name], task["reward"]),
        )
        for name, task in settings["tasks"].items()
    }


def _check_questions(name: str, first: tuple[str, Result], second: tuple[str, Result]) -> None:
    """Raises UsageError where the two were not asked the same."""
    if first[0] == second[0]:
        return
    ids = [set(result.average_values) for _, result in (first, second)]
    if ids[0] != ids[1]:
        raise UsageError(
            f"{name}: the runs were asked {len(ids[0])} and {len(ids[1])} questions, {len(ids[0] & ids[1])} shared"
        )
    raise UsageError(f"{name}: the questions of the two runs, or their gold answers, are not the same")
