"""Runs with a fault each, and healthy ones: what `swift why` says of them.

    python examples/mini/make_model.py countdown models/mini/countdown
    python benchmarks/diagnosis.py --model models/mini/countdown --faults true
    python benchmarks/diagnosis.py --runs output/mini/*/* --record tests/lab/diagnosis/healthy.jsonl

A fault is one run of the demo's model and task, 64 completions a step, with one thing wrong on purpose. For each it
prints what was to be found and what was. `--runs` are folders of runs that are there already. `--record` writes what
the detectors read of each run, with four digits, to a file that tests read.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from swift_r1.lab.diagnosis.past import DETECTORS
from swift_r1.lab.diagnosis.watch import Diagnosis
from swift_r1.record.folder import RunFolder, find_runs
from swift_r1.record.lines import read_rows

HERE = Path(__file__).resolve().parent
DEMO = HERE.parent / "examples" / "countdown_demo"
COMMON = {
    "rlhf_type": "grpo",
    "external_plugins": [DEMO / "plugin.py", HERE / "diagnosis_plugin.py"],
    "dataset": "countdown_mini",
    "reward_funcs": ["countdown"],
    "num_train_epochs": 100,
    "torch_dtype": "float32",
    "per_device_train_batch_size": 32,
    "gradient_accumulation_steps": 2,
    "num_generations": 8,
    "max_completion_length": 160,
    "learning_rate": 3e-4,
    "adam_beta2": 0.999,
    "lr_scheduler_type": "constant",
    "weight_decay": 0,
    "gradient_checkpointing": "false",
    "max_steps": 20,
    "save_steps": 1000,
    "logging_steps": 1,
    "report_to": "none",
    "add_version": "false",
}
SMALL = {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 1}
# What is found, the flags that differ, and the rest of `Fault`.
FAULTS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "impossible problems": ("no signal", {"dataset": "impossible", "max_steps": 12}, {}),
    "a majority as the label": (
        "rewards saturated, entropy collapse",
        {
            "reward_funcs": ["countdown", "majority"],
            "reward_weights": [0, 1],
            "learning_rate": 1e-3,
            "max_steps": 40,
        },
        {},
    ),
    "length that pays": (
        "length explosion",
        {"reward_funcs": ["countdown", "longer"], "reward_weights": [0.1, 1], "max_steps": 30},
        {},
    ),
    "too short a limit": ("truncation", {"max_completion_length": 23, "max_steps": 12}, {}),
    "a learning rate ten times too high": (
        "KL running off",
        {"learning_rate": 3e-3, "beta": 1e-3},
        {},
    ),
    "sixteen passes over a round": (
        "ratios off",
        {"num_iterations": 16, "max_steps": 96, "learning_rate": 1e-3},
        {},
    ),
    "weights that never arrive": (
        "engine mismatch",
        {},
        {"environ": {"DIAGNOSIS_FAULT": "stale engine"}},
    ),
    "a reward that accepts anything": (
        "rewards saturated",
        {"reward_funcs": ["anything"], "max_steps": 12},
        {},
    ),
    "a reward that fails now and then": (
        "rewards invalid",
        {"reward_funcs": ["countdown", "sometimes_nan"], "max_steps": 12},
        {},
    ),
    "brevity that pays": (
        "evaluation falling",
        {"reward_funcs": ["countdown", "shorter"], "reward_weights": [0.1, 1]}
        | {"eval_on_start": "true", "eval_steps": 6, "eval_limit": 128, "num_generations_eval": 4},
        {},
    ),
    "repetition that pays": ("repetition", {"reward_funcs": ["again"], "learning_rate": 1e-3}, {}),
    "a prompt the model never saw": (
        "template broken",
        {
            "prompt_template": "r1",
            "reward_funcs": ["countdown", "format"],
            "reward_weights": [1, 0.1],
            "max_steps": 10,
        },
        {},
    ),
    "a learning rate too low for 16 bits": (
        "weights not moving",
        {"torch_dtype": "bfloat16", "learning_rate": 1e-9, "max_steps": 14},
        {},
    ),
    "a reward that keeps what it sees": (
        "memory creeping",
        SMALL
        | {
            "reward_funcs": ["leaking"],
            "reward_isolation": "inline",
            "learning_rate": 1e-7,
            "max_steps": 48,
        },
        {},
    ),
    "a rank that is stopped now and then": (
        "slow rank",
        {"gradient_accumulation_steps": 1, "max_steps": 16},
        {"processes": 2},
    ),
    "forty problems, thirty times": (
        "data repeated",
        {"dataset": "repeated", "learning_rate": 1e-4},
        {},
    ),
}


@dataclass(frozen=True)
class Fault:
    """A run of the demo's task. Of several `processes` rank 1 is stopped three quarters of the time."""

    name: str
    finding: str
    flags: Mapping[str, Any]
    environ: Mapping[str, str]
    processes: int = 1

    def run(self, model: Path, folder: Path) -> None:
        """Raises SystemExit where it fails."""
        flags = COMMON | {"model": model, "output_dir": folder} | self.flags
        words = [word for name, value in flags.items() for word in (f"--{name}", *_words(value))]
        environ = os.environ | self.environ | {"NPROC_PER_NODE": str(self.processes)}
        with (folder.parent / f"{folder.name}.log").open("wb") as log:
            command = [sys.executable, "-m", "swift_r1", "rlhf", *words]
            run = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)
            ended = threading.Event()
            if self.processes > 1:
                threading.Thread(target=_hinder, args=(run.pid, ended), daemon=True).start()
            try:
                code = run.wait()
            finally:
                ended.set()
                run.terminate()
        if code:
            raise SystemExit(f"{self.name}: exit code {code}, see {log.name}")


def _words(value: Any) -> list[str]:
    return [str(one) for one in (value if isinstance(value, list) else [value])]


def _hinder(launcher: int, ended: threading.Event) -> None:
    """Stops rank 1 for 30 of every 40 ms once it trains."""
    rank = None
    while rank is None and not ended.wait(0.2):
        for one in psutil.Process(launcher).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                if one.environ().get("RANK") == "1" and "swift_r1.cli.rank" in one.cmdline():
                    rank = one
    try:
        while rank is not None and not ended.is_set():
            rank.send_signal(signal.SIGSTOP)
            ended.wait(0.03)
            rank.send_signal(signal.SIGCONT)
            ended.wait(0.01)
    except psutil.NoSuchProcess:
        return


def recorded(run: RunFolder) -> dict[str, Any]:
    """What the detectors read of a run: flags, plan, and columns of the log."""
    log = Diagnosis(run.path)
    log.refresh()
    wanted = {name for one in DETECTORS for name in one.metrics(log)} | {
        "step",
        "loss",
        "reward",
        "grad_norm",
    }
    wanted |= {
        "learning_rate",
        "completions/mean_length",
        "rollout/kept_mass",
        "dynamic_sample/kept_without_signal",
    }
    wanted |= {"time/slowest_rank", "time/slowest_server"}
    wanted |= {
        name
        for name in log.series
        if name.startswith("rewards/") and name.endswith(("/mean", "/std"))
    }
    wanted |= {name for name in log.series if name.startswith("eval/") and "avg@" in name}
    rows, _ = read_rows(run.path / "logging.jsonl")
    args = (
        "reward_funcs",
        "reward_weights",
        "rlhf_type",
        "torch_dtype",
        "max_completion_length",
        "use_gym_env",
        "vllm_engine_kwargs",
    )
    plan = ("optimizer_steps_per_round", "prompts_per_round", "prompts_per_epoch")
    return {
        "args": {name: run.args.get(name) for name in args},
        "plan": {name: run.plan.get(name) for name in plan},
        "log": {
            name: [_rounded(row.get(name)) for row in rows]
            for name in sorted(wanted & set().union(*rows))
        },
    }


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def record(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    file.write_text(
        "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows), encoding="utf-8"
    )


def show(name: str, wanted: Sequence[str], run: RunFolder) -> bool:
    """Says what was found; whether it is what was wanted."""
    log = Diagnosis(run.path)
    log.refresh()
    good = set(log.findings) == set(wanted)
    print(
        f"{'good' if good else 'NOT SO'}  {name}: to be found: {', '.join(wanted) or 'nothing'}",
        flush=True,
    )
    for one in log.findings.values():
        print(f"    {one.line}", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/mini/countdown"))
    parser.add_argument("--faults", nargs="*", help="names, or true for all of them")
    parser.add_argument("--runs", nargs="*", default=[], help="folders of healthy runs")
    parser.add_argument("--output_dir", type=Path, default=Path("output/diagnosis"))
    parser.add_argument("--record", type=Path, help="file to write what the detectors read to")
    args = parser.parse_args()
    good, rows = True, []
    for name in FAULTS if args.faults == ["true"] else args.faults or ():
        finding, flags, more = FAULTS[name]
        folder = args.output_dir / name.replace(" ", "-")
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not (folder / "summary.json").exists():
            Fault(name, finding, flags, **({"environ": {}} | more)).run(args.model, folder)
        [run] = find_runs([folder])
        good &= show(name, finding.split(", "), run)
        rows.append({"name": name, "finding": finding} | recorded(run))
    for run in find_runs(args.runs) if args.runs else ():
        good &= show(run.name, [], run)
        rows.append({"name": run.name, "finding": None} | recorded(run))
    if args.record:
        record(args.record, rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
