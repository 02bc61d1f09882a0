"""The exploration study: the same PPO run at several sampling temperatures, and the final score by temperature.

    python examples/gsm8k_ppo/exploration.py                # run.sh at 0.4 to 1.6, one after another
    python examples/gsm8k_ppo/exploration.py --mini         # mini.sh, on a CPU
    python examples/gsm8k_ppo/exploration.py --report       # the table and the plot of what is there

Evaluation is the recipe's at every temperature (0.35), so that only the exploration in training differs. A run that
was ended goes on from its last checkpoint when the same command is given again; one that is finished is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TEMPERATURES = (0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6)


@dataclass(frozen=True, slots=True)
class Score:
    """The evaluation of one run, from 0 to 1; `after` is the last one."""

    temperature: float
    seed: int
    before: float
    after: float


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=list(TEMPERATURES), metavar="T"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="N")
    parser.add_argument("--mini", action="store_true", help="mini.sh in place of run.sh")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument(
        "--output_dir",
        type=Path,
        help="[output/gsm8k_ppo_exploration, with --mini below output/mini]",
    )
    args = parser.parse_args()
    if bad := [value for value in args.temperatures if value <= 0]:
        parser.error(f"--temperatures: {bad[0]:g} is not above 0")
    folder = (
        args.output_dir or Path("output/mini" if args.mini else "output") / "gsm8k_ppo_exploration"
    )
    if not args.report:
        script = HERE / ("mini.sh" if args.mini else "run.sh")
        for seed in args.seeds:
            for temperature in args.temperatures:
                if code := run(script, folder, temperature, seed):
                    print(
                        f"{script.name} at temperature {temperature:g} ended with {code}",
                        file=sys.stderr,
                    )
                    return code
    scores = scores_in(folder)
    if not scores:
        print(f"no finished run in {folder}", file=sys.stderr)
        return 2
    print(table(scores))
    plot(scores, folder / "exploration.png")
    print(f"plot: {folder / 'exploration.png'}")
    return 0


def run(script: Path, folder: Path, temperature: float, seed: int) -> int:
    """One run, unless it is finished; returns its exit code."""
    output = place(folder, temperature, seed)
    if (output / "summary.json").is_file():
        print(f"{output} is finished")
        return 0
    words = ["--add_version", "false", "--resume_from_checkpoint", "last"]
    words += ["--seed", str(seed)] if script.name == "run.sh" else []
    environment = os.environ | {
        "TEMPERATURE": f"{temperature:g}",
        "OUTPUT": str(output.resolve()),
        "SEED": str(seed),
    }
    return subprocess.run([script, *words], env=environment, check=False).returncode


def place(folder: Path, temperature: float, seed: int) -> Path:
    return folder / f"temperature-{temperature:g}" / f"seed-{seed}"


def scores_in(folder: Path) -> list[Score]:
    """Of all finished runs, by temperature and seed."""
    found = []
    for path in folder.glob("temperature-*/seed-*/summary.json"):
        summary = json.loads(path.read_text())
        if summary["exit_code"] or summary["eval_after"] is None:
            continue
        temperature, seed = (
            float(part.name.rpartition("-")[2]) for part in (path.parents[1], path.parent)
        )
        found.append(Score(temperature, int(seed), summary["eval_before"], summary["eval_after"]))
    return sorted(found, key=lambda score: (score.temperature, score.seed))


def table(scores: Sequence[Score]) -> str:
    """A Markdown table: a row a temperature, the mean over seeds, and each seed's final score."""
    lines = ["| temperature | before | after | after, each seed |", "|---|---|---|---|"]
    best = max(means(scores).items(), key=lambda item: item[1])[0]
    for temperature, mean in means(scores).items():
        own = [score for score in scores if score.temperature == temperature]
        before = sum(score.before for score in own) / len(own)
        mark = " (best)" if temperature == best else ""
        each = ", ".join(f"{score.after:.3f}" for score in own)
        lines.append(f"| {temperature:g}{mark} | {before:.3f} | {mean:.3f} | {each} |")
    return "\n".join(lines)


def means(scores: Sequence[Score]) -> dict[float, float]:
    """The mean final score of each temperature."""
    values: dict[float, list[float]] = {}
    for score in scores:
        values.setdefault(score.temperature, []).append(score.after)
    return {temperature: sum(own) / len(own) for temperature, own in values.items()}


def plot(scores: Sequence[Score], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.plot(
        [score.temperature for score in scores],
        [score.after for score in scores],
        "o",
        label="a run",
    )
    mean = means(scores)
    axes.plot(list(mean), list(mean.values()), "-", label="mean")
    axes.set(
        xlabel="sampling temperature in training", ylabel="final score", title="PPO: exploration"
    )
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
