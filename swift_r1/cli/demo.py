"""`swift demo`: a model made from scratch learns Countdown by GRPO or PPO.

It makes and warm-starts the model, runs the same `swift rlhf` as everyone (with `--server` through `swift rollout` and
ZeRO-3 on two processes), and shows what changed, read from the files that the run left.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from swift_r1.cli.files import naming
from swift_r1.errors import EXIT_OK
from swift_r1.flags.fields import as_words, flag
from swift_r1.flags.parser import Command, parse_arguments
from swift_r1.record.metrics import read_json_lines
from swift_r1.runtime.hardware import free_ports
from swift_r1.runtime.processes import handlers_kept, module_words
from swift_r1.runtime.terminal import Terminal
from swift_r1.workers.process import SupervisedProcess

_USAGE = """swift demo [--seed N] [--algorithm ppo] [--server]

A model of 0.6 M parameters, made from scratch, learns Countdown (reach a number with the given ones): a warm start
teaches it the format, then it trains with GRPO or PPO, and the end shows what changed. A few minutes on two cores;
nothing is downloaded."""
_EXAMPLES = """
swift demo
swift demo --seed 1 --algorithm ppo
swift demo --server
"""


@dataclass(frozen=True, kw_only=True)
class DemoArguments(Command):
    """Demo."""

    command: ClassVar[str] = "demo"
    seed: int = flag(0, "of the model, the warm start and the run", at_least=0)
    output_dir: str = flag(
        "output/countdown_demo", "a folder with the time as its name is made in it"
    )
    server: bool = flag(False, "rollouts from vLLM over HTTP, ZeRO-3 on two processes")
    algorithm: str = flag("grpo", "what trains", choices=("grpo", "ppo"))
    warm_start: str | None = flag(
        None, "folder of a model that has been warm-started, to compare on"
    )
    steps: int | None = flag(None, "optimizer steps (default: 24 of GRPO, 48 of PPO)", at_least=1)
    warm_start_steps: int | None = flag(
        None, "steps of the supervised phase (default: 1,440)", at_least=1
    )


HELP = (_USAGE, DemoArguments, _EXAMPLES)
FILES = (Path(__file__).parent / "bundled/examples/countdown_demo").resolve()
SWIFT = (sys.executable, *module_words("swift_r1"))
STEPS = 24
PPO_STEPS_A_ROUND = 2
COMPLETIONS = 512
GROUP = 16
SERVER_STOP_S = 40
PLUGIN = ("--external_plugins", str(FILES / "plugin.py"))
# Without the last reward searches grow until many are cut off: it pays to try one more candidate.
FLAGS = f"""
    --dataset countdown_mini --reward_funcs countdown format soft_overlong --reward_weights 1 0.5 1
    --soft_max_length 130 --soft_cache_length 50
    --num_generations {GROUP} --max_completion_length 160 --torch_dtype float32
    --learning_rate 3e-4 --adam_beta2 0.999 --weight_decay 0 --lr_scheduler_type constant_with_warmup
    --gradient_checkpointing false --num_train_epochs 100
    --eval_on_start true --eval_limit 128 --num_generations_eval 4 --per_device_eval_batch_size 512
    --logging_steps 1 --save_steps 1000 --report_to none
""".split()
# Smaller steps than the file's: the arithmetic and the verdicts of later candidates need them.
OF_WARM_START = ["--gradient_accumulation_steps", "2", "--learning_rate", "3e-3"]
OF_GRPO = ["--rlhf_type", "grpo", "--warmup_ratio", "0.05"]
OF_PPO = f"""
    --rlhf_type ppo --warmup_steps 10 --num_mini_batches {PPO_STEPS_A_ROUND} --lam 1 --critic_learning_rate 1e-3
""".split()


def run(words: Sequence[str]) -> int:
    """Runs the command; its exit code is that of the first part that fails. Raises UsageError: bad flags, or the
    output folder cannot be written."""
    args = parse_arguments(DemoArguments, words)
    console = Terminal()
    folder = Path(args.output_dir) / time.strftime("%Y%m%d-%H%M%S")
    with naming(f"{folder} cannot be made"):
        folder.mkdir(parents=True)
    model = Path(args.warm_start or folder / "warm_start" / "last")
    if args.warm_start is None:
        console.print(
            "1. Warm start: swift sft, on searches from which a new model learns the format, and a little "
            "arithmetic"
        )
        code = make_warm_start(folder, args.seed, args.warm_start_steps)
        if code:
            return code

    ppo = args.algorithm == "ppo"
    name = args.algorithm.upper()
    console.print(
        f"\n2. {name}: swift rlhf, with rewards for right answers and the format, and less for long ones"
    )
    steps_a_round = PPO_STEPS_A_ROUND if ppo else 1
    steps = args.steps or STEPS * steps_a_round
    own = {
        "model": str(model),
        "output_dir": str(folder),
        "seed": args.seed,
        "max_steps": steps,
        "eval_steps": eval_every(steps, steps_a_round),
    }
    flags = [*PLUGIN, *FLAGS, *(OF_PPO if ppo else OF_GRPO), *as_words(own)]
    before = set(folder.iterdir())
    if args.server:
        code = train_with_server(flags, model, folder, console, 4 // steps_a_round)
    else:
        flags += ["--per_device_train_batch_size", str(COMPLETIONS // 16)]
        flags += ["--gradient_accumulation_steps", str(16 // steps_a_round)]
        code = finished([*SWIFT, "rlhf", *flags])
    if code:
        return code
    (made,) = (path for path in folder.iterdir() if path not in before and path.is_dir())

    console.print("\n3. What changed")
    show(made, model, console, name)
    return EXIT_OK


def make_warm_start(folder: Path, seed: int, steps: int | None) -> int:
    """Makes a model with random weights and teaches it with `swift sft`, `last` in `folder`/warm_start; returns the
    exit code."""
    random = folder / "random"
    made = {"output_dir": str(random), "seed": seed}
    words = [sys.executable, str(FILES / "tiny_model.py"), *as_words(made)]
    # transformers imports DeepSpeed, which would say that it looks for a GPU
    code = finished(words, os.environ | {"DS_ACCELERATOR": "cpu"})
    if code:
        return code
    own = {
        "model": str(random),
        "seed": seed,
        "output_dir": str(folder / "warm_start"),
        "max_steps": steps,
        "add_version": False,
        "create_checkpoint_symlink": True,
    }
    flags = [*PLUGIN, "--dataset", "countdown_traces", *OF_WARM_START, *as_words(own)]
    return finished([*SWIFT, "sft", str(FILES / "warm_start.yaml"), *flags])


def finished(words: Sequence[str], environ: Mapping[str, str] | None = None) -> int:
    """Runs a part of the demo, which gets each Ctrl-C and SIGTERM from this process; returns its exit code."""
    process = SupervisedProcess(words, environ, ends_with_parent=True)
    with handlers_kept(signal.SIGINT, signal.SIGTERM):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda received, _frame: process.send_signal(received))
        code = process.wait()
    return code if code >= 0 else 128 - code


def eval_every(steps: int, steps_a_round: int) -> int:
    """Returns the steps between evaluations: a quarter of the run, but not fewer than in the demo itself, since an
    evaluation takes about as long as a round."""
    return max(steps, STEPS * steps_a_round) // 4


def train_with_server(
    flags: Sequence[str], model: Path, folder: Path, console: Console, accumulation: int
) -> int:
    """Runs `swift rollout` beside `swift rlhf` on two ZeRO-3 processes; returns the trainer's exit code."""
    (port,) = free_ports(1, "127.0.0.1")
    with rollout_server(model, port, folder / "server.log"):
        console.print(f"swift rollout serves on port {port}; its log: {folder / 'server.log'}")
        own = {
            "deepspeed": "zero3",
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_server_host": "127.0.0.1",
            "vllm_server_port": port,
            "per_device_train_batch_size": COMPLETIONS // 8,
            "gradient_accumulation_steps": accumulation,
        }
        words = [*SWIFT, "rlhf", *flags, *as_words(own)]
        return finished(words, os.environ | {"NPROC_PER_NODE": "2"})


@contextlib.contextmanager
def rollout_server(model: Path, port: int, log: Path) -> Iterator[None]:
    words = [
        *SWIFT,
        "rollout",
        *as_words({"model": str(model), "port": port, "torch_dtype": "float32"}),
    ]
    process = SupervisedProcess(words, log=log, ends_with_parent=True)
    try:
        yield
    finally:
        if not process.end(SERVER_STOP_S):
            print(
                f"swift rollout did not end within {SERVER_STOP_S} s of SIGTERM: killed",
                file=sys.stderr,
            )


def show(run: Path, model: Path, console: Console, name: str) -> None:
    """Prints the before/after table, an example completion of each, and where to look further."""
    summary = json.loads((run / "summary.json").read_text())
    log = read_json_lines(run / "logging.jsonl")
    evaluations = [line for line in log if "eval/countdown_mini/accuracy" in line]
    first = evaluations[0]
    last = evaluations[-1]
    seconds = f"{summary['seconds']:.0f} s"
    warm_start = model.parent / "summary.json"  # none beside a model that was not made by swift sft
    if warm_start.is_file():
        seconds += f", after a warm start of {json.loads(warm_start.read_text())['seconds']:.0f} s"
    table = Table(title=f"{summary['steps']} {name} steps in {seconds}", title_justify="left")
    table.add_column("on 128 held-out problems, temperature 1")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    for name, label, digits in (
        ("accuracy", "accuracy", 3),
        ("rewards/format/mean", "well-formed completions", 3),
        ("completions/mean_length", "tokens per completion", 1),
        ("completions", "completions", 0),
    ):
        key = f"eval/countdown_mini/{name}"
        table.add_row(label, f"{first[key]:.{digits}f}", f"{last[key]:.{digits}f}")
    console.print(table)
    example = improved_example(run / "eval_completions.jsonl", first["step"], last["step"])
    if example:
        for label, row in zip(("before", "after"), example, strict=True):
            text = f"{label} (reward {row['reward']:.1f})  {row['prompt'].strip()}  {row['completion']}"
            console.print(Text(text), soft_wrap=True)
    console.print(
        f"run folder: {run}\ncurves:     {run / 'images' / 'eval.png'}, {run / 'images' / 'reward.png'}\n"
        f"explore it: swift view {shlex.quote(str(run))}",
        soft_wrap=True,
    )


def improved_example(
    path: Path, first: int, last: int
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Completions of the same problem, wrong before and right after; None where there is no such problem."""
    rows = read_json_lines(path)
    wrong = {
        row["prompt_id"]: row
        for row in rows
        if row["step"] == first and row["rewards/countdown"] < 1
    }
    for row in rows:
        if row["step"] == last and row["rewards/countdown"] >= 1 and row["prompt_id"] in wrong:
            return wrong[row["prompt_id"]], row
    return None
