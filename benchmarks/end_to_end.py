"""Whole training steps of ours, TRL and ms-swift on the same work: tokens a second, seconds by part, memory.

    python benchmarks/end_to_end.py --check                        # everything, about 20 minutes on two cores
    python benchmarks/end_to_end.py --sides ours-embedded ours-colocated --dtypes float32 --repeats 3
    NPROC_PER_NODE=2 python benchmarks/end_to_end.py --sides ours-embedded ours-colocated --ours "--deepspeed zero2"

A step: 4 prompts x 8 completions of at most 128 tokens at temperature 1, a rule as the reward, one AdamW step, in
micro-batches of 8 completions. Every side reads the same rows in the same order, in processes of its own.

Sides: `ours-embedded` (`--use_vllm false`), `ours-colocated` (`--vllm_mode colocate`), both keeping their activations
(`--gradient_checkpointing false`); `trl` and `ms-swift` with their defaults, which are gradient checkpointing and the
system's allocator; `trl-tuned` and `ms-swift-tuned` with kept activations and the environment that `swift` sets
(allocator, threads). Flags that make the work the same are in `OURS`, `TRL` and `MS_SWIFT`.

A dtype whose first step takes twice as long as the side's other one is not run further: its rate is that of the first
step. Rates are of completion tokens per second of wall-clock time: `steady` without the first step (a warm-up), `from
start` with the start and the first step. `first after` is from the command to the end of the first step; `other` is
what is left of a step beside its parts. Memory is the peak of the sum over a side's processes of their proportional
share (PSS), looked at every two seconds. `--check` ends with 1 unless the better side of ours does 6 times the tokens
of `trl` and 5 times those of `ms-swift` in steady state, each in its better dtype. The machine must be quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from train_step import install_trl

from swift_r1.arguments.world import World
from swift_r1.launch.environment import has_gpu, trainer_environment, usable_cpus

HERE = Path(__file__).resolve().parent
SIDES = ("ours-embedded", "ours-colocated", "trl", "trl-tuned", "ms-swift", "ms-swift-tuned")
DTYPES = ("float32", "bfloat16")
GOALS = {"trl": 6.0, "ms-swift": 5.0}
SIDE_S, LOOK_S, END_S = 1800, 2.0, 30
GENERATIONS, MICRO = 8, 8
PARTS = ("generate", "train", "weights")
SPANS = {"generate": "generate", "reward": "generate", "train": "train", "sync": "weights"}
"""Of ours, and what part they are of."""
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

SHARED = {
    "num_generations": GENERATIONS,
    "per_device_train_batch_size": MICRO,
    "learning_rate": 1e-6,
    "temperature": 1.0,
    "logging_steps": 1,
    "report_to": "none",
}
OURS = {
    "rlhf_type": "grpo",
    "external_plugins": HERE / "async_plugin.py",
    "reward_funcs": "digits",
    "dataset_shuffle": "false",
    "gradient_checkpointing": "false",
    "save_steps": 10**6,
    "save_only_model": "true",
    "add_version": "false",
    "max_length": 128,
}
TRL = {
    "save_strategy": "no",
    "disable_tqdm": True,
    "shuffle_dataset": False,
}
MS_SWIFT = {
    "rlhf_type": "grpo",
    "external_plugins": HERE / "end_to_end_peer.py",
    "reward_funcs": "digits",
    "callbacks": "step_clock",
    "model_type": "llama",
    "template": "chatml",
    "tuner_type": "full",
    "use_vllm": "false",
    "top_p": 1.0,
    "top_k": 0,
    "beta": 0.0,
    "dataset_shuffle": "false",
    "train_dataloader_shuffle": "false",
    "split_dataset_ratio": 0,
    "save_strategy": "no",
    "add_version": "false",
    "max_length": 128,
}


@dataclass
class Result:
    """A run of one side in one dtype. `steps` have `seconds`, `generate`, `train`, `weights` (seconds) and `tokens`."""

    side: str
    dtype: str
    first: float
    peak: int
    steps: list[dict[str, float]] = field(default_factory=list)

    def mean(self, name: str) -> float:
        """Of the steps after the warm-up; of that where there is no other."""
        return statistics.fmean(step[name] for step in self.steps[1:] or self.steps)

    @property
    def steady(self) -> float:
        return self.mean("tokens") / self.mean("seconds")

    @property
    def from_start(self) -> float:
        later = sum(step["seconds"] for step in self.steps[1:])
        return sum(step["tokens"] for step in self.steps) / (self.first + later)


def words_of(flags: dict[str, object]) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def command(side: str, dtype: str, args: argparse.Namespace, folder: Path, steps: int) -> list[str]:
    gpu = has_gpu(os.environ)
    flags: dict[str, Any] = SHARED | {
        "model": args.model,
        "dataset": folder / "rows.jsonl",
        "output_dir": folder / "run",
        "max_steps": steps,
        "max_completion_length": args.new_tokens,
        "gradient_accumulation_steps": args.prompts * GENERATIONS // MICRO,
    }
    if side.startswith("ours"):
        flags["gradient_accumulation_steps"] //= World.from_environment(os.environ)[0].size
    kept = side.endswith("-tuned")
    if side.startswith("trl"):
        flags |= TRL | {"dataset": str(folder / "rows.jsonl"), "output_dir": str(folder / "run"), "use_cpu": not gpu}
        flags |= {"bf16": dtype == "bfloat16", "model_init_kwargs": {"dtype": dtype}}
        if kept:
            flags["gradient_checkpointing"] = False
        (folder / "flags.json").write_text(json.dumps(flags))
        return [str(args.trl_venv / "bin/python"), str(HERE / "end_to_end_peer.py"), str(folder / "flags.json")]
    flags["torch_dtype"] = dtype
    if side.startswith("ms-swift"):
        flags |= MS_SWIFT | {"use_cpu": str(not gpu).lower()} | ({"gradient_checkpointing": "false"} if kept else {})
        return [str(args.ms_swift_venv / "bin/python"), "-m", "swift.cli.main", "rlhf", *words_of(flags)]
    colocated = {"use_vllm": "true", "vllm_mode": "colocate"} if side == "ours-colocated" else {"use_vllm": "false"}
    return [sys.executable, "-m", "swift_r1", "rlhf", *words_of(flags | OURS | colocated), *args.ours.split()]


def environment(side: str, folder: Path) -> dict[str, str]:
    """Ours sets what it needs itself."""
    environ = dict(os.environ) | {"HF_HUB_OFFLINE": "1", "END_TO_END_STEPS": str(folder / "steps.jsonl")}
    if side.startswith("ours"):
        return environ | {"PYTHONPATH": str(HERE.parent)}
    for name in ("PYTHONPATH", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "LD_PRELOAD"):
        environ.pop(name, None)
    if side.endswith("-tuned"):
        environ |= trainer_environment(environ, World(), offline=True, cpus=usable_cpus(), gpu=has_gpu(os.environ))
    return environ


def run_side(side: str, dtype: str, args: argparse.Namespace, steps: int, slowest_first: float) -> Result:
    """Stops after the first step if that took longer than `slowest_first`. Raises SystemExit: it failed, or is over its
    deadline."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", args.prompts * steps)
        log = folder / "log"
        began = time.time()
        with log.open("wb") as out:
            process = psutil.Popen(
                command(side, dtype, args, folder, steps),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment(side, folder),
                cwd=HERE.parent,
            )
        result = Result(side, dtype, 0.0, 0)
        try:
            while len(result.steps) < steps:
                over = process.poll() is not None
                result.peak = max(result.peak, memory(process))
                result.steps = steps_of(side, folder, args.prompts * GENERATIONS)
                if result.steps:
                    result.first = result.steps[0]["ended"] - began
                    if result.steps[0]["seconds"] > slowest_first:
                        break
                if len(result.steps) < steps and (over or time.time() - began > SIDE_S):
                    shutil.copy(log, kept := Path(tempfile.gettempdir(), f"end_to_end-{side}.log"))
                    raise SystemExit(f"{side} ended with {process.poll()} after {len(result.steps)} steps: {kept}")
                time.sleep(LOOK_S)
        finally:
            end(process)
        if args.keep:
            shutil.copytree(folder, args.keep / f"{side}-{dtype}", dirs_exist_ok=True)
    return result


def write_rows(path: Path, count: int) -> None:
    """A conversation a line, each about other numbers; as in `async_plugin.py`."""
    with path.open("w") as rows:
        for number in random.Random(0).sample(range(2000), count):
            asked = f"Count from {number} to {number + 40}."
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]
            rows.write(json.dumps({"messages": messages}) + "\n")


def memory(process: psutil.Process) -> int:
    """Bytes of the process and all that it has started, pages shared by several counted once."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        for one in [process, *process.children(recursive=True)]:
            # psutil would read a line a mapping; a process may end meanwhile.
            with suppress(OSError), open(f"/proc/{one.pid}/smaps_rollup") as lines:
                total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) << 10
    return total


def end(process: psutil.Process) -> None:
    """Ends it with whatever it has started."""
    family = [process]
    with suppress(psutil.NoSuchProcess):
        family += process.children(recursive=True)
    for one in family:
        with suppress(psutil.NoSuchProcess):
            one.terminate()
    for one in psutil.wait_procs(family, END_S)[1]:
        with suppress(psutil.NoSuchProcess):
            one.kill()


def steps_of(side: str, folder: Path, completions: int) -> list[dict[str, float]]:
    """Its steps so far. A step goes from the end of the one before to its own: what lies between them is work too."""
    steps: list[dict[str, float]] = []
    for line in ours_steps(folder / "run") if side.startswith("ours") else read_lines(folder / "steps.jsonl"):
        parts = {part: line.get(part, 0.0) for part in PARTS}
        if "generated" in line:
            parts |= {"generate": line["generated"] - line["began"], "train": line["ended"] - line["generated"]}
        seconds = line["ended"] - (steps[-1]["ended"] if steps else line["began"])
        steps.append(parts | {"seconds": seconds, "tokens": completions * line["length"], "ended": line["ended"]})
    return steps


def ours_steps(run: Path) -> Iterator[dict[str, float]]:
    """When the steps that are logged began and ended, by their spans, and their parts."""
    spans = [span for span in read_lines(run / "spans/rank-0.jsonl") if span["name"] in SPANS]
    for line in read_lines(run / "logging.jsonl"):
        if "loss" in line:
            own = [span for span in spans if span["step"] == line["step"]]
            step = {"began": own[0]["start"], "ended": own[-1]["end"], "length": line["completions/mean_length"]}
            for span in own:
                step[SPANS[span["name"]]] = step.get(SPANS[span["name"]], 0.0) + span["end"] - span["start"]
            yield step


def read_lines(path: Path) -> list[dict]:
    """Whole lines of JSON; none where the file is not there yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def measure(args: argparse.Namespace, console: Console) -> list[Result]:
    """All sides, alternating; the best dtype of a side so far bounds the others' first step."""
    results: list[Result] = []
    for repeat in range(args.repeats):
        for dtype in args.dtypes:
            for side in args.sides:
                others = [one.steps[0]["seconds"] for one in results if one.side == side]
                console.print(f"run {repeat + 1} of {args.repeats}: {side} {dtype}")
                results.append(run_side(side, dtype, args, args.steps, 2 * min(others, default=SIDE_S)))
    return results


def table(results: list[Result], args: argparse.Namespace) -> Table:
    shown = Table(
        title=f"{args.prompts} x {GENERATIONS} completions of at most {args.new_tokens} tokens, seconds a step"
    )
    columns = ("side", "dtype", "first after", "generate", "train", "weights", "other", "step", "length")
    for column in (*columns, "steady tok/s", "from start", "peak GB"):
        shown.add_column(column, justify="left" if column in ("side", "dtype") else "right")
    for one in results:
        parts = [one.mean(part) for part in PARTS]
        seconds = one.mean("seconds")
        shown.add_row(
            one.side,
            one.dtype + ("" if one.steps[1:] else " (first step)"),
            f"{one.first:.1f}",
            *(f"{value:.2f}" for value in (*parts, seconds - sum(parts), seconds)),
            f"{one.mean('tokens') / args.prompts / GENERATIONS:.0f}",
            f"{one.steady:.0f}",
            f"{one.from_start:.0f}",
            f"{one.peak / 1e9:.1f}",
        )
    return shown


def ratios(results: list[Result]) -> dict[str, float]:
    """Steady tokens a second of the better side of ours over each peer's, each in its best dtype (medians of runs)."""
    rates: dict[str, float] = {}
    for side, dtype in {(one.side, one.dtype) for one in results}:
        rate = statistics.median(one.steady for one in results if (one.side, one.dtype) == (side, dtype))
        rates[side] = max(rate, rates.get(side, 0.0))
    ours = max((rate for side, rate in rates.items() if side.startswith("ours")), default=0.0)
    return {side: ours / rate for side, rate in rates.items() if ours and not side.startswith("ours")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2-135m", help="`make smollm2` builds it")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES[:-1])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--prompts", type=int, default=4, help="a step")
    parser.add_argument("--new_tokens", type=int, default=128, help="at most, a completion")
    parser.add_argument("--steps", type=int, default=3, help="a run; the first is a warm-up")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each side and dtype, alternating")
    parser.add_argument("--ours", default="", help="more flags for `swift rlhf`, one word")
    parser.add_argument("--trl_venv", type=Path, default=HERE / ".venv-trl", help="is made where it is not there")
    parser.add_argument(
        "--ms_swift_venv", type=Path, default=HERE.parent / ".venv-ms-swift", help="`make test-ms-swift`"
    )
    parser.add_argument("--keep", type=Path, help="folder for what the runs write")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--check", action="store_true", help="end with 1 below 6 x TRL or 5 x ms-swift")
    args = parser.parse_args()
    console = Console(width=150)
    args.model = str(Path(args.model).resolve())
    if any(side.startswith("trl") for side in args.sides):
        install_trl(args.trl_venv, console)
    results = measure(args, console)
    console.print(table(results, args))
    found = ratios(results)
    for side, ratio in sorted(found.items()):
        console.print(f"ours / {side}: {ratio:.2f}" + (f" (wanted: {GOALS[side]:g})" if side in GOALS else ""))
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n")
    return int(args.check and any(found.get(side, 0.0) < goal for side, goal in GOALS.items()))


if __name__ == "__main__":
    sys.exit(main())
