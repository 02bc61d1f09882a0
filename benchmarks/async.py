"""Seconds and rewards of the same run with rounds that are waited for or prefetched.

    examples/mini/make_model.sh countdown models/mini/countdown
    python benchmarks/async.py --model models/mini/countdown --external_plugins examples/countdown_demo/plugin.py \\
      --dataset countdown_mini --reward_funcs countdown format --learning_rate 3e-4

Every flag that is not its own goes to `swift rlhf`. Choose sizes at which `generate` and `train` are alike. A mode is
`synchronous` or `ahead:K` (`--async_generate true --max_staleness K`); the others are compared with the first. With
`--long_tail` 1 in 16 completions has `--new_tokens` tokens, the others a tenth.

Pinned to one core each, server and trainer stand for two devices. A row is a run: its seconds from the first weights
sent to the last step, what generating and training took a step (synchronous: one after the other), how old the tokens
were on average and at most, tokens a second, and the mean reward of the last quarter of the steps. The machine must be
quiet.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from swift_r1.launch.environment import usable_cpus
from swift_r1.wire.client import RolloutClient

START_S, RUN_S, END_S = 900, 7200, 40
PLUGIN = Path(__file__).with_name("async_plugin.py")
TAILED = Path(__file__).resolve().with_name("long_tail_server.py")


@dataclass(frozen=True)
class Result:
    """A run; seconds a step but for `seconds`, the whole run's."""

    seconds: float
    generate: float
    train: float
    sync: float
    staleness: float
    oldest: float
    tokens: float  # a second
    reward: float


def words_on(cpus: Sequence[int] | None) -> list[str]:
    return [] if cpus is None else ["taskset", "-c", ",".join(map(str, cpus))]


def environment(cpus: Sequence[int] | None) -> Mapping[str, str]:
    if cpus is None:
        return os.environ
    bound = {
        "OMP_NUM_THREADS": str(len(cpus)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
    }
    return os.environ | bound


@contextmanager
def server(args: argparse.Namespace, cpus: Sequence[int] | None, log: Path) -> Iterator[str]:
    """A `swift rollout` on these CPUs; gives its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(TAILED)] if args.long_tail else ["-m", "swift_r1", "rollout"]
    words = [*words_on(cpus), sys.executable, *command, "--model", args.model, "--port", str(port)]
    words += [
        "--max_model_len",
        "512",
        "--torch_dtype",
        args.torch_dtype,
        "--vllm_enforce_eager",
        str(args.vllm_enforce_eager).lower(),
    ]
    with log.open("wb") as out:
        environ = {**environment(cpus), "PYTHONPATH": str(TAILED.parents[1])}
        process = subprocess.Popen(words, env=environ, stdout=out, stderr=subprocess.STDOUT)
    try:
        with RolloutClient(f"http://127.0.0.1:{port}") as client:
            client.wait_until_ready(START_S, report=lambda _line: None)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def train(
    args: argparse.Namespace, url: str, cpus: Sequence[int] | None, seed: int, mode: str
) -> Result:
    """One `swift rlhf` run on these CPUs."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        flags = {
            "rlhf_type": "grpo",
            "model": args.model,
            "external_plugins": PLUGIN,
            "dataset": "counting",
            "reward_funcs": "digits",
            "reward_num_workers": 1,
            "num_generations": 8,
            "per_device_train_batch_size": args.completions,
            "max_completion_length": args.new_tokens,
            "max_steps": args.steps,
            "learning_rate": args.learning_rate,
            "lr_scheduler_type": "constant",
            "gradient_checkpointing": "false",
            "seed": seed,
            "torch_dtype": args.torch_dtype,
            "use_vllm": "true",
            "vllm_server_base_url": url,
            "weight_check_steps": 0,
            "save_steps": 10**6,
            "save_only_model": "true",
            "logging_steps": 1,
            "report_to": "none",
            "output_dir": run,
            "add_version": "false",
        }
        _, ahead, staleness = mode.partition(":")
        if ahead:
            flags |= {"async_generate": "true", "max_staleness": staleness}
        flags = {name: value for name, value in flags.items() if f"--{name}" not in args.more}
        words = [
            *args.more,
            *(word for name, value in flags.items() for word in (f"--{name}", str(value))),
        ]
        words = [*words_on(cpus), sys.executable, "-m", "swift_r1", "rlhf", *words]
        done = subprocess.run(
            words,
            env=dict(environment(cpus)),
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"swift rlhf ended with {done.returncode}:\n{done.stderr[-3000:]}")
        lines = [json.loads(line) for line in (run / "logging.jsonl").read_bytes().splitlines()]
        steps = [line for line in lines if "loss" in line]

        def mean(name: str) -> float:
            return statistics.fmean(line.get(name, 0.0) for line in steps[1:])

        quarter = max(1, len(steps) // 4)
        lengths = [line["completions/mean_length"] for line in steps]
        # Of the loop, first publication and last checkpoint included.
        seconds = json.loads((run / "summary.json").read_text())["seconds"]
        return Result(
            seconds=seconds,
            generate=mean("rollout/ahead_seconds")
            if ahead
            else mean("time/generate") + mean("time/reward"),
            train=mean("time/train"),
            sync=mean("time/sync"),
            staleness=mean("rollout/staleness/mean"),
            oldest=max(line.get("rollout/staleness/max", 0.0) for line in steps),
            tokens=sum(lengths) * args.completions / seconds,
            reward=statistics.fmean(line["reward"] for line in steps[-quarter:]),
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--completions", type=int, default=32, help="a step")
    parser.add_argument("--new_tokens", type=int, default=64, help="at most, a completion")
    parser.add_argument("--learning_rate", type=float, default=1e-5)
    parser.add_argument("--modes", nargs="+", default=["synchronous", "ahead:1"])
    parser.add_argument("--long_tail", action="store_true")
    parser.add_argument("--torch_dtype", default="float32", help="of trainer and server")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--layouts", nargs="+", default=["pinned", "shared"], choices=["pinned", "shared"]
    )
    parser.add_argument(
        "--vllm_enforce_eager", action="store_true", help="starts sooner, runs slower"
    )
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args, args.more = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the server
    cpus = usable_cpus()
    if "pinned" in args.layouts and len(cpus) < 2:
        parser.error("pinned needs two CPUs")
    results: dict[str, dict[str, list[Result]]] = {}
    for layout in args.layouts:
        own, other = ((cpus[0],), (cpus[1],)) if layout == "pinned" else (None, None)
        with (
            tempfile.TemporaryDirectory() as folder,
            server(args, own, Path(folder, "server.log")) as url,
        ):
            runs: dict[str, list[Result]] = {mode: [] for mode in args.modes}
            results[layout] = runs
            for seed in args.seeds:
                for mode in runs:
                    runs[mode].append(train(args, url, other, seed, mode))
                    print(
                        f"{layout}, seed {seed}, {mode}: {runs[mode][-1]}",
                        file=sys.stderr,
                        flush=True,
                    )
    show(args, results)
    if args.json:
        values = {
            layout: {mode: [vars(one) for one in runs] for mode, runs in modes.items()}
            for layout, modes in results.items()
        }
        args.json.write_text(json.dumps(values, indent=1))
    return 0


def show(args: argparse.Namespace, results: Mapping[str, Mapping[str, Sequence[Result]]]) -> None:
    console = Console(width=150)
    table = Table(title=f"{args.steps} steps of {args.completions} completions")
    figures = [field.name for field in dataclasses.fields(Result)]
    for column in ("layout", "seed", "mode", *figures):
        table.add_column(column, justify="left" if column in ("layout", "mode") else "right")
    for layout, modes in results.items():
        for number, seed in enumerate(args.seeds):
            for mode, runs in modes.items():
                table.add_row(
                    layout,
                    str(seed),
                    mode,
                    *(f"{getattr(runs[number], name):.3g}" for name in figures),
                )
    console.print(table)
    for layout, modes in results.items():
        first = modes[args.modes[0]]
        for mode, runs in modes.items():
            ratios = [two.tokens / one.tokens for one, two in zip(first, runs, strict=True)]
            rewards = [one.reward for one in runs]
            spread = statistics.stdev(rewards) if len(runs) > 1 else 0.0
            console.print(
                f"{layout}, {mode}: {statistics.fmean(ratios):.2f} times the tokens a second ({min(ratios):.2f} to "
                f"{max(ratios):.2f}); reward {statistics.fmean(rewards):.3f} (spread of seeds {spread:.3f})"
            )


if __name__ == "__main__":
    sys.exit(main())
