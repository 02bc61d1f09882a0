"""Times the training part of one GRPO step, ours and TRL's, on the same completions, alternating in one run.

    python benchmarks/train_step.py                       # SmolLM2-135M: 4 prompts of 79 tokens x 8, 128 new tokens
    python benchmarks/train_step.py --sides ours ours-padded --prompt_tokens 512 --prompts 1
    python benchmarks/train_step.py --sides ours trl --generate
    python benchmarks/train_step.py --sides ours --prompts 4 8 16      # growth: a table each

Sides: `ours` (as `swift rlhf` comes), `trl` (as it comes), `trl-tuned` (with the environment that `swift` sets:
allocator, threads), both with `-kept` (activations are kept, not computed again); and ours with one measure less:
`ours-untuned` (that environment), `ours-unblocked` (RMSNorm and the MLP's product as transformers has them),
`ours-flash` (torch's flash attention on a CPU in bf16 too),
`ours-packed` (a prompt for each completion), `ours-padded` (that, and a row for each), `ours-whole-logits` (the head in
one piece), `ours-old-forward` (a forward pass for the old log-probs). TRL gets a virtual environment of its own from
benchmarks/requirements-trl.txt. Each side runs in a process of its own.

`MFU`: 6 x parameters x (completion tokens + tokens of each prompt once) per second, over the rate of a plain matrix
product of the same dtype on the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from step_work import Work

from swift_r1.flags.world import World
from swift_r1.launch.checks.model_folder import config_dtype, dtype_here
from swift_r1.launch.environment import has_gpu, trainer_environment, usable_cpus

HERE = Path(__file__).resolve().parent
PARTS = ("forward", "backward", "optimizer", "train")
LIMIT_S = 1800
LESS = ("untuned", "unblocked", "flash", "packed", "padded", "whole-logits", "old-forward")
SIDES = (
    "ours",
    *(f"ours-{less}" for less in LESS),
    "trl",
    "trl-tuned",
    "trl-kept",
    "trl-tuned-kept",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="models/smollm2-135m", help="`make smollm2` builds it")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["ours", "trl", "trl-tuned"])
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of all sides [what `swift rlhf` takes here]",
    )
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[4], help="one table for each number"
    )
    parser.add_argument("--prompt_tokens", type=int, default=79)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--new_tokens", type=int, default=128)
    parser.add_argument(
        "--ragged",
        action="store_true",
        help="lengths from a quarter of --new_tokens up to all of it",
    )
    parser.add_argument("--micro", type=int, default=8, help="completions a micro-batch")
    parser.add_argument(
        "--max_tokens", type=int, help="ours: token budget of a micro-batch [that of --micro]"
    )
    parser.add_argument(
        "--checkpointing", action="store_true", help="ours: gradient checkpointing (TRL has it on)"
    )
    parser.add_argument(
        "--steps", type=int, default=3, help="optimizer steps a process; the first is a warm-up"
    )
    parser.add_argument(
        "--repeats", type=int, default=2, help="processes of each side, alternating"
    )
    parser.add_argument("--generate", action="store_true", help="time generation too")
    parser.add_argument("--trl_venv", type=Path, default=HERE / ".venv-trl")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: give 2 or more, since the first is a warm-up")
    here, _ = dtype_here(args.model, args.dtype, has_gpu(os.environ))
    args.dtype = here or config_dtype(args.model) or "bfloat16"
    console = Console(width=120)
    if any(side.startswith("trl") for side in args.sides):
        install_trl(args.trl_venv, console)
    machine = {"machine": platform.processor() or platform.machine(), "cpus": len(usable_cpus())}
    tables = {}
    for prompts in args.prompts:
        work = make_work(args, prompts)
        results = measure(args, work, console)
        console.print(table(results, work))
        tables[prompts] = results
    if args.out:
        args.out.write_text(json.dumps(machine | {"results": tables}, indent=1) + "\n")
    return 0


def make_work(args: argparse.Namespace, prompts: int) -> Work:
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1000, 40000) for _ in range(count)]

    return Work(
        model=args.model,
        dtype=args.dtype,
        prompt_ids=[tokens(args.prompt_tokens) for _ in range(prompts)],
        completion_ids=[
            tokens(
                rng.randint(args.new_tokens // 4, args.new_tokens)
                if args.ragged
                else args.new_tokens
            )
            for _ in range(prompts * args.generations)
        ],
        generations=args.generations,
        new_tokens=args.new_tokens,
        micro=args.micro,
        max_tokens=args.max_tokens,
        steps=args.steps,
        generate=args.generate,
        checkpointing=args.checkpointing,
    )


def measure(args: argparse.Namespace, work: Work, console: Console) -> dict[str, list[dict]]:
    """Each side's runs, alternating."""
    results: dict[str, list[dict]] = {side: [] for side in args.sides}
    with tempfile.TemporaryDirectory() as folder:
        work.write(Path(folder, "work.json"))
        for repeat in range(args.repeats):
            for side in args.sides:
                console.print(f"run {repeat + 1} of {args.repeats}: {side}")
                results[side].append(run_side(side, Path(folder, "work.json"), args.trl_venv))
    return results


def install_trl(venv: Path, console: Console) -> None:
    if (venv / "installed").exists():
        return
    console.print(f"installing TRL into {venv} (a few minutes)")
    pip = [
        str(venv / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
    ]
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    # alone: a range would bring CUDA's packages
    subprocess.run([*pip, "torch==2.13.0"], check=True)
    subprocess.run([*pip, "-r", str(HERE / "requirements-trl.txt")], check=True)
    (venv / "installed").touch()


def run_side(side: str, work: Path, trl_venv: Path) -> dict:
    """Raises RuntimeError with the process's last words if it fails."""
    peer = side.startswith("trl")
    python = trl_venv / "bin" / "python" if peer else sys.executable
    environment = dict(os.environ)
    if side.startswith("trl-tuned") or (not peer and "untuned" not in side):
        world, gpu = World(), has_gpu(os.environ)
        environment |= trainer_environment(
            os.environ, world, offline=True, cpus=usable_cpus(), gpu=gpu
        )
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(HERE.parent) if not peer else ""}
    words = [str(python), str(HERE / ("step_trl.py" if peer else "step_ours.py")), side, str(work)]
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(f"{side} failed:\n{done.stderr[-3000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def table(results: dict[str, list[dict]], work: Work) -> Table:
    """Medians over all steps but each process's first; ratios to the first side."""
    shown = Table(
        title=f"one optimizer step on {len(work.completion_ids)} completions, {work.dtype}, seconds (medians)"
    )
    for column in ("side", *PARTS, "ratio", "tokens/s", "MFU", "peak GB", "generate"):
        shown.add_column(column, justify="left" if column == "side" else "right")
    tokens = sum(map(len, work.completion_ids)) + work.generations * sum(map(len, work.prompt_ids))
    needed = sum(map(len, work.completion_ids)) + sum(map(len, work.prompt_ids))
    first = None
    for side, runs in results.items():
        steps = [step for run in runs for step in run["steps"][1:]]
        medians = {part: statistics.median(step[part] for step in steps) for part in PARTS}
        first = first or medians["train"]
        generated = [run["generate"] for run in runs if run["generate"] is not None]
        shown.add_row(
            side,
            *(f"{medians[part]:.2f}" for part in PARTS),
            f"{medians['train'] / first:.2f}",
            f"{tokens / medians['train']:.0f}",
            f"{6 * runs[0]['parameters'] * needed / medians['train'] / max(r['matmul_rate'] for r in runs):.2f}",
            f"{max(run['peak'] for run in runs) / 1e9:.2f}",
            f"{statistics.median(generated):.2f}" if generated else "",
        )
    return shown


if __name__ == "__main__":
    sys.exit(main())
