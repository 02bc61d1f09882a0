"""The demo with other orders of its prompts (`--prompt_sampler`): how good the model is after how many completions.

    for seed in 0 1 2; do
        SEED=$seed examples/mini/make_model.sh countdown models/demo-$seed
    done
    python benchmarks/samplers.py output/samplers --model 'models/demo-{seed}' --samplers uniform difficulty
    python benchmarks/samplers.py output/samplers-half --model 'models/demo-{seed}' --samplers uniform difficulty \
        --completions 128 --steps 120 --eval_steps 28 --dataset half_unsolvable

For each seed its model is trained with each sampler, all else as in `examples/countdown_demo`; flags that are not its
own go to `swift rlhf`. A run that was ended goes on, and one that is over is not done again. A row is a sampler: its
accuracy on the held-out problems at each evaluation, mean over the seeds, and how that at `--share` of the completions
compares with the first sampler's at the end.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from demo_runs import DEMO, demo, trained
from rich.console import Console
from rich.table import Table

PLUGINS = (str(DEMO / "plugin.py"), str(Path(__file__).with_name("samplers_plugin.py")))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", required=True, help="{seed} in it stands for the seed")
    parser.add_argument(
        "--samplers", nargs="+", default=["uniform", "difficulty", "curriculum", "replay_failures"]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=demo.STEPS)
    parser.add_argument("--eval_steps", type=int, default=11)
    parser.add_argument(
        "--completions", type=int, default=demo.COMPLETIONS, help="a step [%(default)s]"
    )
    parser.add_argument(
        "--dataset", default="countdown_mini", help="or half_unsolvable [countdown_mini]"
    )
    parser.add_argument(
        "--share", type=float, default=0.7, help="of the completions, to be compared at [0.7]"
    )
    args, args.more = parser.parse_known_args()
    accuracies: dict[str, list[dict[int, float]]] = {name: [] for name in args.samplers}
    for seed in args.seeds:
        for name in args.samplers:
            own = {"model": args.model.format(seed=seed), "seed": seed, "prompt_sampler": name}
            own |= {"max_steps": args.steps, "eval_steps": args.eval_steps, "dataset": args.dataset}
            own |= {
                "per_device_train_batch_size": 32,
                "gradient_accumulation_steps": args.completions // 32,
            }
            more = ["--external_plugins", *PLUGINS, *args.more]
            accuracies[name].append(trained(args.folder / f"{name}-{seed}", more, **own))
            print(f"{name}, seed {seed}: {accuracies[name][-1]}", file=sys.stderr, flush=True)
    show(args, accuracies)
    return 0


def show(args: argparse.Namespace, accuracies: dict[str, list[dict[int, float]]]) -> None:
    first = accuracies[args.samplers[0]]
    steps = sorted(set.intersection(*(set(run) for runs in accuracies.values() for run in runs)))
    at = max(step for step in steps if step <= args.share * args.steps)
    title = f"accuracy after so many steps of {args.completions} completions, mean of {len(first)} seeds"
    table = Table(title=f"{args.dataset}: {title}")
    columns = [
        "sampler",
        *map(str, steps),
        f"after {at}, less that of {args.samplers[0]} after {steps[-1]}, by seed",
    ]
    for column in columns:
        table.add_column(column, justify="left" if column == "sampler" else "right")
    for name, runs in accuracies.items():
        means = [statistics.fmean(run[step] for run in runs) for step in steps]
        less = [run[at] - other[steps[-1]] for run, other in zip(runs, first, strict=True)]
        by_seed = f"{statistics.fmean(less):+.3f} ({', '.join(f'{one:+.3f}' for one in less)})"
        table.add_row(name, *(f"{one:.3f}" for one in means), by_seed)
    Console(width=140).print(table)


if __name__ == "__main__":
    sys.exit(main())
