"""What a report and a model card say of one run: what was run, what it learned, what it cost. From args.json and
logging.jsonl, whatever of them is there."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from swift_r1.report.blocks import Code, Table
from swift_r1.report.evaluations import accuracies

_CURVE = {
    "reward": ".3f",
    "completions/mean_length": ".0f",
    "kl": ".4f",
    "entropy": ".3f",
}
_PHASES = ("generate", "reward", "train", "sync")
_HOUR = 3600.0


def facts(content: Mapping[str, Any]) -> dict[str, str]:
    """What was run, from args.json: by name, without what it lacks."""
    args = content.get("args") or {}
    said = {
        "model": "{model}",
        "trained": "{train_type}, {torch_dtype}",
        "algorithm": "{rlhf_type}, loss {loss_type}, {num_generations} completions a prompt",
        "learning rate": "{learning_rate:g}, {lr_scheduler_type}",
    }
    found = {}
    for name, form in said.items():
        try:
            found[name] = form.format_map(args)
        except (KeyError, ValueError, TypeError):
            continue  # a flag of another version
    weights = args.get("reward_weights") or []
    rewards = [f"{name} x {weight:g}" for name, weight in zip(args.get("reward_funcs") or [], weights, strict=False)]
    more = {
        "data": ", ".join(map(str, args.get("dataset") or [])),
        "rewards": ", ".join(rewards or args.get("reward_funcs") or []),
        "hardware": _hardware(content),
        "versions": ", ".join(f"{name} {number}" for name, number in (content.get("versions") or {}).items() if number),
    }
    return found | {name: text for name, text in more.items() if text}


def command(content: Mapping[str, Any]) -> list[Code]:
    """The exact command, a line per flag; nothing where it is not known."""
    words = [shlex.quote(str(word)) for word in content.get("command") or []]
    return (
        [Code("".join(f" \\\n  {word}" if word.startswith("--") else f" {word}" for word in words).strip())]
        if words
        else []
    )


def _hardware(content: Mapping[str, Any]) -> str:
    machine, size = content.get("hardware") or {}, content.get("world_size")
    processes = f"{size} process{'' if size == 1 else 'es'}" if size else ""
    gpus = machine.get("gpus") or []
    kinds = [f"{gpus.count(kind)} x {kind}" for kind in dict.fromkeys(gpus)]
    cpu = [f"{machine['cores']} cores of {machine['cpu']}", f"{machine['memory_gib']:.0f} GiB"] if machine else []
    return ", ".join(filter(None, (processes, *kinds, *cpu)))


def training_rows(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The lines of training steps in logging.jsonl, in order; of a step that a resumed run came to again the last."""
    return [row for _, row in sorted({row["step"]: row for row in rows if "reward" in row}.items())]


def training_table(rows: Sequence[Mapping[str, Any]], points: int = 12) -> Table:
    """At most `points` steps of a run, the first and the last among them."""
    last = len(rows) - 1
    thinned = [rows[place] for place in sorted({round(n * last / (points - 1)) for n in range(points)})] if rows else []
    return _curve(
        thinned, {name: form for name, form in _CURVE.items() if any(row.get(name) is not None for row in rows)}
    )


def evaluation_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """The accuracy on each benchmark at each evaluation."""
    found: dict[int, dict[str, Any]] = {}
    for name, points in accuracies(rows).items():
        for point in points:
            found.setdefault(point.step, {"step": point.step})[name] = point.value
    names = sorted({name for row in found.values() for name in row} - {"step"})
    return _curve([row for _, row in sorted(found.items())], dict.fromkeys(names, ".3f"))


def _curve(rows: Sequence[Mapping[str, Any]], forms: Mapping[str, str]) -> Table:
    def cell(row: Mapping[str, Any], name: str) -> str:
        value = row.get(name)
        return "" if value is None else f"{value:{forms[name]}}"

    return Table(["step", *forms], [[str(row["step"]), *(cell(row, name) for name in forms)] for row in rows], texts=0)


def cost(content: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], seconds: float | None) -> dict[str, str]:
    """Hours of the run and of its processors, and how the steps' time was spent.

    Args:
        rows: of training steps.
        seconds: of the whole run, from summary.json; without it those of the steps that were logged.
    """
    windows = [row["step"] - before["step"] for before, row in zip([{"step": 0}, *rows], rows, strict=False)]
    spent = {
        name: sum(number * (row.get(f"time/{name}") or 0.0) for number, row in zip(windows, rows, strict=True))
        for name in (*_PHASES, "step")
    }
    hours = (spent["step"] if seconds is None else seconds) / _HOUR
    if not hours:
        return {}
    machine, size = content.get("hardware") or {}, content.get("world_size") or 1
    found = {"hours": f"{hours:.2f}" + (" (of the logged steps alone)" if seconds is None else "")}
    if machine.get("gpus"):
        found["GPU hours"] = f"{hours * size:.2f}" + _servers(content)
    elif machine:
        found["core hours"] = f"{hours * machine['cores']:.2f}" + _servers(content)
    if spent["step"]:
        parts = [f"{name} {100 * spent[name] / spent['step']:.0f} %" for name in _PHASES if spent[name]]
        found["time of a step"] = f"{spent['step'] / sum(windows):.1f} s: {', '.join(parts)}"
    return found


def _servers(content: Mapping[str, Any]) -> str:
    args = content.get("args") or {}
    alone = args.get("use_vllm") and args.get("vllm_mode", "server") == "server"
    return ", without those of the rollout servers" if alone else ""
