"""`make gpu`: what only a GPU can show, in ten minutes, as a page and a JSON file (docs/gpu.md).

    python scripts/gpu                                  # installs into .venv, then all parts
    python scripts/gpu --python python3                 # with the packages that this Python has; installs nothing
    python scripts/gpu --parts machine rates train-0.5b # some of them; --list names all
    python scripts/gpu --rehearse                       # all of it on a CPU, with tiny sizes
    python scripts/gpu --python python3 --out $OUT --budget 540 --commit abc1234   # in a copy without .git

Needs Python 3.11 or newer and nothing else: parts run with the Python of .venv, each in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from parts import PARTS
from report import Report, name_of_chip
from runner import Machine, run_parts

ROOT = Path(__file__).resolve().parents[2]
BUDGET_S = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", nargs="+", metavar="PART", choices=[part.name for part in PARTS])
    parser.add_argument(
        "--list", action="store_true", help="name the parts, in their order, and end"
    )
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, help="seconds for all parts [%(default)s]"
    )
    parser.add_argument("--python", help="a Python with the packages: nothing is installed")
    parser.add_argument(
        "--out", type=Path, help="folder of the results: a page, its data and the log [results/gpu]"
    )
    parser.add_argument("--commit", help="of this copy, where git does not tell")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="the same control flow on a CPU; default --out: a new folder",
    )
    parser.add_argument(
        "--model", type=Path, help="for the layouts, in place of one of random weights"
    )
    args = parser.parse_args()
    if args.list:
        for part in PARTS:
            print(f"{part.name:16}{part.seconds:5.0f} s  {part.what}")
        return 0
    # what runs is ended as after Ctrl-C
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    chosen = [part for part in PARTS if args.parts is None or part.name in args.parts]
    if args.python is not None:
        chosen = [part for part in chosen if part.name != "install"]
    if args.rehearse:  # on a CPU that others may use
        chosen = [replace(part, limit_s=3 * part.limit_s) for part in chosen]
    with tempfile.TemporaryDirectory(prefix="swift-r1-gpu-") as work:
        machine = machine_of(args, Path(work))
        out = args.out or (
            Path(tempfile.mkdtemp(prefix="gpu-rehearsal-"))
            if args.rehearse
            else ROOT / "results" / "gpu"
        )
        report = Report.open(
            out, "rehearsal" if args.rehearse else name_of_chip(), args.commit or commit()
        )
        run_parts(chosen, machine, args.budget, report)
    print(f"written: {report.page}")
    return report.exit_code


def machine_of(args: argparse.Namespace, work: Path) -> Machine:
    """Where parts run: the repository's package first, no hub, and in a rehearsal no GPU."""
    python = args.python or str(ROOT / ".venv" / "bin" / "python")
    environ = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    }
    environ |= {
        "HF_HUB_OFFLINE": "1",
        "GPU_WORK": str(work),
        "WANDB_MODE": "offline",
        "PYTHONUNBUFFERED": "1",
    }
    # what is imported is compiled then; all of it would take a minute
    environ |= {"PIP_NO_COMPILE": "1"}
    if args.model is not None:
        environ["GPU_MODEL"] = str(args.model.resolve())
    if args.rehearse:
        environ |= {"GPU_REHEARSAL": "1", "CUDA_VISIBLE_DEVICES": ""}
    return Machine(python, ROOT, os.environ | environ, gpus_of(args.rehearse))


def gpus_of(rehearse: bool) -> int:
    """How many GPUs there are; a rehearsal has as many as any part needs."""
    if rehearse:
        return max(part.gpus for part in PARTS)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([one for one in visible.split(",") if one.strip()])
    try:
        said = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in said.splitlines())


def commit() -> str:
    try:
        words = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        return (
            subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
            or "unknown"
        )
    except OSError:  # without git
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
