"""What `swift why` says of runs with one fault each, and of healthy ones.

    examples/mini/make_model.sh countdown models/mini/countdown
    examples/mini/make_model.sh words models/mini/words
    make smollm2
    python benchmarks/diagnosis.py benchmarks/faults/*.yaml
    python benchmarks/diagnosis.py benchmarks/faults/second.yaml --only 'weights that arrive every eighth round'
    python benchmarks/diagnosis.py --runs output/mini/*/*

`benchmarks/faults/` names the runs: flags over those of a base, and for a fault what is to be found: signs of trouble, or
the verdict and its first cause. `first.yaml` and `second.yaml` were written by hands that knew neither detectors nor
thresholds. A run that has ended already is judged again. `--runs` are folders of other runs, which should be healthy.
`--record` writes what is read of each run, with four digits, to files that tests read.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any

import psutil
import yaml

from swift_r1.lab.diagnosis.past import DETECTORS
from swift_r1.lab.diagnosis.watch import Diagnosis
from swift_r1.record.folder import RunFolder, find_runs
from swift_r1.record.lines import read_rows

# What a verdict reads beside the metrics of the signs.
_READ = re.compile(
    r"step|loss|reward|reward_stderr|grad_norm|learning_rate|entropy|completions/(mean_length|repeated)|rollout/kept_mass"
    r"|rollout/(staleness/mean|weight_version)|dynamic_sample/kept_without_signal|time/(slowest_\w+|step)"
    r"|rewards/.+/(mean|std|stderr|equal_differ|seconds)|recheck/.+|policy/moved|kl/pull|advantages/mean_size"
    r"|eval/.+/(accuracy|avg@\d+.*)"
)
_FLAGS = (
    *(
        "reward_funcs",
        "reward_weights",
        "rlhf_type",
        "torch_dtype",
        "max_completion_length",
        "use_gym_env",
    ),
    *(
        "vllm_engine_kwargs",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "beta",
        "learning_rate",
        "max_grad_norm",
    ),
    *(
        "weight_decay",
        "importance_sampling_level",
        "advantage_estimator",
        "dataset_shuffle",
        "gradient_accumulation_steps",
    ),
)
_PLAN = (
    *(
        "optimizer_steps_per_round",
        "prompts_per_round",
        "prompts_per_epoch",
        "completions_per_round",
        "num_generations",
    ),
)
NEUTRAL = ("nothing", "too few completions")


@dataclass(frozen=True)
class Judgement:
    """What is found in a run: causes, then signs, by name; and whether that is right."""

    verdict: str
    found: Sequence[str]
    verdict_right: bool
    first_right: bool

    @property
    def mark(self) -> str:
        return "good  " if self.verdict_right and self.first_right else "NOT SO"


@dataclass(frozen=True)
class Job:
    """A run with a fault, or a healthy one, and where it is; without a base it is there already."""

    entry: Mapping[str, Any]
    folder: Path
    healthy: bool
    base: Mapping[str, Any] | None = None

    @property
    def words(self) -> list[str]:
        """Returns the flags of the run; one that is null leaves the base's out."""
        assert self.base is not None
        flags = {"model": self.base["model"], "output_dir": self.folder} | self.base["flags"]
        flags |= self.entry.get("flags") or {}
        return [
            word
            for name, value in flags.items()
            if value is not None
            for word in (f"--{name}", *_words(value))
        ]

    def run(self) -> int:
        """Runs it, unless it has ended; returns its exit code."""
        if self.base is None or (self.folder / "summary.json").exists():
            return 0
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        ranks = self.entry.get("hindered_ranks", 1)
        environ = {"NPROC_PER_NODE": ranks, **(self.entry.get("environ") or {})}
        command = [sys.executable, "-m", "swift_r1", "rlhf", *self.words]
        with (self.folder.parent / f"{self.folder.name}.log").open("wb") as log:
            run = subprocess.Popen(
                command,
                env=os.environ | {name: str(value) for name, value in environ.items()},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            ended = threading.Event()
            if ranks > 1:
                threading.Thread(target=_hinder, args=(run.pid, ended), daemon=True).start()
            try:
                return run.wait()
            finally:
                ended.set()
                run.terminate()

    def judged(self) -> Judgement:
        """Returns what is found in the run, and whether it is what was to be found."""
        log = Diagnosis(self.folder)
        log.refresh()
        verdict = log.verdict
        causes = verdict.causes if verdict is not None else ()
        names = [cause.name for cause in causes]
        kind = verdict.reward.kind if verdict is not None else "too early"
        first = next(iter([*names, *log.findings]), "nothing")
        found = [*names, *log.findings]
        if self.healthy:
            return Judgement(kind, found, True, first in NEUTRAL)
        if "signs" in self.entry:
            return Judgement(kind, found, True, set(self.entry["signs"]) <= set(log.findings))
        words = " ".join([first, *(cause.evidence for cause in causes[:1])])
        right = any(cause.removeprefix("other: ") in words for cause in self.entry["cause"])
        return Judgement(kind, found, kind in self.entry["verdict"], right)

    def recorded(self) -> dict[str, Any]:
        """Returns what is read of the run: flags, plan, and columns of the log; and what is to be found."""
        [run] = find_runs([self.folder])
        log = Diagnosis(run.path)
        log.refresh()
        rows, _ = read_rows(run.path / "logging.jsonl")
        wanted = {name for one in DETECTORS for name in one.metrics(log)}
        wanted |= {name for name in set().union(*rows) if _READ.fullmatch(name)}
        judged = self.judged()
        return {
            "name": self.entry["name"],
            "found": [judged.verdict, *judged.found],
            "right": [judged.verdict_right, judged.first_right],
            **{
                key: self.entry.get(key)
                for key in ("signs", "verdict", "cause")
                if key in self.entry
            },
            "args": {name: run.args.get(name) for name in _FLAGS},
            "plan": {name: run.plan.get(name) for name in _PLAN},
            "log": {
                name: [_rounded(row.get(name)) for row in rows]
                for name in sorted(wanted & set().union(*rows))
            },
        }


def _words(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [json.dumps(value)]
    values = value if isinstance(value, list) else [value]
    return [str(one).lower() if isinstance(one, bool) else str(one) for one in values]


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


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
            rank.send_signal(SIGSTOP)
            ended.wait(0.03)
            rank.send_signal(SIGCONT)
            ended.wait(0.01)
    except psutil.NoSuchProcess:
        return


def jobs_of(file: Path, output: Path, only: Sequence[str] | None) -> list[Job]:
    """Returns the runs that a file of `benchmarks/faults/` names."""
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    jobs = []
    for kind in ("faults", "healthy"):
        for entry in content.get(kind, ()):
            if only is None or entry["name"] in only:
                name = re.sub(r"[^a-z0-9]+", "-", f"{file.stem} {kind} {entry['name']}".lower())
                base = content["bases"][entry["base"]]
                jobs.append(Job(entry, output / name, kind == "healthy", base))
    return jobs


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="of benchmarks/faults/")
    parser.add_argument("--only", nargs="*", help="names of entries")
    parser.add_argument("--runs", nargs="*", default=[], help="folders of healthy runs")
    parser.add_argument("--output_dir", type=Path, default=Path("output/diagnosis"))
    parser.add_argument("--processes", type=int, default=1, help="runs at once")
    parser.add_argument(
        "--record", type=Path, help="folder for blind_faults.jsonl and blind_healthy.jsonl"
    )
    args = parser.parse_args()
    jobs = [job for file in args.files for job in jobs_of(file, args.output_dir, args.only)]
    runs: list[RunFolder] = find_runs(args.runs) if args.runs else []
    jobs += [Job({"name": run.name}, run.path, True) for run in runs]
    counts = {False: [0, 0, 0], True: [0, 0, 0]}
    recorded: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    with ThreadPoolExecutor(args.processes) as pool:
        for job, code in zip(jobs, pool.map(Job.run, jobs), strict=True):
            name = job.entry["name"]
            if code:
                print(f"FAILED  {name}: exit code {code}, see {job.folder}.log", flush=True)
                counts[job.healthy][0] += 1
                continue
            judged = job.judged()
            count = counts[job.healthy]
            counts[job.healthy] = [
                count[0] + 1,
                count[1] + judged.verdict_right,
                count[2] + judged.first_right,
            ]
            wanted = [
                f"{key} {' or '.join(job.entry[key])}"
                for key in ("signs", "verdict", "cause")
                if key in job.entry
            ]
            print(
                f"{judged.mark}  {name}: {judged.verdict}; {', '.join(judged.found) or 'nothing'} "
                f"({'; '.join(wanted) or 'healthy'})",
                flush=True,
            )
            if args.record:
                recorded[job.healthy].append(job.recorded())
    for healthy, (count, verdicts, first) in counts.items():
        what = "healthy runs, nothing found in" if healthy else "faults, verdict right in"
        numbers = first if healthy else f"{verdicts}, first finding in {first}"
        print(f"{count} {what} {numbers}")
    for healthy, rows in recorded.items():
        if rows:
            lines = [json.dumps(row, separators=(",", ":")) + "\n" for row in rows]
            (args.record / ("blind_healthy.jsonl" if healthy else "blind_faults.jsonl")).write_text(
                "".join(lines)
            )
    return 0 if all(count[0] == count[1] == count[2] for count in counts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
