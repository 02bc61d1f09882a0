"""`swift eval --compare RUN_A RUN_B`: the same questions, two models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift_r1.errors import UsageError
from swift_r1.evaluation.bootstrap import RESAMPLES, Difference, paired_bootstrap
from swift_r1.evaluation.grading import graded_of
from swift_r1.evaluation.report import percent
from swift_r1.evaluation.results import Result, summarize
from swift_r1.evaluation.store import REPORT, SETTINGS, read_rows

if TYPE_CHECKING:
    from rich.table import Table

MEAN = "mean"


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
        raise UsageError(f"{first} and {second} share no benchmark: {' and '.join(map(_names, runs))}")
    faults = [fault for name in shared if (fault := _fault(name, runs))]
    if faults:
        raise UsageError(*faults)
    pairs = {name: _pairs(*(run.results[name] for run in runs)) for name in shared}
    compared: dict[str, Compared] = {}
    for name in shared:
        first_mean, second_mean = (run.results[name].average.value for run in runs)
        compared[name] = Compared(first_mean, second_mean, paired_bootstrap([pairs[name]], seed))
    if len(shared) > 1:
        means = [sum(run.results[name].average.value for name in shared) / len(shared) for run in runs]
        compared[MEAN] = Compared(means[0], means[1], paired_bootstrap(list(pairs.values()), seed))
    return compared


def to_json(first: Path, second: Path, seed: int, compared: Mapping[str, Compared]) -> dict[str, Any]:
    """The comparison as one object."""
    return {
        "first": str(first),
        "second": str(second),
        "method": f"paired bootstrap over questions, {RESAMPLES} resamples, seed {seed}, percentile interval",
        "benchmarks": {name: asdict(one) for name, one in compared.items()},
    }


def comparison_table(first: Path, second: Path, compared: Mapping[str, Compared]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=f"{second} less {first}", title_justify="left", box=box.SIMPLE, pad_edge=False)
    table.add_column("benchmark", no_wrap=True)
    for name in ("questions", "first", "second", "difference", "95 %", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, one in compared.items():
        gain = one.difference
        if name == MEAN:
            table.add_section()
        table.add_row(
            name,
            str(gain.questions),
            percent(one.first),
            percent(one.second),
            _signed(gain.value),
            f"{_signed(gain.low)} to {_signed(gain.high)}",
            f"< {1 / RESAMPLES:g}" if gain.p_value < 1 / RESAMPLES else f"{gain.p_value:.4f}",
        )
    return table


def _read(folder: Path) -> _Run:
    try:
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder} is no folder of an evaluation: {SETTINGS}: {_cause(error)}") from error
    if not (folder / REPORT).is_file():
        raise UsageError(f"the evaluation in {folder} is not finished: give its command again, it goes on")
    rows = read_rows(folder)
    rewards = {name: task["reward"] for name, task in settings["tasks"].items()}
    results = {
        name: summarize([graded_of(row) for row in rows if row["benchmark"] == name], reward)
        for name, reward in rewards.items()
    }
    return _Run(settings, results)


def _fault(name: str, runs: Sequence[_Run]) -> str | None:
    """Whether both were asked the same."""
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


def _names(run: _Run) -> str:
    return ", ".join(run.results) or "none"


def _signed(share: float) -> str:
    return f"{100 * share:+.1f}"


def _cause(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
