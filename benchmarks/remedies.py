"""Runs that collapse, and what becomes of them with the remedy that `swift why` puts first.

    examples/mini/make_model.sh countdown models/mini/countdown
    python benchmarks/remedies.py --model models/mini/countdown

Each collapse is a run of the demo's model and task with something wrong on purpose, on three seeds. The flags of the
first cause that `swift why` names are given to a new run of the same seed. A seed is repaired where the reward of the
new run rises or is solved, or where its last third earns more than that of the collapsed run, by more than 1.96 standard
errors of the difference (of the first reward function, which says what is right); a collapse, where all its seeds are.
Runs that are there already are not made again, so that a change of the causes costs only the runs that it changes.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from diagnosis import Job

from swift_r1.lab.diagnosis.causes import Cause
from swift_r1.lab.diagnosis.past import Past
from swift_r1.lab.diagnosis.watch import Diagnosis
from swift_r1.record.folder import RunFolder

SEEDS = (0, 1, 2)
BASE = Path(__file__).parent / "faults" / "signs.yaml"
LIMIT = {"max_completion_length": 80, "max_steps": 12}
COLLAPSES: Mapping[str, Mapping[str, Any]] = {
    "too high a rate": {"learning_rate": 3e-3},
    "KL": {"beta": 5, "max_steps": 40},
    "cold sampling": {"temperature": 0.05, "max_steps": 24},
    "stale rounds": {"learning_rate": 1e-3, "num_iterations": 4, "max_steps": 40},
    "entropy": {
        "reward_funcs": ["countdown", "majority"],
        "reward_weights": [0, 1],
        "max_steps": 40,
    },
    "length": {
        "reward_funcs": ["countdown", "longer"],
        "reward_weights": [0.1, 1],
        "max_completion_length": 160,
        "max_steps": 30,
    },
}


@dataclass(frozen=True)
class Outcome:
    """What a run came to: the text of its verdict, and the mean of the first function in its last third."""

    folder: Path
    kind: str
    text: str
    causes: Sequence[Cause]
    last: float
    error: float  # standard error of `last`

    @classmethod
    def of(cls, folder: Path) -> Outcome:
        log = Diagnosis(folder)
        log.refresh()
        verdict = log.verdict
        assert verdict is not None
        run = RunFolder(folder, folder.name)
        past = Past(log, run.args, run.plan)
        right = verdict.functions[0] if verdict.functions else verdict.reward
        count = max(1, past.rounds // 3)
        errors = past.last(f"{past.right}/stderr", count)
        last = fmean(past.last(f"{past.right}/mean", count))
        error = math.sqrt(fmean(error**2 for error in errors) / count)
        return cls(folder, right.kind, right.text, verdict.causes, last, error)


def made(name: str, flags: Mapping[str, Any], model: Path, folder: Path) -> Outcome:
    """Runs it where that has not been done, and judges it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not (folder / "summary.json").exists():
        base = yaml.safe_load(BASE.read_text(encoding="utf-8"))["bases"]["demo"]
        entry = {"name": name, "flags": flags | {"model": model}, "environ": {"OMP_NUM_THREADS": 1}}
        code = Job(entry, folder, False, base).run()
        if code:
            raise SystemExit(f"{name}: exit code {code}, see {folder}.log")
    return Outcome.of(folder)


def tried(name: str, seed: int, model: Path, base: Path, against: str | None) -> list[str]:
    """Returns the row of a seed: what collapsed, what was to be done, what that came to."""
    flags = LIMIT | COLLAPSES[name] | {"seed": seed}
    folder = base / name.replace(" ", "-") / f"seed-{seed}"
    before = made(name, flags, model, folder)
    chosen = [one for one in before.causes if against in (None, one.name)][:1]
    row = [name, str(seed), before.text, chosen[0].name if chosen else "no cause"]
    if not chosen or not chosen[0].flags:
        return [*row, "no flags", "", "no"]
    remedy = chosen[0].flags
    label = "-".join(f"{flag}-{value}" for flag, value in remedy.items())
    after = made(name, flags | remedy, model, folder.with_name(f"{folder.name}-{label}"))
    half = 1.96 * math.hypot(before.error, after.error)
    better = after.last - before.last > half
    good = after.kind in ("rises", "solved") or better
    shown = " ".join(f"--{flag} {value}" for flag, value in remedy.items())
    became = f"{after.text}; {after.last:.3g} at the end, not {before.last:.3g} (+- {half:.2g})"
    return [*row, shown, became, "yes" if good else "no"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/mini/countdown"))
    parser.add_argument("--output_dir", type=Path, default=Path("output/remedies"))
    parser.add_argument("--collapses", nargs="*", default=list(COLLAPSES), choices=list(COLLAPSES))
    parser.add_argument("--against", help="a cause, in the place of the first one")
    parser.add_argument("--parallel", type=int, default=2)
    args = parser.parse_args()
    wanted = [(name, seed) for name in args.collapses for seed in SEEDS]
    with ThreadPoolExecutor(args.parallel) as pool:
        futures = [
            pool.submit(tried, name, seed, args.model, args.output_dir, args.against)
            for name, seed in wanted
        ]
        rows = []
        for future in futures:
            rows.append(future.result())
            print(" | ".join(rows[-1]), flush=True)
    repaired = [
        name for name in args.collapses if all(row[-1] == "yes" for row in rows if row[0] == name)
    ]
    print(
        f"repaired on all seeds: {len(repaired)} of {len(args.collapses)} ({', '.join(repaired)})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
