"""The curves of runs: which metrics share a chart, in the order of what is asked of a run, and their lines for one run,
several runs, or several seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle

from swift_r1.lab.diagnosis.trend import NORMAL_95
from swift_r1.lab.view.charts import Line
from swift_r1.record.glossary.titles import TITLES
from swift_r1.record.metric_log import (
    MOST_POINTS,
    MetricLog,
    Series,
    at_steps,
    over_seeds,
    smoothed,
    thinned,
)

LEARNING, HEALTHY, FAST, OTHER = (
    "Is it learning?",
    "Is it healthy?",
    "Is it fast?",
    "Other metrics",
)
_INTERVAL = "band: the 95 % interval"
_STROKES = ("solid", "dashed", "dotted", "dot and dash")
QUESTIONS = (LEARNING, HEALTHY, FAST, OTHER)


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    """One chart.

    Attributes:
        metrics: names in logging.jsonl, and what the chart calls each.
        error: the metric that is the standard error of the only metric: its 95 % interval is drawn.
        about: a sentence on what is drawn, for those who do not know it.
        question: what it answers.
    """

    title: str
    metrics: Mapping[str, str]
    error: str | None = None
    about: str = ""
    question: str = HEALTHY


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
    opens: str = ""  # address of its completions, to which `step` is added
    every: int = 1  # optimizer steps of a round


_PANELS = (
    Panel(
        TITLES["frac_reward_zero_std"],
        {"frac_reward_zero_std": "share"},
        about="share whose rewards are equal: nothing to learn",
    ),
    Panel(
        TITLES["completions/clipped_ratio"],
        {"completions/clipped_ratio": "share"},
        about="share that reached the limit",
    ),
    Panel(
        TITLES["completions/mean_length"],
        {"completions/mean_length": "mean", "completions/max_length": "longest"},
        about="tokens",
    ),
    Panel(TITLES["entropy"], {"entropy": "entropy"}, about="nats per token"),
    Panel(
        TITLES["policy/moved"],
        {"policy/moved": "log-prob of a token", "policy/kl_to_start": "KL to the start"},
        about="nats, on tokens of the first round",
    ),
    Panel(TITLES["kl"], {"kl": "KL"}),
    Panel(TITLES["kl/pull"], {"kl/pull": "pull"}, about="against an advantage of 1, per token"),
    Panel(TITLES["teacher_kl"], {"teacher_kl": "KL"}),
    Panel(
        "Clipped ratios",
        {"clip_ratio/low": "low", "clip_ratio/high": "high"},
        about="share of tokens",
    ),
    Panel(
        TITLES["completions/repeated"],
        {"completions/repeated": "share"},
        about="share that equals another of its prompt",
    ),
    Panel(
        TITLES["rollout/logp_diff"],
        {"rollout/logp_diff": "logp_diff"},
        about="mean |difference| of a token's log-probs",
    ),
    Panel(TITLES["grad_norm"], {"grad_norm": "norm"}, about="before clipping"),
    Panel(
        TITLES["rollout/staleness/mean"],
        {"rollout/staleness/mean": "mean", "rollout/staleness/max": "oldest"},
        about="rounds behind",
    ),
    Panel(TITLES["loss"], {"loss": "loss"}),
    Panel(
        TITLES["token_accuracy"], {"token_accuracy": "share"}, about="share that were the likeliest"
    ),
    Panel(TITLES["perplexity"], {"perplexity": "perplexity"}),
    Panel(TITLES["value_loss"], {"value_loss": "value loss"}),
    Panel(
        TITLES["explained_variance"],
        {"explained_variance": "explained variance"},
        about="of the returns, by the critic",
    ),
    Panel("Learning rate", {"learning_rate": "learning rate"}),
    Panel(
        "Seconds of a step",
        {
            "time/generate": "generate",
            "time/reward": "reward",
            "time/train": "train",
            "time/sync": "sync",
        },
        question=FAST,
    ),
    Panel(TITLES["tokens_per_second"], {"tokens_per_second": "tokens/s"}, question=FAST),
    Panel("Memory", {"memory/peak_gib": "peak"}, about="GiB of the rank with most", question=FAST),
)


_ANSWERS = {"loss", "token_accuracy", "perplexity"}
"""What tells whether a run learns that is given the answers (`swift sft`)."""


def panels(groups: Sequence[RunGroup], everything: bool = False) -> list[Panel]:
    """Returns the charts that these runs have metrics for; with `everything` also one for each metric that is in no
    other."""
    logs = [log for group in groups for log in group.logs]
    rewards = sorted({name for log in logs for name in log.rewards()})
    several = rewards if len(rewards) > 1 else []
    found = [_mean("Reward", "reward", "reward", "reward_stderr", logs)]
    by_task = {name: task for log in logs for name, task in log.rewards_of_tasks().items()}
    found.append(Panel("Reward by task", dict(sorted(by_task.items())), question=LEARNING))
    benchmarks = {name: estimates for log in logs for name, estimates in log.benchmarks().items()}
    for name, estimates in sorted(benchmarks.items()):
        if "perplexity" in estimates:  # of answers that are learned
            found += [
                Panel(
                    f"Held-out {one.replace('_', ' ')}: {name}",
                    {f"eval/{name}/{one}": one},
                    question=LEARNING,
                )
                for one in estimates
            ]
            continue
        wanted = [
            one for one in estimates if one in ("accuracy", f"pass@{_most(estimates)}")
        ] or estimates[:1]
        metrics = {f"eval/{name}/{one}": one for one in wanted}
        found.append(Panel(f"Evaluation: {name}", metrics, about=_INTERVAL, question=LEARNING))
    found += [
        _mean(f"Reward {one}", f"rewards/{one}/mean", one, f"rewards/{one}/stderr", logs)
        for one in several
    ]
    spreads = {"reward_std": "within groups"}
    spreads |= {f"rewards/{name}/std": name for name in rewards}
    found.append(Panel("Spread of rewards", spreads, about="standard deviation"))
    invalid = {f"rewards/{name}/invalid": name for name in rewards}
    answers = any(len(log.get("token_accuracy")) for log in logs)
    found += [
        replace(panel, question=LEARNING)
        if answers and not _ANSWERS.isdisjoint(panel.metrics)
        else panel
        for panel in _PANELS
    ]
    found += [Panel("Invalid rewards", invalid, about="share of completions")]
    if everything:
        found += [_asked_again(name, logs) for name in rewards]
        drawn = {name for panel in found for name in (*panel.metrics, panel.error)} | {"step"}
        others = sorted({name for log in logs for name in log.series} - drawn)
        found += [
            Panel(name, {name: name}, question=OTHER)
            for name in others
            if not name.endswith("stderr")
        ]
    known = [
        panel
        for panel in found
        if any(len(log.get(name)) for log in logs for name in panel.metrics)
    ]
    return sorted(known, key=lambda panel: QUESTIONS.index(panel.question))


def constant(panel: Panel, groups: Sequence[RunGroup]) -> str:
    """Returns what is to be said of a chart that shows nothing: the one value of each metric; empty where a metric
    changes, or the chart tells whether the run learns."""
    found = []
    for metric, label in panel.metrics.items():
        logged = [log.get(metric).values for group in groups for log in group.logs]
        values = {value for series in logged for value in series}
        if len(values) > 1 or max(map(len, logged)) == 1 or panel.question == LEARNING:
            return ""
        found += [f"{label} {value:.4g}" for value in values]
    return f"{panel.title}: {', '.join(found)}"


def _mean(title: str, metric: str, label: str, error: str, logs: Sequence[MetricLog]) -> Panel:
    """Returns the chart of a mean, with its interval where its standard error is logged."""
    about = _INTERVAL if any(len(log.get(error)) for log in logs) else ""
    return Panel(title, {metric: label}, error, about, LEARNING)


def _asked_again(name: str, logs: Sequence[MetricLog]) -> Panel:
    """Returns the chart of what was found when a reward function was asked again."""
    prefix = f"recheck/{name}/"
    metrics = sorted({one for log in logs for one in log.series if one.startswith(prefix)})
    shown = {one: one.removeprefix(prefix) for one in metrics}
    return Panel(f"Reward {name}, asked again", shown, about="share of completions", question=OTHER)


def _most(estimates: Sequence[str]) -> int:
    """Returns the largest k of pass@k."""
    return max(
        (int(one.partition("@")[2]) for one in estimates if one.startswith("pass@")), default=0
    )


def about(panel: Panel, groups: Sequence[RunGroup]) -> str:
    """Returns what a chart says of itself: what its band is, and what its strokes are where colours are runs."""
    seeds = any(len(group.logs) > 1 for group in groups)
    found = [panel.about.replace(_INTERVAL, "band: lowest to highest seed" if seeds else _INTERVAL)]
    if len(groups) > 1 and len(panel.metrics) > 1:
        strokes = zip(panel.metrics.values(), cycle(_STROKES), strict=False)
        found.append(", ".join(f"{label} {stroke}" for label, stroke in strokes))
    return "; ".join(filter(None, found))


def lines(panel: Panel, groups: Sequence[RunGroup], shown: CurveControls) -> list[Line]:
    """Returns the lines of a chart, the first group on top. Of one group each metric has a colour; of several each
    group, and further metrics other strokes."""
    found = []
    alone = len(groups) == 1
    for place, group in enumerate(groups):
        for number, (metric, label) in enumerate(panel.metrics.items()):
            line = Line(
                label if alone else group.name + (f" · {label}" if number else ""),
                (),
                number if alone else place,
                dash=0 if alone else number,
                opens=group.opens + ("&of=eval" if metric.startswith("eval/") else ""),
                every=1 if metric.startswith("eval/") else group.every,
            )
            found += _lines_of(panel, group, metric, shown, alone, line)
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
    if shown.log:  # a logarithm has no place for 0: the band ends at the lowest value
        least = min((value for value in mean if value > 0), default=math.inf)
        band = [(x, max(bottom, least), top) for x, bottom, top in band if top > least]
    band = band[:: -(-len(band) // MOST_POINTS) or 1]
    points = thinned(xs, mean)
    kept = [x for x, _ in points]
    if shown.per_hour:
        step_at = dict(zip(xs, steps, strict=True))
        beside = {x: float(step_at[x]) for x in kept}
    else:
        beside = dict(zip(kept, at_steps(logs[0].hours(), map(int, kept)), strict=True))
    return [*faint, replace(line, points=points, band=band, beside=beside)]


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
        found = [ends.get(step, (None, None)) for step in series.steps]
        return [_number(low) for low, _ in found], [_number(high) for _, high in found]
    error = log.get(panel.error or "")
    if not error:
        nowhere = [math.nan] * len(series)
        return nowhere, nowhere
    halves = {step: NORMAL_95 * one for step, one in zip(error.steps, error.values, strict=True)}
    least, most = _possible(log, metric, series)
    pairs = list(zip(series.steps, series.values, strict=True))
    return (
        [max(value - halves.get(step, math.nan), least) for step, value in pairs],
        [min(value + halves.get(step, math.nan), most) for step, value in pairs],
    )


def _possible(log: MetricLog, metric: str, series: Series) -> tuple[float, float]:
    """Returns the values that a mean may have: 0 to 1 for a reward function that gives nothing but 0 and 1, whose
    variance is mean (1 - mean), by a little more as it is estimated; else any."""
    functions = log.rewards()
    if metric == "reward" and len(functions) == 1:
        metric = f"rewards/{functions[0]}/mean"
    deviations = log.get(metric.removesuffix("mean") + "std")
    known = dict(zip(deviations.steps, deviations.values, strict=True))
    both = [
        (known[step] ** 2, value * (1 - value))
        for step, value in zip(series.steps, series.values, strict=True)
        if step in known
    ]
    is_binary = all(math.isclose(*pair, rel_tol=0.1, abs_tol=1e-6) for pair in both)
    return (0.0, 1.0) if both and is_binary else (-math.inf, math.inf)


def _number(value: float | None) -> float:
    return math.nan if value is None else value
