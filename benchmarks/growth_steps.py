"""Whether a long run grows: memory and CPU time a step of all its processes, wall time a step, and the run's folder.

    python benchmarks/growth_steps.py                          # 300 steps in the trainer's process
    python benchmarks/growth_steps.py --layout server          # through `swift rollout` (vLLM)
    python benchmarks/growth_steps.py --sizes 5000 --plot true # hours, on a busy machine; draws docs/images

The demo's model with random weights, 2 prompts x 4 completions of 16 tokens a step, a checkpoint every tenth of the
run, of which two are kept. Memory is PSS without mapped files. `last / first` compares the medians of the last tenth of
the steps and of that after the first checkpoint. On a machine with other work read the CPU time instead of the seconds.
A run that is stopped (SIGTERM to its trainer) is shown as far as it came.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from growth_plot import growth
from rich.console import Console
from rich.table import Table

DEMO = Path(__file__).parent.parent / "examples" / "countdown_demo"
SWIFT = (sys.executable, "-m", "swift_r1")
FLAGS = (
    *(
        "--rlhf_type",
        "grpo",
        "--external_plugins",
        str(DEMO / "plugin.py"),
        "--dataset",
        "countdown_mini",
    ),
    *(
        "--reward_funcs",
        "countdown",
        "repetition",
        "--num_generations",
        "4",
        "--max_completion_length",
        "16",
    ),
    *("--torch_dtype", "float32", "--learning_rate", "1e-5", "--gradient_checkpointing", "false"),
    *("--per_device_train_batch_size", "8", "--num_train_epochs", "100000", "--report_to", "none"),
    *(
        "--save_total_limit",
        "2",
        "--eval_strategy",
        "no",
        "--add_version",
        "false",
        "--logging_steps",
        "1",
    ),
)
SAMPLES = 200  # of memory and CPU time, in a run
SERVER_STOP_S = 60

Sample = dict[str, tuple[float, float]]  # of each kind of process MB, and CPU seconds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[300], help="steps of a run each")
    parser.add_argument("--layout", choices=("embedded", "server"), default="embedded")
    parser.add_argument("--folder", type=Path, help="where the runs go [a temporary folder]")
    parser.add_argument("--plot", choices=("true", "false"), default="false")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        model = folder / "model"
        subprocess.run(
            [sys.executable, str(DEMO / "tiny_model.py"), "--output_dir", str(model)], check=True
        )
        flags = [*FLAGS, "--model", str(model)]
        others = {}
        if args.layout == "server":
            others, port = stack.enter_context(server(model, folder / "server.log"))
            flags += [
                "--use_vllm",
                "true",
                "--vllm_mode",
                "server",
                "--vllm_server_host",
                "127.0.0.1",
            ]
            flags += ["--vllm_server_port", str(port)]
        else:
            flags += ["--use_vllm", "false"]
        for steps in args.sizes:
            measured(
                folder / f"{args.layout}-{steps}",
                steps,
                flags,
                others,
                args.layout,
                args.plot == "true",
            )
    return 0


@contextlib.contextmanager
def server(model: Path, log: Path) -> Iterator[tuple[dict[str, psutil.Process], int]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        *SWIFT,
        "rollout",
        "--model",
        str(model),
        "--port",
        str(port),
        "--torch_dtype",
        "float32",
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield {"server": psutil.Process(process.pid)}, port  # the trainer waits for it
        finally:
            process.terminate()
            try:
                process.wait(SERVER_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def measured(
    run: Path,
    steps: int,
    flags: Sequence[str],
    others: dict[str, psutil.Process],
    layout: str,
    plot: bool,
) -> None:
    """Runs so many steps, and shows what they took."""
    words = [*SWIFT, "rlhf", *flags, "--max_steps", str(steps), "--output_dir", str(run)]
    words += ["--save_steps", str(max(1, steps // 10))]
    samples: list[tuple[int, Sample]] = []
    with (run.parent / f"{run.name}.log").open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)
        roots = {"trainer": psutil.Process(process.pid)} | others
        while process.poll() is None:
            done = steps_of(run)
            if done and (not samples or done >= samples[-1][0] + max(1, steps // SAMPLES)):
                samples.append((done, sample(roots)))
            time.sleep(0.2)
    if process.returncode:  # a signal ends it in order, and what it did until then counts
        print(f"swift rlhf ended with {process.returncode}: see {run}.log", file=sys.stderr)
    if samples:
        show(run, samples, max(1, steps // 10), layout, plot)


def steps_of(run: Path) -> int:
    """The last step in the log; its lines have about the same length, so the end is enough."""
    with (
        contextlib.suppress(OSError, ValueError, IndexError),
        (run / "logging.jsonl").open("rb") as file,
    ):
        file.seek(max(0, file.seek(0, os.SEEK_END) - 10_000))
        return int(json.loads(file.read().split(b"\n")[-2])["step"])
    return 0


def sample(roots: dict[str, psutil.Process]) -> Sample:
    """The processes under `roots` by what they are, those of a kind added up."""
    found: defaultdict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for name, root in roots.items():
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                kind = name if process == root else f"{name}: {kind_of(process)}"
                memory, times = held(process.pid) / 1e6, process.cpu_times()
                before = found[kind]
                found[kind] = (before[0] + memory, before[1] + times.user + times.system)
    return dict(found)


def held(pid: int) -> int:
    """Bytes of PSS without mapped files, whose share falls and rises with other programs of the same libraries."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(
        int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))
    )


def kind_of(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    known = {"resource_tracker": "resource tracker", "spawn_main": "reward workers", "VLLM": "vLLM"}
    return next((kind for part, kind in known.items() if part in words), process.name())


def show(
    run: Path, samples: Sequence[tuple[int, Sample]], warm: int, layout: str, plot: bool
) -> None:
    """`warm` steps are left out: memory grows until the first checkpoint."""
    steps = samples[-1][0]
    kinds = sorted({kind for _, one in samples for kind in one})
    tenth = steps / 10
    early = [one for one in samples if warm < one[0] <= warm + tenth]
    late = [one for one in samples if one[0] > 9 * tenth]
    table = Table(
        "process",
        "MB early",
        "MB late",
        "last / first",
        "CPU ms a step early",
        "late",
        "last / first",
    )

    def cpu(part: Sequence[tuple[int, Sample]], kind: str) -> float:
        (first, begin), (last, end) = part[0], part[-1]
        return 1000 * (end[kind][1] - begin[kind][1]) / (last - first)

    for kind in kinds:
        parts = [[one for one in part if kind in one[1]] for part in (early, late)]
        if all(len(part) > 1 for part in parts):
            memory = [statistics.median(one[kind][0] for _, one in part) for part in parts]
            times = [cpu(part, kind) for part in parts]
            ratio = f"{times[1] / times[0]:.3f}" if times[0] > 0.5 else ""
            cells = [f"{memory[0]:.1f}", f"{memory[1]:.1f}", f"{memory[1] / memory[0]:.3f}"]
            table.add_row(kind, *cells, f"{times[0]:.1f}", f"{times[1]:.1f}", ratio)
    log = [json.loads(line) for line in (run / "logging.jsonl").read_bytes().splitlines()]
    seconds = [line["time/step"] for line in log if "time/step" in line]
    walls = [seconds[int(first) : int(first + tenth)] for first in (warm, 9 * tenth)]
    console = Console(width=120)
    console.print(f"[bold]{layout}, {steps:,} steps[/bold]")
    console.print(table)
    if all(walls):  # not where it was stopped before the first checkpoint
        early_s, late_s = map(statistics.median, walls)
        console.print(
            f"wall time a step: {early_s:.3f} s early, {late_s:.3f} s late: {late_s / early_s:.3f}"
        )
    files = Table("file", "bytes", "bytes a step", "files")
    for name, paths in sorted(by_top_folder(run).items()):
        size = sum(path.stat().st_size for path in paths)
        files.add_row(name, f"{size:,}", f"{size / steps:,.0f}", f"{len(paths):,}")
    console.print(files)
    rows = [
        {"steps": done} | {kind: one[0] for kind, one in found.items()} for done, found in samples
    ]
    growth_rows = rows[:: max(1, len(rows) // 20)]
    series = {kind: kind for kind in kinds if sum(kind in row for row in rows) > len(rows) / 2}
    growth(
        f"steps-{layout}",
        "steps",
        growth_rows,
        series,
        y_label="MB (PSS without files)",
        log=False,
        plot=plot,
    )


def by_top_folder(run: Path) -> dict[str, list[Path]]:
    found = defaultdict(list)
    for path in run.rglob("*"):
        if path.is_file():
            found[path.relative_to(run).parts[0]].append(path)
    return found


if __name__ == "__main__":
    sys.exit(main())
