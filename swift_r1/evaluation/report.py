"""What an evaluation says at its end (`report.json`, a table), and `swift eval --compare RUN_A RUN_B`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift_r1.errors import UsageError
from swift_r1.evaluation.results import Result, graded_of, summarize
from swift_r1.evaluation.statistics import RESAMPLES, Difference, MeanEstimate, mean_of, paired_bootstrap
from swift_r1.evaluation.store import REPORT, SETTINGS, read_rows

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
    """One line per benchmark, shares in percent; `cut` is the share that reached its limit."""
    ns = {one.n for one in results.values()}
    n, several = (str(ns.pop()) if len(ns) == 1 else "n"), any(one.n > 1 for one in results.values())
    kinds = ("pass", "maj") if several else ()
    table = _table(model, ("questions", f"avg@{n}", "95 %", *(f"{kind}@{n}" for kind in kinds), "length", "cut"))
    for name, one in results.items():
        estimates = [one.estimates.get(f"{kind}@{one.n}") for kind in kinds]
        table.add_row(
            name,
            str(one.questions) if one.n == 1 else f"{one.questions} x {one.n}",
            _percent(one.average.value),
            _interval(one.average),
            *("" if found is None else _percent(found.value) for found in estimates),
            "" if one.mean_length is None else f"{one.mean_length:.0f}",
            _percent(one.truncated),
        )
    mean = _mean(results)
    if mean is not None:
        table.add_section()
        table.add_row(MEAN, "", _percent(mean.value), _interval(mean))
    return table


@dataclass(frozen=True, slots=True)
class Compared:
    """One benchmark, or the mean of several: avg@n of both runs, and the second less the first."""

    first: float
    second: float
    difference: Difference


@dataclass(frozen=True, slots=True)
class _Run:
    settings: Mapping[str, Any]
    results: Mapping[str, Result]


def compare(first: Path, second: Path, seed: int) -> dict[str, Compared]:
    """Of each benchmark that both runs have, and of their mean where these are several.

    Raises:
        UsageError: a folder holds no finished evaluation, they share no benchmark, or a benchmark has other questions.
    """
    runs = [_read(first), _read(second)]
    shared = [name for name in runs[0].results if name in runs[1].results]
    if not shared:
        names = " and ".join(", ".join(run.results) or "none" for run in runs)
        raise UsageError(f"{first} and {second} share no benchmark: {names}")
    faults = [fault for name in shared if (fault := _fault(name, runs))]
    if faults:
        raise UsageError(*faults)
    pairs = {name: _pairs(*(run.results[name] for run in runs)) for name in shared}
    means = {name: [run.results[name].average.value for run in runs] for name in shared}
    differences = {name: paired_bootstrap([pairs[name]], seed) for name in shared}
    if len(shared) > 1:
        means[MEAN] = [sum(both[run] for both in means.values()) / len(shared) for run in (0, 1)]
        differences[MEAN] = paired_bootstrap(list(pairs.values()), seed)
    return {name: Compared(both[0], both[1], differences[name]) for name, both in means.items()}


def comparison_json(first: Path, second: Path, seed: int, compared: Mapping[str, Compared]) -> dict[str, Any]:
    return {
        "first": str(first),
        "second": str(second),
        "method": f"paired bootstrap over questions, {RESAMPLES} resamples, seed {seed}, percentile interval",
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
            _percent(one.first),
            _percent(one.second),
            _signed(gain.value),
            f"{_signed(gain.low)} to {_signed(gain.high)}",
            f"< {1 / RESAMPLES:g}" if gain.p_value < 1 / RESAMPLES else f"{gain.p_value:.4f}",
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


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _signed(share: float) -> str:
    return f"{100 * share:+.1f}"


def _interval(one: MeanEstimate) -> str:
    return f"{_percent(one.low)} to {_percent(one.high)}"


def _read(folder: Path) -> _Run:
    try:
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise UsageError(f"{folder} is no folder of an evaluation: {SETTINGS}: {cause}") from error
    if not (folder / REPORT).is_file():
        raise UsageError(f"the evaluation in {folder} is not finished: give its command again to continue it")
    rows = read_rows(folder)
    results = {
        name: summarize([graded_of(row) for row in rows if row["benchmark"] == name], task["reward"])
        for name, task in settings["tasks"].items()
    }
    return _Run(settings, results)


def _fault(name: str, runs: Sequence[_Run]) -> str | None:
    """Why the two cannot be compared."""
    hashes = [run.settings["tasks"][name]["sha256"] for run in runs]
    if hashes[0] == hashes[1]:
        return None
    ids = [set(run.results[name].average_values) for run in runs]
    if ids[0] != ids[1]:
        return f"{name}: the runs were asked {len(ids[0])} and {len(ids[1])} questions, {len(ids[0] & ids[1])} shared"
    return f"{name}: the questions of the two runs, or their gold answers, are not the same"


def _pairs(first: Result, second: Result) -> list[tuple[float, float]]:
    # In a fixed order: the file's is that in which completions came, and resampling must not depend on it.
    return [(first.average_values[key], second.average_values[key]) for key in sorted(first.average_values)]
