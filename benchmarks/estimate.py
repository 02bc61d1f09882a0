"""How far `swift estimate` is off: against runs made here, and against what others have published.

    examples/mini/make_model.sh countdown models/mini/countdown
    python benchmarks/estimate.py runs --output_dir output/estimate     # a few minutes on two idle cores
    python benchmarks/estimate.py published                             # seconds; benchmarks/estimate_published.yaml
    python benchmarks/estimate.py chips                                 # seconds: Qwen2.5's sizes on four GPUs

`runs` makes runs of the demo's model with several batch sizes and lengths, on one rank and on two, and through a
`swift rollout` with and without `--async_generate`. One run of each engine calibrates; the others are predicted from
its factors. A run that is in the folder already is not made again. The first step of a run warms up and is left out; of
the others each phase's fastest counts, since other programs slow a machine down and nothing speeds it up.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from swift_r1.cli.demo import rollout_server
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.lab.estimate.chips import chip_of
from swift_r1.lab.estimate.job import assumed, of_run
from swift_r1.lab.estimate.layout import Layout, estimate_layout
from swift_r1.lab.estimate.measured import read_measured, seconds_of
from swift_r1.lab.estimate.model import from_config
from swift_r1.lab.estimate.roles import Job
from swift_r1.lab.estimate.show import seconds
from swift_r1.lab.estimate.split import best_split
from swift_r1.lab.estimate.work import Round
from swift_r1.launch.colocated_servers import free_ports
from swift_r1.training.memory import GIB

HERE = Path(__file__).resolve().parent
SWIFT = (sys.executable, "-m", "swift_r1")
PUBLISHED = HERE / "estimate_published.yaml"
PHASES = ("generate", "train", "push", "step")
DEMO = HERE.parent / "examples" / "countdown_demo"
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
        "format",
        "--reward_weights",
        "1",
        "0.1",
        "--torch_dtype",
        "float32",
    ),
    *(
        "--gradient_checkpointing",
        "false",
        "--learning_rate",
        "1e-6",
        "--num_generations",
        "16",
        "--max_steps",
        "40",
    ),
    *(
        "--logging_steps",
        "1",
        "--save_steps",
        "1000",
        "--report_to",
        "none",
        "--add_version",
        "false",
    ),
)


@dataclass(frozen=True)
class Case:
    name: str
    completions: int
    tokens: int
    ranks: int = 1
    server: bool = False
    flags: tuple[str, ...] = ()


AHEAD = ("--async_generate", "true")
CASES = (
    Case("embedded, 128 completions", 128, 160),  # calibrates
    Case("embedded, 64 completions", 64, 160),
    Case("embedded, 256 completions", 256, 160),
    Case("embedded, 128 of at most 80 tokens", 128, 80),
    Case("embedded, 128, two ranks", 128, 160, 2, flags=("--deepspeed", "zero2")),
    Case("server, 128 completions", 128, 160, server=True),  # calibrates
    Case("server, 256 completions", 256, 160, server=True),
    Case("server, 128 of at most 80 tokens", 128, 80, server=True),
    Case("server, 128, ahead", 128, 160, server=True, flags=AHEAD),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("runs", "published", "chips"))
    parser.add_argument("--output_dir", type=Path, default=Path("output/estimate"))
    parser.add_argument("--model", type=Path, default=Path("models/mini/countdown"))
    args = parser.parse_args()
    console = Console(width=170)
    if args.what == "published":
        show_published(console)
    elif args.what == "chips":
        show_chips(console)
    else:
        show_runs(make_runs(args.output_dir.absolute(), args.model.absolute()), console)
    return 0


def make_runs(folder: Path, model: Path) -> dict[str, Path]:
    """The folder of each case's run."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {
        case.name: folder / "".join(c if c.isalnum() else "_" for c in case.name) for case in CASES
    }
    missing = [case for case in CASES if not (found[case.name] / "summary.json").exists()]
    for case in missing:
        if not case.server:
            train(case, model, found[case.name], ())
    if any(case.server for case in missing):
        with server(model, folder / "server.log") as port:
            for case in missing:
                if case.server:
                    address = ("--vllm_server_host", "127.0.0.1", "--vllm_server_port", str(port))
                    train(case, model, found[case.name], address)
    return found


def train(case: Case, model: Path, folder: Path, address: Sequence[str]) -> None:
    engine = ("--use_vllm", "true", *address) if address else ("--use_vllm", "false")
    words = [
        *SWIFT,
        "rlhf",
        *FLAGS,
        "--model",
        str(model),
        "--output_dir",
        str(folder),
        *engine,
        *case.flags,
    ]
    words += ["--per_device_train_batch_size", str(case.completions // case.ranks)]
    words += ["--max_completion_length", str(case.tokens)]
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut short
    with folder.with_suffix(".log").open("wb") as log:
        environ = os.environ | {"NPROC_PER_NODE": str(case.ranks)}
        if subprocess.run(words, stdout=log, stderr=subprocess.STDOUT, env=environ).returncode:
            sys.exit(f"{case.name} failed: see {log.name}")


@contextmanager
def server(model: Path, log: Path) -> Iterator[int]:
    """A `swift rollout` of the model, on the port that it is given."""
    (port,) = free_ports(1, "127.0.0.1")
    with rollout_server(model, port, log):
        yield port


def show_runs(runs: Mapping[str, Path], console: Console) -> None:
    table = Table(
        "run", *(f"{phase}: predicted, measured (ratio)" for phase in PHASES), pad_edge=False
    )
    errors: dict[str, list[float]] = {phase: [] for phase in PHASES}
    calibration: Path | None = None
    server_now = None
    for case in CASES:
        calibrates = case.server != server_now
        if calibrates:
            calibration, server_now = runs[case.name], case.server
        assert calibration is not None
        measured = seconds_of(runs[case.name], of=min)
        job, layout = of_run(
            runs[case.name], chip_of("cpu"), read_measured(calibration, chip_of("cpu"), min)
        )
        found = estimate_layout(job, layout)
        predicted = {name: found.phases.get(name, 0.0) for name in ("generate", "push")}
        predicted |= {
            "train": found.phases["train"] + found.phases["log-probs"],
            "step": found.step,
        }
        cells = []
        for phase in PHASES:
            real = measured.get(phase, 0.0)
            # waiting for the other side is in it
            if real < 0.05 or (phase != "step" and found.overlapped):
                cells.append("")
                continue
            ratio = predicted[phase] / real
            if not calibrates:
                errors[phase].append(ratio)
            cells.append(f"{predicted[phase]:.2f}, {real:.2f} ({ratio:.2f})")
        table.add_row(case.name + (" *" if calibrates else ""), *cells)
    console.print(table)
    console.print("* calibrates the rows below it")
    for phase, ratios in errors.items():
        console.print(f"{phase}: {about(ratios)}")


def about(ratios: Sequence[float]) -> str:
    """The geometric mean of ratios, and the one that is furthest off."""
    if not ratios:
        return "nothing to compare"
    mean = math.exp(fmean(math.log(one) for one in ratios))
    size = math.exp(fmean(abs(math.log(one)) for one in ratios))
    worst = max(ratios, key=lambda one: abs(math.log(one)))
    return f"{len(ratios)}; geometric mean of the ratios {mean:.2f}, of the error x {size:.2f}, worst {worst:.2f}"


def show_published(console: Console) -> None:
    """Step times that others have published against those that `swift estimate` predicts for the same work."""
    content = yaml.safe_load(PUBLISHED.read_text())
    table = Table(
        "system", "model", "GPUs", "layout", "measured", "predicted", "ratio", pad_edge=False
    )
    ratios: dict[str, list[float]] = {}
    for one in content["rows"]:
        for phase, measured in one["seconds"].items():
            predicted = published_seconds(one, content["models"][one["model"]])[phase]
            ratio = predicted / measured
            ratios.setdefault(one["system"], []).append(ratio)
            where = f"{one['replicas']} x {one['tensor_parallel']}"
            mode = ", ahead" if one.get("ahead") else ", taking turns"
            cells = (
                f"train {one['ranks']}, rollout {where}{mode}",
                f"{measured:.4g} s",
                f"{predicted:.4g} s",
            )
            name = one["model"] + ("" if phase == "step" else f", {phase}")
            table.add_row(
                one["system"], name, f"{one['gpus']} {one['chip']}", *cells, f"{ratio:.2f}"
            )
    console.print(table)
    for system, found in ratios.items():
        console.print(f"{system}: {about(found)}")
        if len(found) > 2:
            console.print(
                f"    after one factor, from its first row: {about([one / found[0] for one in found[1:]])}"
            )
    console.print(f"all: {about([ratio for found in ratios.values() for ratio in found])}")


# of Qwen2.5: width, feed-forward, layers, heads, key-value heads, vocabulary
SIZES = {
    "0.5B": (896, 4864, 24, 14, 2, 151_936),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936),
    "3B": (2048, 11_008, 36, 16, 2, 151_936),
    "7B": (3584, 18_944, 28, 28, 4, 152_064),
    "14B": (5120, 13_824, 48, 40, 8, 152_064),
    "32B": (5120, 27_648, 64, 40, 8, 152_064),
}


def show_chips(console: Console) -> None:
    """A round of 32 prompts of 256 tokens x 8 completions of 512, at most 1,024, in one optimizer step, on the fewest
    GPUs that all weights and AdamW's states fit on, and the best division of them."""
    names = ("layout", "GiB", "generate", "train", "products", "memory", "launches", "push")
    table = Table("chip", "model", *names, "a round", "tokens/s", pad_edge=False)
    for chip in ("h200", "h100", "a100", "rtx4090"):
        for name, sizes in SIZES.items():
            job = sized_job(sizes, chip)
            tries = (best_split(job, gpus) for gpus in (1, 2, 3, 4, 6, 8, 16, 24, 32, 64))
            best = next(one.best[0] for one in tries if one.best)
            parts = {**best.phases, **best.least}
            cells = [seconds(parts[phase]) for phase in names[2:]]
            rate = f"{job.round.generated_tokens / best.step:,.0f}"
            held = f"{best.memory[0].total / GIB:.1f}"
            table.add_row(chip, name, str(best.layout), held, *cells, seconds(best.step), rate)
    console.print(table)


def sized_job(sizes: Sequence[int], chip: str) -> Job:
    hidden, inner, layers, heads, shared, words = sizes
    config = {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "vocab_size": words,
        "tie_word_embeddings": hidden < 3584,
        "dtype": "bfloat16",
    }
    args = RlhfArguments(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=64,
        steps_per_generation=64,
        generation_batch_size=256,
        num_generations=8,
        max_length=512,
        max_completion_length=1024,
        use_vllm=True,
    )
    figures = chip_of(chip)
    work = Round(32, 8, 256, 512, 1024)
    most = figures.most_at_once
    return Job(args, from_config(config), work, figures, assumed(figures), 8, most=most)


def published_seconds(row: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, float]:
    """Of the step and its phases."""
    group, completions = row["group"], row["prompts"] * row["group"]
    own = completions // row["updates"] // row["ranks"]  # of a rank in an optimizer step
    micro = max(1, own // 4)
    steps = max(1, own // micro)
    args = RlhfArguments(  # log-probs of the policy and of the reference
        given=frozenset({"max_tokens_per_micro_batch", "gradient_checkpointing"}),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=steps,
        steps_per_generation=steps * row["updates"],
        generation_batch_size=micro * steps * row["updates"] * row["ranks"],
        num_generations=group,
        gradient_checkpointing=row["recomputes"],
        beta=0.01 if row.get("passes", 2) > 1 else 0.0,
        kl_in_reward=True,
        async_generate=row.get("ahead", False),
        use_vllm=True,
        weight_transport="nccl",
        torch_dtype="bfloat16",
    )
    chip, updates = chip_of(row["chip"]), row["updates"]
    job = Job(
        args=args,
        model=from_config(config),
        round=Round(row["prompts"], group, row["prompt"], row["mean"], row["longest"], updates),
        chip=chip,
        use=assumed(chip),
        per_node=8,
        most=row["most"],
    )
    found = estimate_layout(
        job, Layout(row["ranks"], 1, "server", row["replicas"], row["tensor_parallel"])
    )
    push = found.phases["push"]  # left out: these systems send every shard from where it is
    trained = found.phases["log-probs"] + found.phases["train"]
    step = max(trained, found.phases["generate"]) if found.overlapped else found.step - push
    return {**found.phases, "step": step}


if __name__ == "__main__":
    sys.exit(main())
