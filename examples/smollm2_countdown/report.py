"""What runs of `run.sh` learned: a table by ten steps, completions before and after, and a plot of all of them.

python examples/smollm2_countdown/report.py output/smollm2_countdown/seed-* --plot docs/images/smollm2_countdown.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

EVERY = 10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--plot", type=Path, help="where to write the curves")
    args = parser.parse_args()
    logs = {
        run: [row for row in _lines(run / "logging.jsonl") if "reward" in row] for run in args.runs
    }
    console = Console()
    console.print(_table(logs))
    for run in args.runs:
        summary = json.loads((run / "summary.json").read_text())
        before, after = summary["eval_before"], summary["eval_after"]
        seconds = median(row["time/step"] for row in logs[run])
        console.print(
            f"{run.name}: held-out accuracy {before:.3f} to {after:.3f}, median {seconds:.1f} s a step"
        )
    _show_completions(console, args.runs[0], logs[args.runs[0]][-1]["step"])
    if args.plot:
        _plot(logs, args.plot)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def _table(logs: dict[Path, list[dict[str, Any]]]) -> Table:
    """The share of solved problems, averaged over ten steps at a time."""
    table = Table("steps", *(run.name for run in logs), title="solved in training")
    last = max(row["step"] for log in logs.values() for row in log)
    for first in range(1, last + 1, EVERY):
        steps = range(first, first + EVERY)
        means = [
            [row["rewards/solved/mean"] for row in log if row["step"] in steps]
            for log in logs.values()
        ]
        table.add_row(
            f"{first}-{min(steps[-1], last)}",
            *(f"{fmean(mean):.2f}" if mean else "" for mean in means),
        )
    return table


def _show_completions(console: Console, run: Path, last: int) -> None:
    rows = _lines(run / "eval_completions.jsonl")
    for step in (0, last):
        console.print(f"\n{run.name}, held-out problems after step {step}:")
        for row in [row for row in rows if row["step"] == step][:24:4]:
            console.print(
                f"  {row['nums']} {row['target']}: {row['completion']!r}",
                markup=False,
                highlight=False,
            )


def _plot(logs: dict[Path, list[dict[str, Any]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for run, log in logs.items():
        axes.plot(
            [row["step"] for row in log],
            [row["rewards/solved/mean"] for row in log],
            label=run.name,
        )
    axes.set(
        xlabel="optimizer step",
        ylabel="solved",
        ylim=(0, 1),
        title="SmolLM2-135M, two-number Countdown",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
