"""What an evaluation says at its end: `report.json`, and a table for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from swift_r1.evaluation.results import Result
from swift_r1.evaluation.statistics import Estimate, mean_of

if TYPE_CHECKING:
    from rich.table import Table

INTERVAL = (
    "95 %: Wilson's score interval, with the effective number of completions from the standard error clustered by "
    "question (docs/evaluation.md)"
)


def average(results: Mapping[str, Result]) -> Estimate | None:
    """The plain mean of avg@n over the benchmarks; None of one alone."""
    return mean_of([one.average for one in results.values()]) if len(results) > 1 else None


def report(settings: Mapping[str, Any], results: Mapping[str, Result], versions: Mapping[str, str]) -> dict[str, Any]:
    """The content of `report.json`."""
    mean = average(results)
    return {
        "settings": settings,
        "versions": dict(versions),
        "interval": INTERVAL,
        "benchmarks": {name: one.to_json() for name, one in results.items()},
        "mean": None if mean is None else _plain(mean),
    }


def results_table(results: Mapping[str, Result], model: str) -> Table:
    """One line a benchmark, shares in percent; `cut` is the share that reached its limit."""
    from rich import box
    from rich.table import Table

    ns = {one.n for one in results.values()}
    n, several = (str(ns.pop()) if len(ns) == 1 else "n"), any(one.n > 1 for one in results.values())
    table = Table(title=model, title_justify="left", box=box.SIMPLE, pad_edge=False)
    table.add_column("benchmark", no_wrap=True)
    for name in ("questions", f"avg@{n}", "95 %", *((f"pass@{n}", f"maj@{n}") if several else ()), "length", "cut"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, one in results.items():
        table.add_row(
            name,
            str(one.questions) if one.n == 1 else f"{one.questions} x {one.n}",
            percent(one.average.value),
            _interval(one.average),
            *((_of(one, f"pass@{one.n}"), _of(one, f"maj@{one.n}")) if several else ()),
            "" if one.mean_length is None else f"{one.mean_length:.0f}",
            percent(one.truncated),
        )
    mean = average(results)
    if mean is not None:
        table.add_section()
        table.add_row("mean", "", percent(mean.value), _interval(mean))
    return table


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _of(result: Result, name: str) -> str:
    return percent(result.estimates[name].value) if name in result.estimates else ""


def _interval(one: Estimate) -> str:
    return f"{percent(one.low)} to {percent(one.high)}"


def _plain(one: Estimate) -> dict[str, float]:
    return {"value": one.value, "standard_error": one.standard_error, "low": one.low, "high": one.high}
