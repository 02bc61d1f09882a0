"""Saves a checkpoint again and again, each time in a process that exits at a file operation, one later each time.

The audit event of an operation comes before it, so exiting at every one is exiting before and after each. Run by
test_saving.py: `exit_at_operation.py MODEL FOLDER STRIDE`, where a stride of 4 tries every fourth operation, from one of
the first four by chance; prints the number of operations.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from swift_r1.models.loading import load_model
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.checkpoint.folder import fault_of, list_checkpoints, newest_whole
from swift_r1.training.checkpoint.saving import Saver
from swift_r1.training.checkpoint.state import Fingerprint, RunState
from swift_r1.training.optimizer import OptimizerConfig

EVENTS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.chmod"}
EXITED, SAVED = 9, 0


def main(model: Path, folder: Path, stride: int) -> None:
    from transformers import AutoTokenizer

    config = OptimizerConfig(1.0, 0.0, 0.9, 0.95, 1e-8, 1.0)
    backend = LocalBackend(load_model(model, None, gradient_checkpointing=False), config)
    ranks = Ranks(0, 1, torch.device("cpu"), None)
    run_dir, first = folder / "run", folder / "first"
    saver = Saver(
        run_dir, backend, backend.reference(), AutoTokenizer.from_pretrained(model), ranks, 1, True
    )
    run_dir.mkdir()
    save(saver, 1)
    run_dir.rename(first)
    count = random.randrange(stride)
    while True:
        shutil.rmtree(run_dir, ignore_errors=True)
        shutil.copytree(first, run_dir)
        pid = os.fork()
        if pid == 0:
            exit_at(count, run_dir)
            save(saver, 2)
            os._exit(SAVED)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (EXITED, SAVED), code
        # Whatever has the name of a checkpoint is whole, and there is one.
        assert all(fault_of(path) is None for path in list_checkpoints(run_dir)), count
        usable = newest_whole(run_dir)
        assert usable is not None and RunState.read(usable).step == int(usable.name[-1]), count
        if code == SAVED:
            break
        # What it left does not disturb the next save (tried after a third of them, for time).
        if count // stride % 3 == 0:
            save(saver, 2)
            assert [path.name for path in list_checkpoints(run_dir)] == ["checkpoint-2"], count
            assert count_leftovers(run_dir) <= 1 and not list(run_dir.glob(".writing-*")), count
        count += stride
    print(count)


def count_leftovers(run_dir: Path) -> int:
    """Folders half removed: one at most, which the next removal of that name takes away."""
    return sum(name.startswith(".removing-") for name in os.listdir(run_dir))


def save(saver: Saver, step: int) -> None:
    state = RunState(step, 1, {}, step, 1, "id", 0, {}, {}, {}, None, {}, Fingerprint({}, 1, "", 1))
    saver.save(step, state, {}, last=True)


def exit_at(number: int, run_dir: Path) -> None:
    """From here on the process counts what it does to files in `run_dir`, and exits before operation `number`."""
    seen = 0

    def count_one() -> None:
        nonlocal seen
        if seen == number:
            os._exit(EXITED)
        seen += 1

    def hook(event: str, args: tuple[Any, ...]) -> None:
        opened = event == "open" and str(args[0]).startswith(str(run_dir))
        if event in EVENTS or opened:
            count_one()

    fsync = os.fsync

    def counted_fsync(descriptor: int) -> None:
        count_one()
        fsync(descriptor)

    os.fsync = counted_fsync
    sys.addaudithook(hook)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
