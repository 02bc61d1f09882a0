"""The progress of a run, in words: how far it is, how long the rest takes, what it has reached."""

from __future__ import annotations

import math

from swift_r1.record.folder import RunFolder
from swift_r1.record.metric_log import MetricLog
from swift_r1.runtime.terminal import duration

_LAST_LINES = 20  # whose seconds a step say how long the rest takes


def progress_of(run: RunFolder, log: MetricLog) -> dict[str, str]:
    """Returns by name `run`, `status`, `progress`, `time`, the last `reward` and the last estimate of each
    benchmark."""
    total = run.plan.get("total_steps")
    done = log.last_step
    found = {
        "run": run.name,
        "status": run.status,
        "progress": f"step {done:,}",
        "time": "",
    }
    if isinstance(total, int) and total > 0:
        found["progress"] += f" of {total:,}, {100 * min(1.0, done / total):.0f} %"
        if run.status == "running" and (left := seconds_left(run, log)) is not None:
            found["time"] = f"about {duration(left)} left"
    took = run.summary.get("seconds")
    if isinstance(took, int | float) and math.isfinite(took):
        found["time"] = f"took {duration(took)}"
    values = log.get("reward").values
    if values:
        found["reward"] = f"{values[-1]:.4g}"
    for benchmark in log.benchmarks():
        name = log.estimate(benchmark)
        for last in log.evaluations(benchmark, name)[-1:]:
            text = f"{last.value:.3g}"
            if last.low is not None and last.high is not None:
                text += f" [{last.low:.3g}, {last.high:.3g}]"
            found[f"{benchmark}: {name}"] = text
    return found


def seconds_left(run: RunFolder, log: MetricLog) -> float | None:
    """Estimates the rest of training at the pace of the last steps; None before there is one, or where the number of
    steps is not known."""
    total = run.plan.get("total_steps")
    seconds = [
        value for value in log.get("time/step").values[-_LAST_LINES:] if math.isfinite(value)
    ]
    if not isinstance(total, int) or not seconds:
        return None
    return max(0, total - log.last_step) * sum(seconds) / len(seconds)
