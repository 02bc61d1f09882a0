"""The demo's task learned from rewards, from a stronger model of the same kind, and from both, at equal completions.

    python examples/mini/make_model.py countdown models/mini/countdown
    python benchmarks/distillation.py output/distillation --model models/mini/countdown

The teacher is the same model after GRPO with the demo's own flags (`--teacher` names one that is there already). The
student is the model as it was: each way of learning starts from it, with each seed, and takes as many completions a
step as the demo. Flags that are not its own go to `swift rlhf`. A run that was ended goes on, and one that is over
is not done again. A row is a way of learning: the accuracy on the held-out problems at each evaluation, mean over the
seeds, and in the last column of each seed at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

DEMO = Path(__file__).resolve().parents[1] / "examples" / "countdown_demo"
sys.path.append(str(DEMO))
import run as demo  # noqa: E402  its flags

ACCURACY = "eval/countdown_mini/accuracy"
WAYS: dict[str, tuple[str, ...]] = {
    "rewards (GRPO)": (),
    "teacher's advantages": ("--teacher_kl_coef", "1", "--reward_weights", "0", "0"),
    "teacher's KL as the loss": ("--gkd_logits_topk", "8", "--reward_weights", "0", "0"),
    "rewards and teacher's advantages": ("--teacher_kl_coef", "1"),
}
"""With weights of 0 the rewards are logged and nothing is learned from them."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--teacher", type=Path, help="folder of a model [the last checkpoint of a run of GRPO]")
    parser.add_argument("--teacher_steps", type=int, default=demo.STEPS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--eval_steps", type=int, default=4)
    args, args.more = parser.parse_known_args()
    teacher = args.teacher
    if teacher is None:
        trained(args, "teacher", 100, args.teacher_steps, ())
        teacher = args.folder / "teacher-100" / f"checkpoint-{args.teacher_steps}"
    found: dict[str, list[dict[int, float]]] = {way: [] for way in args.ways}
    for seed in args.seeds:
        for way in args.ways:
            more = ("--teacher_model", str(teacher), *WAYS[way]) if WAYS[way] else ()
            found[way].append(trained(args, "".join(filter(str.isalpha, way)), seed, args.steps, more))
            print(f"{way}, seed {seed}: {found[way][-1]}", file=sys.stderr, flush=True)
    show(args.steps, found)
    return 0


def trained(args: argparse.Namespace, name: str, seed: int, steps: int, more: tuple[str, ...]) -> dict[int, float]:
    """The accuracy by optimizer step of one run; 0 is before the first."""
    folder = args.folder / f"{name}-{seed}"
    summary = folder / "summary.json"
    if not summary.exists() or json.loads(summary.read_text())["steps"] < steps:
        own = {
            "model": args.model,
            "output_dir": folder,
            "add_version": "false",
            "resume_from_checkpoint": "last",
            "seed": seed,
            "max_steps": steps,
            "eval_steps": args.eval_steps,
            "save_steps": args.eval_steps,
            "save_total_limit": 1,
            "per_device_train_batch_size": demo.COMPLETIONS // 16,
            "gradient_accumulation_steps": 16,
        }
        flags = by_name((*demo.FLAGS, *demo.OF_GRPO)) | {f"--{key}": [str(value)] for key, value in own.items()}
        flags |= by_name((*more, *args.more))
        folder.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f"{folder.name}.log").open("ab") as log:
            words = [word for flag, values in flags.items() for word in (flag, *values)]
            subprocess.run([*demo.SWIFT, "rlhf", *words], stdout=log, stderr=subprocess.STDOUT, check=True)
    lines = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
    return {line["step"]: line[ACCURACY] for line in lines if ACCURACY in line}


def by_name(words: Sequence[str]) -> dict[str, list[str]]:
    """The values of each flag."""
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            found[word] = []
        else:
            found[next(reversed(found))].append(word)
    return found


def show(steps: int, found: dict[str, list[dict[int, float]]]) -> None:
    runs = [run for of_way in found.values() for run in of_way]
    marks = sorted(set.intersection(*map(set, runs)))
    table = Table(title=f"accuracy after so many steps of {demo.COMPLETIONS} completions, mean of the seeds")
    for column in ("learned from", *map(str, marks), f"each seed after {steps}"):
        table.add_column(column, justify="left" if column == "learned from" else "right")
    for way, of_way in found.items():
        means = (f"{statistics.fmean(run[mark] for run in of_way):.3f}" for mark in marks)
        table.add_row(way, *means, ", ".join(f"{run[marks[-1]]:.3f}" for run in of_way))
    Console(width=140).print(table)


if __name__ == "__main__":
    sys.exit(main())
