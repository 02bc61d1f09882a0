"""The demo's task learned from rewards, and from the model that they made, at equal completions.

    for seed in 0 1 2; do
      SEED=$seed examples/mini/make_model.sh countdown output/warm-$seed
    done
    python benchmarks/distillation.py output/distillation --model output/warm-{seed}

For each seed GRPO trains the model as `examples/countdown_demo` does. Its last checkpoint then teaches the model as it
was before, in each of the ways, with as many completions a step and the same flags; but for the last way rewards are
logged and not learned from. Flags that are not its own go to `swift rlhf`. A run that was ended goes on, one that is
over is not done again. A row is a way of learning: its accuracy on the held-out problems at each evaluation, mean over
the seeds, and in the last column each seed's after `--steps`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from demo_runs import demo, trained
from rich.console import Console
from rich.table import Table

NO_REWARD = ("--reward_weights", "0", "0")
WAYS: dict[str, tuple[str, ...]] = {
    "loss": ("--gkd_logits_topk", "8", *NO_REWARD),
    "advantages": NO_REWARD,
    "advantages_and_rewards": (),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", required=True, help="{seed} in it stands for the seed")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--steps", type=int, default=22, help=f"of a taught model [22]; GRPO takes {demo.STEPS}"
    )
    parser.add_argument("--eval_steps", type=int, default=11)
    args, args.more = parser.parse_known_args()
    found: dict[str, list[dict[int, float]]] = {}
    for seed in args.seeds:
        for way in ("rewards", *args.ways):
            steps, more = demo.STEPS, tuple(args.more)
            if way != "rewards":
                teacher = args.folder / f"rewards-{seed}" / f"checkpoint-{demo.STEPS}"
                steps, more = args.steps, ("--teacher_model", str(teacher), *WAYS[way], *more)
            own = {"model": args.model.format(seed=seed), "seed": seed, "max_steps": steps}
            own |= {"eval_steps": args.eval_steps, "gradient_accumulation_steps": 16}
            own |= {"per_device_train_batch_size": demo.COMPLETIONS // 16}
            found.setdefault(way, []).append(trained(args.folder / f"{way}-{seed}", more, **own))
            print(f"{way}, seed {seed}: {found[way][-1]}", file=sys.stderr, flush=True)
    show(args.steps, found)
    return 0


def show(steps: int, found: dict[str, list[dict[int, float]]]) -> None:
    marks = sorted({mark for runs in found.values() for run in runs for mark in run})
    table = Table(
        title=f"accuracy after so many steps of {demo.COMPLETIONS} completions, mean of the seeds"
    )
    for column in ("learned from", *map(str, marks), f"each seed after {steps}"):
        table.add_column(column, justify="left" if column == "learned from" else "right")
    for way, runs in found.items():
        means = [
            f"{statistics.fmean(run[mark] for run in runs):.3f}" if mark in runs[0] else ""
            for mark in marks
        ]
        table.add_row(way, *means, ", ".join(f"{run[steps]:.3f}" for run in runs if steps in run))
    Console(width=140).print(table)


if __name__ == "__main__":
    sys.exit(main())
