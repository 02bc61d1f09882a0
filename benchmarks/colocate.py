"""The same run with `--use_vllm false` and with `--vllm_mode colocate`: seconds of generation, and of the start.

    python benchmarks/colocate.py --model models/smollm2-135m
    NPROC_PER_NODE=2 python benchmarks/colocate.py --model M --deepspeed zero2

A row is a run: seconds from the command to the first step's end, then per step (the first left out) generating with
its rewards, training, weights to the engine, and tokens generated a second. The machine must be quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

RUN_S = 7200
PLUGIN = Path(__file__).with_name("async_plugin.py")
MODES = {
    "--use_vllm false": ("--use_vllm", "false"),
    "--vllm_mode colocate": ("--use_vllm", "true", "--vllm_mode", "colocate"),
}


def train(args: argparse.Namespace, more: tuple[str, ...]) -> tuple[float, list[dict[str, float]]]:
    """Seconds to the end of the first step, and the log of the others."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        flags = {
            "rlhf_type": "grpo",
            "model": args.model,
            "external_plugins": PLUGIN,
            "dataset": "counting",
            "reward_funcs": "digits",
            "num_generations": 8,
            "per_device_train_batch_size": args.completions,
            "max_length": 128,
            "max_completion_length": args.new_tokens,
            "max_steps": args.steps,
            "learning_rate": 1e-6,
            "gradient_checkpointing": "false",
            "save_steps": 10**6,
            "save_only_model": "true",
            "logging_steps": 1,
            "report_to": "none",
            "output_dir": run,
            "add_version": "false",
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        words += ["--deepspeed", args.deepspeed] if args.deepspeed else []
        began, first = time.perf_counter(), None
        process = subprocess.Popen(
            [sys.executable, "-m", "swift_r1", "rlhf", *words, *more],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ,
        )
        said = []
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if first is None and line.startswith("step 1/"):
                first = time.perf_counter() - began
        if process.wait(RUN_S) or first is None:
            raise SystemExit(f"swift rlhf ended with {process.returncode}:\n{''.join(said[-40:])}")
        lines = [json.loads(line) for line in (run / "logging.jsonl").read_text().splitlines()]
        return first, [line for line in lines if "loss" in line][1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--completions", type=int, default=32, help="a step and process")
    parser.add_argument("--new_tokens", type=int, default=128, help="at most, a completion")
    parser.add_argument("--deepspeed", help="of the run, for several processes")
    args = parser.parse_args()
    completions = args.completions * int(os.environ.get("NPROC_PER_NODE", "1"))
    table = Table(title=f"{args.steps} steps of {completions} completions, at most {args.new_tokens} new tokens")
    for column in ("mode", "first step after", "generate", "train", "sync", "a step", "tokens a second"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for mode, more in MODES.items():
        first, steps = train(args, more)

        def mean(name: str, steps: list[dict[str, float]] = steps) -> float:
            return statistics.fmean(line.get(name, 0.0) for line in steps)

        generate = mean("time/generate") + mean("time/reward")
        rate = completions * mean("completions/mean_length") / generate
        seconds = (first, generate, mean("time/train"), mean("time/sync"), mean("time/step"))
        table.add_row(mode, *(f"{value:.2f}" for value in seconds), f"{rate:.0f}")
    Console(width=110).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
