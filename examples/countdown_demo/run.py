"""The demo: a model made from scratch learns Countdown by GRPO or PPO. `make demo`, or `python run.py --help`.

It makes and warm-starts the model, runs the same `swift rlhf` as everyone (with `--server` through `swift rollout` and
ZeRO-3 on two processes), and shows what changed, read from the files that the run left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from swift_r1.arguments.world import World
from swift_r1.launch.environment import has_gpu, trainer_environment, usable_cpus

HERE = Path(__file__).resolve().parent
SWIFT = (sys.executable, "-m", "swift_r1")
STEPS, SERVER_STEPS = 48, 48
PPO_STEPS_A_ROUND = 2
COMPLETIONS, GROUP = 512, 16
SERVER_STOP_S = 40
DATA = ("--external_plugins", str(HERE / "plugin.py"), "--dataset", "countdown_mini")
FLAGS = (
    *("--reward_funcs", "countdown", "format", "--reward_weights", "1", "0.1"),
    *("--num_generations", str(GROUP), "--max_completion_length", "160", "--torch_dtype", "float32"),
    *("--learning_rate", "3e-4", "--adam_beta2", "0.999", "--weight_decay", "0"),
    *("--lr_scheduler_type", "constant_with_warmup"),
    *("--gradient_checkpointing", "false", "--eval_on_start", "true", "--eval_limit", "128"),
    *("--num_generations_eval", "4", "--per_device_eval_batch_size", "512", "--num_train_epochs", "100"),
    *("--logging_steps", "1", "--save_steps", "1000", "--report_to", "none"),
)
OF_GRPO = ("--rlhf_type", "grpo", "--warmup_ratio", "0.05")
OF_PPO = (
    *("--rlhf_type", "ppo", "--warmup_steps", "10", "--num_mini_batches", str(PPO_STEPS_A_ROUND)),
    *("--lam", "1", "--critic_learning_rate", "1e-3"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description="A model made from scratch learns Countdown by GRPO or PPO.")
    parser.add_argument("--seed", type=int, default=0, help="of the model, the warm start and the run [0]")
    parser.add_argument("--output_dir", type=Path, default=Path("output/countdown_demo"))
    parser.add_argument("--server", action="store_true", help="rollouts from vLLM over HTTP, ZeRO-3 on two processes")
    parser.add_argument("--algorithm", choices=("grpo", "ppo"), default="grpo", help="[grpo]")
    parser.add_argument("--warm_start", type=Path, help="folder of a model that has been warm-started, to compare on")
    parser.add_argument(
        "--steps", type=int, help=f"optimizer steps [{STEPS} of GRPO, {PPO_STEPS_A_ROUND} x {STEPS} of PPO]"
    )
    parser.add_argument("--warm_start_steps", type=int, help="of the supervised phase [its default]")
    args = parser.parse_args()
    console = Console()
    folder = args.output_dir / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    model = args.warm_start or folder / "warm_start"
    added = trainer_environment(os.environ, World(), offline=True, cpus=usable_cpus(), gpu=has_gpu(os.environ))
    environment = {**os.environ, **added}

    if args.warm_start is None:
        console.print("[bold]1. Warm start[/bold]: a new model learns the format, and a little arithmetic")
        words = [sys.executable, str(HERE / "warm_start.py"), "--output_dir", str(model), "--seed", str(args.seed)]
        words += ["--steps", str(args.warm_start_steps)] if args.warm_start_steps else []
        if code := subprocess.run(words, env=environment, check=False).returncode:
            return code

    ppo, name = args.algorithm == "ppo", args.algorithm.upper()
    console.print(f"\n[bold]2. {name}[/bold]: swift rlhf, with rewards for right answers and for the format")
    steps_a_round = PPO_STEPS_A_ROUND if ppo else 1
    steps = args.steps or (SERVER_STEPS if args.server else STEPS) * steps_a_round
    flags = [
        *DATA,
        *FLAGS,
        *(OF_PPO if ppo else OF_GRPO),
        "--model",
        str(model),
        "--output_dir",
        str(folder),
        "--seed",
        str(args.seed),
    ]
    flags += ["--max_steps", str(steps), "--eval_steps", str(max(1, steps // 5))]
    before = set(folder.iterdir())
    if args.server:
        code = train_with_server(flags, model, folder, console, 4 // steps_a_round)
    else:
        flags += ["--per_device_train_batch_size", str(COMPLETIONS // 16)]
        flags += ["--gradient_accumulation_steps", str(16 // steps_a_round)]
        code = subprocess.run([*SWIFT, "rlhf", *flags], check=False).returncode
    if code:
        return code
    (run,) = (path for path in folder.iterdir() if path not in before and path.is_dir())

    console.print("\n[bold]3. What changed[/bold]")
    show(run, model, console, name)
    return 0


def train_with_server(flags: Sequence[str], model: Path, folder: Path, console: Console, accumulation: int) -> int:
    """`swift rollout` beside `swift rlhf` on two ZeRO-3 processes; returns the trainer's exit code."""
    port = free_port()
    with rollout_server(model, port, folder / "server.log"):
        console.print(f"swift rollout serves on port {port}; its log: {folder / 'server.log'}")
        words = [*SWIFT, "rlhf", *flags, "--deepspeed", "zero3", "--use_vllm", "true", "--vllm_mode", "server"]
        words += ["--vllm_server_host", "127.0.0.1", "--vllm_server_port", str(port)]
        words += ["--per_device_train_batch_size", str(COMPLETIONS // 8)]
        words += ["--gradient_accumulation_steps", str(accumulation)]
        return subprocess.run(words, env=os.environ | {"NPROC_PER_NODE": "2"}, check=False).returncode


@contextlib.contextmanager
def rollout_server(model: Path, port: int, log: Path) -> Iterator[None]:
    words = [*SWIFT, "rollout", "--model", str(model), "--port", str(port), "--torch_dtype", "float32"]
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(SERVER_STOP_S)
            except subprocess.TimeoutExpired:
                print(f"swift rollout did not end within {SERVER_STOP_S} s of SIGTERM: killed", file=sys.stderr)
                process.kill()
                process.wait()


def show(run: Path, model: Path, console: Console, name: str) -> None:
    """The before/after table, an example completion of each, and where to look further."""
    summary = json.loads((run / "summary.json").read_text())
    warm_start = json.loads((model / "warm_start.json").read_text())
    log = [json.loads(line) for line in (run / "logging.jsonl").read_text().splitlines()]
    evaluations = [line for line in log if "eval/countdown_mini/accuracy" in line]
    first, last = evaluations[0], evaluations[-1]
    table = Table(
        title=f"{summary['steps']} {name} steps in {summary['seconds']:.0f} s, after a warm start of "
        f"{warm_start['seconds']:.0f} s",
        title_justify="left",
    )
    for column in ("on 128 held-out problems, temperature 1", "before", "after"):
        table.add_column(column, justify="left" if column.startswith("on") else "right")
    for name, label, form in (
        ("accuracy", "accuracy", "{:.3f}"),
        ("rewards/format/mean", "well-formed completions", "{:.3f}"),
        ("completions/mean_length", "tokens a completion", "{:.1f}"),
        ("completions", "completions", "{:.0f}"),
    ):
        key = f"eval/countdown_mini/{name}"
        table.add_row(label, form.format(first[key]), form.format(last[key]))
    console.print(table)
    example = improved_example(run / "eval_completions.jsonl", first["step"], last["step"])
    if example:
        for label, row in zip(("before", "after"), example, strict=True):
            text = f"{label} (reward {row['reward']:.1f})  {row['prompt'].strip()}  {row['completion']}"
            console.print(Text(text), soft_wrap=True)
    console.print(
        f"run folder: {run}\ncurves:     {run / 'images' / 'eval.png'}, {run / 'images' / 'reward.png'}\n"
        f"all of it:  swift view {shlex.quote(str(run))}",
        soft_wrap=True,
    )


def improved_example(path: Path, first: int, last: int) -> tuple[dict, dict] | None:
    """Completions of the same problem, wrong before and right after; None where there is no such problem."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    wrong = {row["prompt_id"]: row for row in rows if row["step"] == first and row["rewards/countdown"] < 1}
    for row in rows:
        if row["step"] == last and row["rewards/countdown"] >= 1 and row["prompt_id"] in wrong:
            return wrong[row["prompt_id"]], row
    return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
