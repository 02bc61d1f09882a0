"""What runs of `run.sh` learned: a line a run, their curves as CSV, and a picture.

python examples/calculator_agent/report.py output/calculator_agent/* --csv curves.csv --plot curves.png
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--csv", type=Path, help="where to write the curves")
    parser.add_argument("--plot", type=Path, help="where to draw them")
    args = parser.parse_args()
    curves = [row for run in args.runs for row in curve(run)]
    for run in args.runs:
        print(line(run))
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(
                file, ["run", "step", "training", "held_out"], lineterminator="\n"
            )
            writer.writeheader()
            writer.writerows(curves)
    if args.plot:
        plot(curves, args.plot)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def curve(run: Path) -> list[dict[str, Any]]:
    """The share of problems solved by step: in training, and held out where that was measured."""
    found: dict[int, dict[str, Any]] = {}
    for row in _lines(run / "logging.jsonl"):
        own = found.setdefault(row["step"], {"run": run.name, "step": row["step"]})
        # The first reward function says what is right; others may be added to it.
        right = [value for name, value in row.items() if re.fullmatch("rewards/[^/]+/mean", name)]
        own |= {"training": f"{right[0]:.4f}"} if right else {}
        held_out = [
            value for name, value in row.items() if re.fullmatch("eval/[^/]+/accuracy", name)
        ]
        own |= {"held_out": f"{held_out[0]:.5f}"} if held_out else {}
    return [found[step] for step in sorted(found)]


def line(run: Path) -> str:
    """Held out by step, and how often the calculator was called before and after."""
    held_out = [row for row in curve(run) if "held_out" in row]
    rows = _lines(run / "eval_completions.jsonl")
    calls = []
    for step in (held_out[0]["step"], held_out[-1]["step"]):
        own = [row for row in rows if row["step"] == step]
        calls.append(
            sum(len(one.get("tool_calls") or ()) for row in own for one in row["messages"])
            / len(own)
        )
    shown = ", ".join(f"{float(row['held_out']):.3f} ({row['step']})" for row in held_out)
    return f"{run.name}: {shown}; {calls[0]:.2f} to {calls[1]:.2f} calls a problem"


def plot(curves: list[dict[str, Any]], path: Path) -> None:
    """One panel for each script: its runs have steps of another size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels: dict[str, list[str]] = {}
    for run in dict.fromkeys(row["run"] for row in curves):
        way = run.rpartition("-")[0]
        panels.setdefault(
            "SmolLM2-135M: right calls" if way == "smollm2" else "made here: solved", []
        ).append(run)
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(5 * len(panels), 4),
        layout="constrained",
        sharey=True,
        squeeze=False,
    )
    colours: dict[str, str] = {}
    for axis, (title, runs) in zip(axes[0], panels.items(), strict=True):
        for run in runs:
            own = [row for row in curves if row["run"] == run]
            way = run.rpartition("-")[0]
            label = None if way in colours else way
            colour = colours.setdefault(way, f"C{len(colours)}")
            training = [(row["step"], float(row["training"])) for row in own if "training" in row]
            held_out = [(row["step"], float(row["held_out"])) for row in own if "held_out" in row]
            axis.plot(*zip(*training, strict=True), color=colour, alpha=0.35, linewidth=1)
            axis.plot(*zip(*held_out, strict=True), color=colour, marker="o", label=label)
        axis.set(xlabel="optimizer step", ylim=(0, 1), title=title)
        axis.grid(alpha=0.3)
        axis.legend(title="thick: held out, thin: in training", loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
