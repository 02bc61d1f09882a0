"""The facts of one run in a report and a model card: what was run, what it learned, what it cost; as far as its files
say.

A model card is written while the run goes on: `until` leaves out what was logged after that step.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swift_r1.lab.report.blocks import CodeBlock, Table
from swift_r1.lab.runs.timeline import Timeline
from swift_r1.record.folder import RunFolder
from swift_r1.record.metric_log import MetricLog, Series

_FACTS = {
    "learning rate": "{learning_rate:g}, {lr_scheduler_type}",
}
_SAMPLED = "{rlhf_type}, loss {loss_type}, {num_generations} completions per prompt"
_SUPERVISED = "sft, --loss_scale {loss_scale}"
_COMPARED = "{rlhf_type}, loss {loss_type}, beta {beta:g}, --loss_scale {loss_scale}"
_CURVES = {
    "reward": ".3f",
    "token_accuracy": ".3f",
    "perplexity": ".3f",
    "rewards/accuracies": ".3f",
    "rewards/margins": ".3f",
    "completions/mean_length": ".0f",
    "kl": ".4f",
    "entropy": ".3f",
}
_POINTS = 12  # of the table of curves, at most
_PHASES = ("generate", "reward", "teacher", "train", "sync")


def facts(run: RunFolder) -> dict[str, str]:
    """Returns what was run, by name, without what args.json lacks."""
    args = run.args
    found = {name: run.args.get(name) for name in ("model", "train_type", "torch_dtype")}
    algorithm = _SUPERVISED if run.supervised else _SAMPLED
    if run.supervised and run.command[1:2] != ["sft"]:
        algorithm = _COMPARED
    for name, form in {"algorithm": algorithm, **_FACTS}.items():
        try:
            found[name] = form.format_map(args)
        except (KeyError, ValueError, TypeError):
            continue  # a run of another version
    environment = _texts(args.get("env"))
    if args.get("env_args"):
        environment.append(json.dumps(args["env_args"]))
    rewards = _texts(args.get("reward_funcs"))
    weights = _texts(args.get("reward_weights"))
    weighted = [f"{name} x {weight}" for name, weight in zip(rewards, weights, strict=False)]
    found |= {
        "environment": " ".join(environment),
        "agent": None if args.get("env") else args.get("agent") or args.get("agent_command"),
        "data": ", ".join(_texts(args.get("dataset"))),
        "rewards": ", ".join(weighted or rewards),
        "hardware": _hardware(run),
        "versions": ", ".join(
            f"{name} {number}" for name, number in run.versions.items() if number
        ),
    }
    return {name.replace("_", " "): str(text) for name, text in found.items() if text}


def _texts(value: Any) -> list[str]:
    """Returns the items of a list, as whatever version or accident has left it."""
    if value is None:
        return []
    items = value if isinstance(value, list) else [value]
    return [f"{item:g}" if isinstance(item, float) else str(item) for item in items]


def without_folders(run: RunFolder, text: str) -> str:
    """Returns a text whose paths, of the run's command, are without the folder that they share, which nobody else has;
    with their last two parts where they share none."""
    paths = [word for word in run.command if os.path.isabs(word)]
    shared = os.path.commonpath(map(os.path.dirname, paths)) if paths else os.sep
    for path in sorted(paths, key=len, reverse=True):
        short = os.path.join("...", *Path(path).parts[-2:])
        text = text.replace(path, short if shared == os.sep else os.path.relpath(path, shared))
    return text


def command(run: RunFolder) -> list[CodeBlock]:
    """Returns the exact command, a line per flag; nothing where it is not known."""
    text = ""
    for word in map(shlex.quote, run.command):
        text += f" \\\n  {word}" if word.startswith("--") else f" {word}"
    text = text.strip()
    return [CodeBlock(text)] if text else []


def _hardware(run: RunFolder) -> str:
    found = []
    size = run.plan.get("world_size")
    if size:
        found.append(f"{size} process{'' if size == 1 else 'es'}")
    machine = run.hardware
    gpus = _texts(machine.get("gpus"))
    found += [f"{gpus.count(kind)} x {kind}" for kind in dict.fromkeys(gpus)]
    if machine:
        found.append(
            f"{machine.get('cores')} cores of {machine.get('cpu')}, {machine.get('memory_gib')} GiB"
        )
    return ", ".join(found)


def training_table(log: MetricLog, until: float = math.inf) -> Table:
    """Returns some steps of a run, the first and the last among them."""
    columns = {}
    for name, form in _CURVES.items():
        series = log.get(name)
        if any(map(math.isfinite, series.values)):
            columns[name] = (series, form)
    steps = [step for step in (log.get("reward") or log.get("loss")).steps if step <= until]
    return _table(columns, spread(steps, _POINTS))


def spread(steps: Sequence[int], most: int) -> list[int]:
    """Returns at most so many of the steps, evenly, the first and the last among them."""
    if not steps:
        return []
    places = {round(number * (len(steps) - 1) / (most - 1)) for number in range(most)}
    return [steps[place] for place in sorted(places)]


def evaluation_table(log: MetricLog, until: float = math.inf) -> Table:
    """Returns the accuracy on each benchmark at each evaluation; of answers that are learned their perplexity."""
    found = {
        name: log.get(f"eval/{name}/{log.estimate(name)}") for name in sorted(log.benchmarks())
    }
    steps = sorted({step for series in found.values() for step in series.steps if step <= until})
    return _table({name: (series, ".3f") for name, series in found.items()}, steps)


def _table(columns: dict[str, tuple[Series, str]], steps: Sequence[int]) -> Table:
    rows = {step: [str(step)] for step in steps}
    for series, form in columns.values():
        values = dict(zip(series.steps, series.values, strict=True))
        for step, row in rows.items():
            value = values.get(step, math.nan)
            row.append("" if math.isnan(value) else f"{value:{form}}")
    return Table(["step", *columns], list(rows.values()), texts=0)


def cost(run: RunFolder, log: MetricLog) -> dict[str, str]:
    """Returns the hours of the run and of its processors, and how the time of its steps was spent.

    The hours are those of its processes, from events.jsonl: what was lost by a kill is in them. A run of an older
    version has those of summary.json, or, before its end, of the steps that were logged.
    """
    timeline = Timeline(run.path, "rank-0")  # what others did is not needed, and long
    timeline.refresh()
    steps = max(log.get("time/step").steps, default=0)
    whole = timeline.alive_s or run.summary.get("seconds")
    spent = {name: log.hours(name) for name in ("step", *_PHASES)}
    hours = whole / 3600 if isinstance(whole, int | float) else spent["step"]
    if not hours:
        return {}
    machine = run.hardware
    processes = run.plan.get("world_size", 1)
    units, count = ("GPU", processes) if machine.get("gpus") else ("core", machine.get("cores"))
    found = {"hours": f"{hours:.2f}" + ("" if whole else " (of the logged steps alone)")}
    if isinstance(count, int):
        has_servers = run.args.get("use_vllm") and run.args.get("vllm_mode", "server") == "server"
        found[f"{units} hours"] = f"{hours * count:.2f}" + (
            ", without the rollout servers'" if has_servers else ""
        )
    if spent["step"]:
        text = f"{3600 * spent['step'] / steps:.1f} s"
        parts = [
            f"{name} {100 * spent[name] / spent['step']:.0f} %" for name in _PHASES if spent[name]
        ]
        if parts:
            text += f": {', '.join(parts)}"
        found["time of a step"] = text
    return found
