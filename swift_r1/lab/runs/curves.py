"""The curves of runs, on the page and in reports: which metrics share a chart, in the order of what is asked of a run, and
their lines for one run, several runs, or several seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

from swift_r1.lab.diagnosis.trend import NORMAL_95
from swift_r1.record.folder import RunFolder
from swift_r1.record.metric_log import (
    MOST_POINTS,
    MetricLog,
    over_seeds,
    same_but_seed,
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
class RunGroup:
    """A run, or runs that differ in the seed alone and are drawn as one."""

    name: str
    runs: Sequence[RunFolder]
    logs: Sequence[MetricLog]


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a chart: values at steps, of which None leaves a gap.

    Attributes:
        group: number of the runs that it is of.
        metric: its name in logging.jsonl.
        colour: number of its colour.
        dash: number of its kind of stroke, 0 for a solid one.
        band: step, low and high of what is drawn around it.
    """

    label: str
    group: int
    metric: str
    colour: int
    dash: int
    points: Sequence[tuple[float, float | None]]
    band: Sequence[tuple[float, float, float]] = ()


def groups_of(
    runs: Sequence[RunFolder], logs: Sequence[MetricLog], names: Sequence[str]
) -> list[RunGroup]:
    """Returns the runs, those that differ in the seed alone as one."""
    found: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        found.setdefault(same_but_seed(run.args) if run.args else run.name, []).append(place)
    groups = []
    for places in found.values():
        name = names[places[0]]
        if len(places) > 1:
            seeds = ", ".join(str(runs[place].args.get("seed")) for place in places)
            name += f" and {len(places) - 1} more (seeds {seeds})"
        groups.append(
            RunGroup(name, [runs[place] for place in places], [logs[place] for place in places])
        )
    return groups


_PANELS = (
    Panel(
        "Groups without signal",
        {"frac_reward_zero_std": "share"},
        about="share whose rewards are equal: nothing to learn",
    ),
    Panel(
        "Truncated completions",
        {"completions/clipped_ratio": "share"},
        about="share that reached the limit",
    ),
    Panel(
        "Completion length",
        {"completions/mean_length": "mean", "completions/max_length": "longest"},
        about="tokens",
    ),
    Panel("Entropy of the policy", {"entropy": "entropy"}, about="nats per token"),
    Panel(
        "Policy change since the start",
        {"policy/moved": "log-prob of a token", "policy/kl_to_start": "KL to the start"},
        about="nats, on tokens of the first round",
    ),
    Panel("KL to the reference", {"kl": "KL"}),
    Panel("Pull of the KL", {"kl/pull": "pull"}, about="against an advantage of 1, per token"),
    Panel("KL to the teacher", {"teacher_kl": "KL"}),
    Panel(
        "Clipped ratios",
        {"clip_ratio/low": "low", "clip_ratio/high": "high"},
        about="share of tokens",
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
    Panel("Loss", {"loss": "loss"}),
    Panel("Token accuracy", {"token_accuracy": "share"}, about="share that were the likeliest"),
    Panel("Perplexity", {"perplexity": "perplexity"}),
    Panel(
        "Pairs right",
        {"rewards/accuracies": "share"},
        about="share whose chosen answer is worth more",
    ),
    Panel("Margin", {"rewards/margins": "margin"}, about="chosen less rejected"),
    Panel(
        "Log-probs of the answers",
        {"logps/chosen": "chosen", "logps/rejected": "rejected"},
        about="sums over tokens",
    ),
    Panel("Value loss", {"value_loss": "value loss"}),
    Panel(
        "Explained variance",
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
    Panel("Tokens per second", {"tokens_per_second": "tokens/s"}, question=FAST),
    Panel("Memory", {"memory/peak_gib": "peak"}, about="GiB of the rank with most", question=FAST),
)


_ANSWERS = {"loss", "token_accuracy", "perplexity", "rewards/accuracies", "rewards/margins"}
"""What tells whether a run learns that is given the answers."""


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
        if not _ANSWERS.isdisjoint(estimates):
            found += [
                Panel(
                    f"Held-out {one.removeprefix('rewards/').replace('_', ' ')}: {name}",
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
    answers = any(log.get("token_accuracy") or log.get("rewards/accuracies") for log in logs)
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


def curves(panel: Panel, groups: Sequence[RunGroup], smooth: float = 0.0) -> list[Curve]:
    """Returns the lines of a chart, the first group on top. Of one group each metric has a colour; of several each
    group, and further metrics other strokes. `smooth` is the weight of what was, from 0 to less than 1."""
    found = []
    alone = len(groups) == 1
    for place, group in enumerate(groups):
        for number, (metric, label) in enumerate(panel.metrics.items()):
            name = label if alone else group.name + (f" · {label}" if number else "")
            colour, dash = (number, 0) if alone else (place, number)
            weight = 0.0 if metric.startswith("eval/") else smooth
            points, band = _line(panel, group, metric, weight)
            if points:
                found.append(Curve(name, place, metric, colour, dash, points, band))
    return found


def _line(
    panel: Panel, group: RunGroup, metric: str, weight: float
) -> tuple[list[tuple[float, float | None]], list[tuple[float, float, float]]]:
    """Returns the points of a metric and the band around them: from the lowest to the highest seed, or of one run the
    95 % interval, where it is known."""
    logs = [log for log in group.logs if len(log.get(metric))]
    if not logs:
        return [], []
    if len(logs) > 1:
        rows = over_seeds([log.get(metric) for log in logs])
        steps, values, low, high = (list(column) for column in zip(*rows, strict=True))
    else:
        series = logs[0].get(metric)
        steps = list(series.steps)
        values = list(series.values)
        ends = _interval(panel, logs[0], metric)
        low = [ends.get(step, (math.nan, math.nan))[0] for step in steps]
        high = [ends.get(step, (math.nan, math.nan))[1] for step in steps]
    band = [
        (step, bottom, top)
        for step, bottom, top in zip(
            steps, smoothed(low, weight), smoothed(high, weight), strict=True
        )
        if math.isfinite(bottom) and math.isfinite(top)
    ]
    every = -(-len(band) // MOST_POINTS) or 1
    return thinned(steps, smoothed(values, weight)), band[::every]


def _interval(panel: Panel, log: MetricLog, metric: str) -> dict[int, tuple[float, float]]:
    """Returns the ends of the 95 % interval of a metric of one run by step, where they are known."""
    if metric.startswith("eval/"):
        benchmark, name = metric.removeprefix("eval/").rsplit("/", 1)
        return {
            one.step: (one.low, one.high)
            for one in log.evaluations(benchmark, name)
            if one.low is not None and one.high is not None
        }
    series = log.get(metric)
    error = log.get(panel.error or "")
    halves = {step: NORMAL_95 * one for step, one in zip(error.steps, error.values, strict=True)}
    return {
        step: (value - halves[step], value + halves[step])
        for step, value in zip(series.steps, series.values, strict=True)
        if step in halves
    }
