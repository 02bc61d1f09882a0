"""The curves of runs: which metrics share a chart, and their lines for one run, several runs, or several seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swift_r1.lab.diagnosis.trend import NORMAL_95
from swift_r1.lab.view.charts import Line
from swift_r1.record.metric_log import (
    MOST_POINTS,
    MetricLog,
    Series,
    at_steps,
    over_seeds,
    smoothed,
    thinned,
)


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart.

    Attributes:
        metrics: names in logging.jsonl, and what the chart calls each.
        spread: the metric that says how wide a band is around the only metric, to each side.
        widths: that many of it are drawn.
        about: a sentence on what is drawn, for those who do not know it.
    """

    title: str
    metrics: Mapping[str, str]
    spread: str | None = None
    about: str = ""
    widths: float = 1.0


@dataclass(frozen=True, slots=True)
class CurveControls:
    """The state of the page's controls."""

    smooth: float = 0.0  # weight of what was, from 0 to less than 1
    log: bool = False  # the y axes
    # the x axes: units of time an hour has (1: hours, 60: minutes); 0: optimizer steps
    per_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class RunGroup:
    """A run, or runs that differ in the seed alone and are drawn as one."""

    name: str
    logs: Sequence[MetricLog] = field(default_factory=tuple)


_PANELS = (
    Panel("KL to the reference", {"kl": "KL"}),
    Panel(
        "Change of the policy since the start",
        {"policy/moved": "log-prob of a token", "policy/kl_to_start": "KL to the start"},
        about="nats, on tokens of the first round",
    ),
    Panel("Pull of the KL", {"kl/pull": "pull"}, about="against an advantage of 1, per token"),
    Panel("KL to the teacher", {"teacher_kl": "KL"}),
    Panel("Entropy of the policy", {"entropy": "entropy"}, about="nats per token"),
    Panel(
        "Clipped ratios",
        {"clip_ratio/low": "low", "clip_ratio/high": "high"},
        about="share of tokens",
    ),
    Panel(
        "Completion length",
        {"completions/mean_length": "mean", "completions/max_length": "longest"},
        about="tokens",
    ),
    Panel(
        "Truncated completions",
        {"completions/clipped_ratio": "share"},
        about="share that reached the limit",
    ),
    Panel(
        "Groups without signal",
        {"frac_reward_zero_std": "share"},
        about="share whose rewards are equal: nothing to learn",
    ),
    Panel(
        "Equal completions",
        {"completions/repeated": "share"},
        about="share that equals another of its prompt",
    ),
    Panel(
        "Trainer against engine",
        {"rollout/logp_diff": "logp_diff"},
        about="mean |difference| of a token's log-probs",
    ),
    Panel("Gradient norm", {"grad_norm": "norm"}, about="before clipping"),
    Panel(
        "Staleness",
        {"rollout/staleness/mean": "mean", "rollout/staleness/max": "oldest"},
        about="rounds behind",
    ),
    Panel("Tokens per second", {"tokens_per_second": "tokens/s"}),
    Panel(
        "Seconds of a step",
        {
            "time/generate": "generate",
            "time/reward": "reward",
            "time/train": "train",
            "time/sync": "sync",
        },
    ),
    Panel("Loss", {"loss": "loss"}),
    Panel("Token accuracy", {"token_accuracy": "share"}, about="share that were the likeliest"),
    Panel("Perplexity", {"perplexity": "perplexity"}),
    Panel("Value loss", {"value_loss": "value loss"}),
    Panel(
        "Explained variance",
        {"explained_variance": "explained variance"},
        about="of the returns, by the critic",
    ),
    Panel("Learning rate", {"learning_rate": "learning rate"}),
    Panel("Memory", {"memory/peak_gib": "peak"}, about="GiB of the rank with most"),
)


def panels(groups: Sequence[RunGroup], everything: bool = False) -> list[Panel]:
    """Returns the charts that these runs have metrics for; with `everything` also one for each metric that is in no
    other."""
    logs = [log for group in groups for log in group.logs]
    rewards = sorted({name for log in logs for name in log.rewards()})
    within = "the standard deviation within groups"
    found = [_mean("Reward", {"reward": "reward"}, ("reward_stderr", "reward_std"), logs, within)]
    found += [
        _mean(
            f"Reward {name}",
            {f"rewards/{name}/mean": name},
            (f"rewards/{name}/stderr", f"rewards/{name}/std"),
            logs,
            "the standard deviation",
        )
        for name in rewards
        if len(rewards) > 1
    ]
    benchmarks = {name: estimates for log in logs for name, estimates in log.benchmarks().items()}
    for name, estimates in sorted(benchmarks.items()):
        if "perplexity" in estimates:  # of answers that are learned
            found += [
                Panel(f"Held-out {one.replace('_', ' ')}: {name}", {f"eval/{name}/{one}": one})
                for one in estimates
            ]
            continue
        wanted = [
            one for one in estimates if one in ("accuracy", f"pass@{_most(estimates)}")
        ] or estimates[:1]
        metrics = {f"eval/{name}/{one}": one for one in wanted}
        found.append(Panel(f"Evaluation: {name}", metrics, about="band: the 95 % interval"))
    invalid = {f"rewards/{name}/invalid": name for name in rewards}
    found += [*_PANELS, Panel("Invalid rewards", invalid, about="share of completions")]
    if everything:
        found += [_asked_again(name, logs) for name in rewards]
        drawn = {name for panel in found for name in (*panel.metrics, panel.spread)} | {"step"}
        others = sorted({name for log in logs for name in log.series} - drawn)
        found += [Panel(name, {name: name}) for name in others if not name.endswith("stderr")]
    return [
        panel
        for panel in found
        if any(len(log.get(name)) for log in logs for name in panel.metrics)
    ]


def _mean(
    title: str,
    metrics: Mapping[str, str],
    spreads: tuple[str, str],
    logs: Sequence[MetricLog],
    deviation: str,
) -> Panel:
    """Returns the chart of a mean: around it the 95 % interval, or where its standard error is not logged the standard
    deviation. `spreads` are the metrics of both."""
    error, spread = spreads
    if any(len(log.get(error)) for log in logs):
        return Panel(title, metrics, error, "band: the 95 % interval of the mean", NORMAL_95)
    return Panel(title, metrics, spread, f"band: {deviation}")


def _asked_again(name: str, logs: Sequence[MetricLog]) -> Panel:
    """Returns the chart of what was found when a reward function was asked again."""
    prefix = f"recheck/{name}/"
    metrics = sorted({one for log in logs for one in log.series if one.startswith(prefix)})
    shown = {one: one.removeprefix(prefix) for one in metrics}
    return Panel(f"Reward {name}, asked again", shown, about="share of completions")


def _most(estimates: Sequence[str]) -> int:
    """Returns the largest k of pass@k."""
    return max(
        (int(one.partition("@")[2]) for one in estimates if one.startswith("pass@")), default=0
    )


def lines(panel: Panel, groups: Sequence[RunGroup], shown: CurveControls) -> list[Line]:
    """Returns the lines of a chart. Of one group each metric has a colour; of several each group, and further metrics
    are dashed."""
    found = []
    for place, group in enumerate(groups):
        for number, (metric, label) in enumerate(panel.metrics.items()):
            alone = len(groups) == 1
            name = label if alone else group.name + (f" · {label}" if number else "")
            colour = number if alone else place
            found += _lines_of(
                panel,
                group,
                metric,
                shown,
                alone,
                Line(name, (), colour, dashed=bool(number) and not alone),
            )
    return found


def _lines_of(
    panel: Panel,
    group: RunGroup,
    metric: str,
    shown: CurveControls,
    alone: bool,
    line: Line,
) -> list[Line]:
    """Returns one metric of a group: its line, and of a group `alone` under a smoothed one a faint line of the
    values."""
    logs = [log for log in group.logs if len(log.get(metric))]
    if not logs:
        return []
    if len(logs) > 1:
        rows = over_seeds([log.get(metric) for log in logs])
        steps = [row[0] for row in rows]
        values = [row[1] for row in rows]
        low = [row[2] for row in rows]
        high = [row[3] for row in rows]
    else:
        series = logs[0].get(metric)
        steps = list(series.steps)
        values = list(series.values)
        low, high = _around(panel, logs[0], metric, series)
    xs = [float(step) for step in steps]
    if shown.per_hour:
        xs = [shown.per_hour * hours for hours in at_steps(logs[0].hours(), steps)]
    weight = 0.0 if metric.startswith("eval/") else shown.smooth
    mean = smoothed(values, weight)
    faint = (
        [Line(line.name, thinned(xs, values), line.colour, faint=True)] if weight and alone else []
    )
    band = [
        (x, bottom, top)
        for x, bottom, top in zip(xs, smoothed(low, weight), smoothed(high, weight), strict=True)
        if math.isfinite(bottom) and math.isfinite(top)
    ]
    if shown.log and any(bottom <= 0 for _, bottom, _ in band):
        band = []  # a logarithm has no place for its lower end
    band = band[:: -(-len(band) // MOST_POINTS) or 1]
    return [*faint, Line(line.name, thinned(xs, mean), line.colour, band, line.dashed)]


def _around(
    panel: Panel,
    log: MetricLog,
    metric: str,
    series: Series,
) -> tuple[list[float], list[float]]:
    """Low and high ends of the band around a metric of one run; NaN where there is none."""
    if metric.startswith("eval/"):
        benchmark, name = metric.removeprefix("eval/").rsplit("/", 1)
        ends = {one.step: (one.low, one.high) for one in log.evaluations(benchmark, name)}
    else:
        spread = log.get(panel.spread or "")
        widths = dict(zip(spread.steps, spread.values, strict=True))
        pairs = zip(series.steps, series.values, strict=True)
        ends = {
            step: (value - panel.widths * widths[step], value + panel.widths * widths[step])
            for step, value in pairs
            if step in widths
        }
    found = [ends.get(step, (None, None)) for step in series.steps]
    return [_number(low) for low, _ in found], [_number(high) for _, high in found]


def _number(value: float | None) -> float:
    return math.nan if value is None else value
