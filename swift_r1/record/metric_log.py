"""The metrics of runs, from `logging.jsonl` while it grows: series by name, evaluations with their intervals; smoothed,
thinned out to what a chart can show, and averaged over seeds."""

from __future__ import annotations

import json
import math
import re
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swift_r1.record.lines import JsonRows

MOST_POINTS = 1000
LARGEST_STEP = 1 << 62  # larger ones are damage
_EVALUATED = re.compile(
    r"eval/(?P<benchmark>.+)/(?P<name>accuracy|reward|(avg|pass|maj)@\d+|perplexity|token_accuracy"
    r"|rewards/(accuracies|margins))$"
)
_OF_TASK = re.compile(r"tasks/([^/]+)/reward")
# What ms-swift's `logging.jsonl` calls otherwise.
_MS_SWIFT_STEP = "global_step/max_steps"
_MS_SWIFT = {f"clip_ratio/{side}_mean": f"clip_ratio/{side}" for side in ("low", "high")} | {
    "step_time": "time/step"
}
# Flags that say where a run is and what it shows, not what it learns; --data_seed is --seed where it is not given.
_NOT_LEARNED = frozenset(
    (
        *(
            "seed",
            "data_seed",
            "output_dir",
            "add_version",
            "resume_from_checkpoint",
            "resume_force",
            "report_to",
        ),
        *(
            "run_name",
            "view",
            "view_port",
            "log_tokens",
            "log_tokens_groups",
            "log_tokens_limit",
            "log_completions",
        ),
        *(
            "vllm_server_host",
            "vllm_server_port",
            "vllm_server_base_url",
            "vllm_server_file",
        ),
    )
)


@dataclass(slots=True)
class Series:
    """A metric over optimizer steps, which rise. A value that is null in the file, or not finite, is NaN."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        """Later lines win: another trainer's run that was resumed has some steps twice."""
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()
        self.steps.append(step)
        self.values.append(value)

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, slots=True)
class BenchmarkEstimate:
    """One estimate of a benchmark at a step, with its 95 % interval where the file has one."""

    step: int
    value: float
    low: float | None
    high: float | None


class MetricLog:
    """`logging.jsonl` of a run folder, ours or ms-swift's. Reads it on `refresh`, each line once; nothing before."""

    def __init__(self, run: Path) -> None:
        self._rows = JsonRows(run / "logging.jsonl")
        self._forget()

    def _forget(self) -> None:
        self.series: dict[str, Series] = {}
        self._rewards: list[str] = []

    def refresh(self) -> bool:
        """Reads what has been written since; whether there was anything. A half-written line waits."""
        return self._rows.refresh(self._add, self._forget)

    def _add(self, row: Mapping[str, Any]) -> bool:
        found = re.match(r"(\d{1,18})/", str(row.get(_MS_SWIFT_STEP)))
        if found:
            row = {"step": int(found[1])} | {
                _MS_SWIFT.get(name, name): value for name, value in row.items()
            }
        step = row.get("step")
        if (
            isinstance(step, bool)
            or not isinstance(step, int | float)
            or not abs(step) < LARGEST_STEP
        ):
            return False
        for name, value in row.items():
            if value is None or isinstance(value, int | float):
                known = (
                    math.nan
                    if value is None or not abs(value) <= sys.float_info.max
                    else float(value)
                )
                if name not in self.series:
                    self._begin_series(name)
                self.series[name].add(int(step), known)
        return True

    def _begin_series(self, name: str) -> None:
        self.series[name] = Series()
        found = re.fullmatch(r"rewards/(.+)/mean", name)
        if found:
            self._rewards.append(found[1])

    @property
    def state(self) -> tuple[int, int]:
        """Returns a value that changes when there is something new; who shares the log knows by it what others have
        read."""
        return self._rows.state

    @property
    def problems(self) -> list[str]:
        """Returns what could not be read, a line each."""
        return self._rows.problems

    def get(self, name: str) -> Series:
        """Returns a series by name; an empty one where the run has none."""
        return self.series.get(name) or Series()

    @property
    def last_step(self) -> int:
        """Returns the last optimizer step that is logged; 0 before the first."""
        return next(reversed(self.get("loss").steps or self.get("step").steps), 0)

    def rewards(self) -> list[str]:
        """Returns the names of the reward functions, in the file's order."""
        return list(self._rewards)

    def rewards_of_tasks(self) -> dict[str, str]:
        """Returns the metric of each task's reward, in the file's order, and the task; nothing without `--mixture`."""
        matches = filter(None, map(_OF_TASK.fullmatch, self.series))
        return {match[0]: match[1] for match in matches}

    def benchmarks(self) -> dict[str, list[str]]:
        """Returns what was evaluated: each benchmark's estimates (`accuracy`, `avg@4`, ...), in the file's order."""
        found: dict[str, list[str]] = {}
        for name in self.series:
            match = _EVALUATED.match(name)
            if match:
                found.setdefault(match["benchmark"], []).append(match["name"])
        return found

    def estimate(self, benchmark: str) -> str:
        """Returns the estimate of a benchmark that is shown where there is room for one."""
        names = self.benchmarks().get(benchmark, [])
        return next((one for one in ("accuracy", *names) if one in names), "accuracy")

    def evaluations(self, benchmark: str, name: str) -> list[BenchmarkEstimate]:
        """Returns one estimate of a benchmark at every evaluation. `accuracy` is `avg@n`, and has its interval."""
        series = self.get(f"eval/{benchmark}/{name}")
        own = name
        if name == "accuracy":
            own = next(
                (one for one in self.benchmarks()[benchmark] if one.startswith("avg@")), name
            )
        low, high = (
            dict(_items(self.get(f"eval/{benchmark}/{own}/{end}"))) for end in ("low", "high")
        )
        return [
            BenchmarkEstimate(step, value, low.get(step), high.get(step))
            for step, value in _items(series)
        ]

    def hours(self, phase: str = "step") -> float:
        """Returns the hours of training (or of a phase of it) so far, from `time/<phase>`, a mean over the steps of a
        line. Evaluations, saves and pauses between two starts are not in it."""
        before = 0
        total = 0.0
        for step, seconds in _items(self.get(f"time/{phase}")):
            total += seconds * (step - before) / 3600
            before = step
        return total


def _items(series: Series) -> Iterable[tuple[int, float]]:
    """Returns the steps and values, without what is not a number."""
    pairs = zip(series.steps, series.values, strict=True)
    return ((step, value) for step, value in pairs if not math.isnan(value))


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Returns the exponential moving average: each value is `weight` times what was and `1 - weight` times what is new,
    without the bias to 0 at the start. What is not a number stays so, and counts for nothing. 0 changes nothing.

    Raises ValueError: not `0 <= weight < 1`.
    """
    if not 0 <= weight < 1:
        raise ValueError(f"the weight of smoothing must be from 0 to less than 1, not {weight}")
    if not weight:
        return list(values)
    found = []
    total = 0.0
    share = 0.0
    for value in values:
        if math.isfinite(value):
            total = weight * total + (1 - weight) * value
            share = weight * share + 1 - weight
            found.append(total / share)
        else:
            found.append(math.nan)
    return found


def thinned(
    xs: Sequence[float], ys: Sequence[float], most: int = MOST_POINTS
) -> list[tuple[float, float | None]]:
    """Returns at most `most` of the points, in order; None for what is not finite. Of too many each part keeps its
    lowest and its highest, so that a single outlier is still seen."""
    points = [(x, y if math.isfinite(y) else None) for x, y in zip(xs, ys, strict=True)]
    if len(points) <= most:
        return points
    kept: list[tuple[float, float | None]] = []
    parts = max(1, most // 2)
    for number in range(parts):
        part = points[number * len(points) // parts : (number + 1) * len(points) // parts]
        known = [(y, index) for index, (_, y) in enumerate(part) if y is not None]
        ends = {min(known)[1], max(known)[1]} if known else {0}
        kept += [part[index] for index in sorted(ends)]
    return kept


def over_seeds(runs: Sequence[Series]) -> list[tuple[int, float, float, float]]:
    """Returns the step, mean, lowest and highest of the runs that have a value there."""
    by_step: dict[int, list[float]] = {}
    for series in runs:
        for step, value in _items(series):
            by_step.setdefault(step, []).append(value)
    return [
        (step, math.fsum(values) / len(values), min(values), max(values))
        for step, values in sorted(by_step.items())
    ]


def same_but_seed(args: Mapping[str, Any]) -> str:
    """Returns a text that is equal for runs whose flags differ in the seed alone, and in what does not change what is
    learned."""
    return json.dumps(
        {name: args[name] for name in sorted(args) if name not in _NOT_LEARNED},
        sort_keys=True,
        default=str,
    )
