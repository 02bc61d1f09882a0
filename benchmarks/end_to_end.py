"""Whole training steps of ours, TRL and ms-swift on the same work: tokens a second, seconds by part, memory.

    python benchmarks/end_to_end.py --check                        # everything, about 20 minutes on two cores
    python benchmarks/end_to_end.py --sides ours-embedded ours-colocated --repeats 3
    NPROC_PER_NODE=2 python benchmarks/end_to_end.py --sides ours-embedded ours-colocated --ours "--deepspeed zero2"

A step: 4 prompts x 8 completions of at most 128 tokens at temperature 1, a rule as the reward, one AdamW step, in
micro-batches of 8 completions. Every side reads the same rows, in processes of its own.

Sides: `ours-embedded` (`--use_vllm false`), `ours-colocated` (`--vllm_mode colocate`, compiled as it is in runs of 75
such steps or more), both keeping their activations (`--gradient_checkpointing false`); `trl` and `ms-swift` with their
defaults, which are gradient checkpointing and the system's allocator; `trl-tuned` and `ms-swift-tuned` with kept
activations and the environment that `swift` sets (allocator, threads). Flags that make the work the same are in
`end_to_end_sides.py`.

Ours chooses its dtype by itself. The peers run in each of `--dtypes`; one whose first step has not ended after 1.5
times the time of the other's is ended there, and counts for nothing.

Rates are of completion tokens per second of wall-clock time: `steady` without the first step (a warm-up), `from
start` with the start and the first step. `first after` is from the command to the end of the first step; `other` is
what is left of a step beside its parts. Memory is the peak of the sum over a side's processes of their proportional
share (PSS), looked at every two seconds. `--check` ends with 1 unless the better side of ours does 6 times the tokens
of `trl` and 5 times those of `ms-swift` in steady state, each in its better dtype. The machine must be quiet.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from end_to_end_sides import GENERATIONS, SIDES, command, environment, write_rows
from operations import COLUMNS
from rich.console import Console
from rich.table import Table
from train_step import install_trl

HERE = Path(__file__).resolve().parent
DTYPES = ("float32", "bfloat16")
GOALS = {"trl": 6.0, "ms-swift": 5.0}
SIDE_S, LOOK_S, END_S = 1800, 2.0, 30
PARTS = ("generate", "train", "weights")
SPANS = {"generate": "generate", "reward": "generate", "train": "train", "sync": "weights"}
"""Of ours, and what part they are of."""


@dataclass
class Result:
    """A run of one side in one dtype. `steps` have `seconds`, `generate`, `train`, `weights` (seconds) and `tokens`."""

    side: str
    dtype: str
    first: float
    peak: int
    steps: list[dict[str, float]] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)  # seconds by `operations.COLUMNS`

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


def run_side(side: str, dtype: str, args: argparse.Namespace, limit: float) -> Result:
    """Without steps where the first has not ended after `limit` seconds. Raises SystemExit: it failed, or is over its
    deadline."""
    steps = args.steps
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", args.prompts * steps)
        log = folder / "log"
        began = time.time()
        with log.open("wb") as out:
            process = psutil.Popen(
                command(side, dtype, args, folder),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment(side, folder, args.profile),
                cwd=HERE.parent,
            )
        result = Result(side, dtype, 0.0, 0)
        try:
            while len(result.steps) < steps:
                over, seconds = process.poll() is not None, time.time() - began
                result.peak = max(result.peak, memory(process))
                result.steps = steps_of(side, folder, args.prompts * GENERATIONS)
                result.first = result.steps[0]["ended"] - began if result.steps else seconds
                if result.first > limit:
                    result.steps = []
                    break
                if len(result.steps) < steps and (over or seconds > SIDE_S):
                    shutil.copy(log, kept := Path(tempfile.gettempdir(), f"end_to_end-{side}.log"))
                    raise SystemExit(
                        f"{side} ended with {process.poll()} after {len(result.steps)} steps: {kept}"
                    )
                time.sleep(LOOK_S)
        finally:
            end(process)
        profile = folder / "profile.json"
        if profile.exists():
            result.parts = json.loads(profile.read_text())
        if args.keep:
            shutil.copytree(folder, args.keep / f"{side}-{dtype}", dirs_exist_ok=True)
    return result


def memory(process: psutil.Process) -> int:
    """Bytes of the process and all that it has started, pages shared by several counted once."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        for one in [process, *process.children(recursive=True)]:
            # psutil would read a line a mapping; a process may end meanwhile.
            with suppress(OSError), open(f"/proc/{one.pid}/smaps_rollup") as lines:
                total += (
                    next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) << 10
                )
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
    for line in (
        ours_steps(folder / "run")
        if side.startswith("ours")
        else read_lines(folder / "steps.jsonl")
    ):
        parts = {part: line.get(part, 0.0) for part in PARTS}
        if "generated" in line:
            parts |= {
                "generate": line["generated"] - line["began"],
                "train": line["ended"] - line["generated"],
            }
        seconds = line["ended"] - (steps[-1]["ended"] if steps else line["began"])
        steps.append(
            parts
            | {"seconds": seconds, "tokens": completions * line["length"], "ended": line["ended"]}
        )
    return steps


def ours_steps(run: Path) -> Iterator[dict[str, float]]:
    """When the steps that are logged began and ended, by their spans, and their parts."""
    logged = read_lines(run / "logging.jsonl")  # before the spans, which are written first
    spans = [span for span in read_lines(run / "spans/rank-0.jsonl") if span["name"] in SPANS]
    for line in logged:
        if "loss" in line:
            own = [span for span in spans if span["step"] == line["step"]]
            step = {
                "began": own[0]["start"],
                "ended": own[-1]["end"],
                "length": line["completions/mean_length"],
            }
            for span in own:
                step[SPANS[span["name"]]] = (
                    step.get(SPANS[span["name"]], 0.0) + span["end"] - span["start"]
                )
            yield step


def read_lines(path: Path) -> list[dict]:
    """Whole lines of JSON; none where the file is not there yet."""
    if not path.exists():
        return []
    return [
        json.loads(line)
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def measure(args: argparse.Namespace, console: Console) -> list[Result]:
    """All sides, alternating."""
    results: list[Result] = []
    for repeat in range(args.repeats):
        for dtype in args.dtypes:
            for side in args.sides:
                if side.startswith("ours") and dtype != args.dtypes[0]:
                    continue
                console.print(f"run {repeat + 1} of {args.repeats}: {side} {dtype}")
                others = [
                    one.first
                    for one in results
                    if one.side == side and one.dtype != dtype and one.steps
                ]
                results.append(run_side(side, dtype, args, 1.5 * min(others, default=SIDE_S)))
    return results


def table(results: list[Result], args: argparse.Namespace) -> Table:
    shown = Table(
        title=f"{args.prompts} x {GENERATIONS} completions of at most {args.new_tokens} tokens, seconds a step"
    )
    columns = (
        "side",
        "dtype",
        "first after",
        "generate",
        "train",
        "weights",
        "other",
        "step",
        "length",
    )
    for column in (*columns, "steady tok/s", "from start", "peak GB"):
        shown.add_column(column, justify="left" if column in ("side", "dtype") else "right")
    for one in results:
        if not one.steps:
            shown.add_row(one.side, one.dtype, f"> {one.first:.0f}")
            continue
        parts = [one.mean(part) for part in PARTS]
        seconds = one.mean("seconds")
        shown.add_row(
            one.side,
            "its own" if one.side.startswith("ours") else one.dtype,
            f"{one.first:.1f}",
            *(f"{value:.2f}" for value in (*parts, seconds - sum(parts), seconds)),
            f"{one.mean('tokens') / args.prompts / GENERATIONS:.0f}",
            f"{one.steady:.0f}",
            f"{one.from_start:.0f}",
            f"{one.peak / 1e9:.1f}",
        )
    return shown


def parts_table(results: list[Result]) -> Table:
    shown = Table(
        "side", "dtype", *COLUMNS, title="a step's training and a generation by operation, seconds"
    )
    for one in results:
        if one.parts:
            shown.add_row(one.side, one.dtype, *(f"{one.parts[column]:.2f}" for column in COLUMNS))
    return shown


def ratios(results: list[Result]) -> dict[str, float]:
    """Steady tokens a second of the better side of ours over each peer's, each in its best dtype (medians of runs)."""
    rates: dict[str, float] = {}
    ended = [one for one in results if one.steps]
    for side, dtype in {(one.side, one.dtype) for one in ended}:
        rate = statistics.median(
            one.steady for one in ended if (one.side, one.dtype) == (side, dtype)
        )
        rates[side] = max(rate, rates.get(side, 0.0))
    ours = max((rate for side, rate in rates.items() if side.startswith("ours")), default=0.0)
    return {
        side: ours / rate for side, rate in rates.items() if ours and not side.startswith("ours")
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="models/smollm2-135m", help="`make smollm2` builds it")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES[:-1])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--prompts", type=int, default=4, help="a step")
    parser.add_argument("--new_tokens", type=int, default=128, help="at most, a completion")
    parser.add_argument("--steps", type=int, default=3, help="a run; the first is a warm-up")
    parser.add_argument(
        "--repeats", type=int, default=1, help="runs of each side and dtype, alternating"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="the third step's generation and the training before it by operation; 3 steps at least, and slower ones",
    )
    parser.add_argument("--ours", default="", help="more flags for `swift rlhf`, one word")
    parser.add_argument(
        "--trl_venv", type=Path, default=HERE / ".venv-trl", help="is made where it is not there"
    )
    parser.add_argument(
        "--ms_swift_venv",
        type=Path,
        default=HERE.parent / ".venv-ms-swift",
        help="`make test-ms-swift`",
    )
    parser.add_argument("--keep", type=Path, help="folder for what the runs write")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument(
        "--check", action="store_true", help="end with 1 below 6 x TRL or 5 x ms-swift"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the side that runs
    console = Console(width=150)
    args.model = str(Path(args.model).resolve())
    if any(side.startswith("trl") for side in args.sides):
        install_trl(args.trl_venv, console)
    results = measure(args, console)
    console.print(table(results, args))
    if args.profile:
        console.print(parts_table(results))
    found = ratios(results)
    for side, ratio in sorted(found.items()):
        console.print(
            f"ours / {side}: {ratio:.2f}" + (f" (wanted: {GOALS[side]:g})" if side in GOALS else "")
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n")
    return int(args.check and any(found.get(side, 0.0) < goal for side, goal in GOALS.items()))


if __name__ == "__main__":
    sys.exit(main())
