"""Starting the trainer: this process becomes the worker, or torch's elastic launcher for several."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from swift_r1.arguments.world import World

WORKER_MODULE = "swift_r1.training.worker"
ELASTIC_MODULE = "swift_r1.launch.elastic"


def launch_training(args_json: Path, world: World, environ: Mapping[str, str]) -> NoReturn:
    """Replaces this process by the trainer, so that signals and exit codes are the trainer's own.

    Args:
        args_json: the file that `swift_r1.training.worker` reads.
        world: more than one process goes through torch's elastic launcher.
        environ: the trainer's whole environment.
    """
    if world.size == 1:
        own_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        replace_process(WORKER_MODULE, (str(args_json),), {**environ, **own_rank})
    replace_process(ELASTIC_MODULE, (str(args_json),), environ)


def replace_process(module: str, words: tuple[str, ...], environ: Mapping[str, str]) -> NoReturn:
    """`python -m module words...` in place of this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, "-m", module, *words], dict(environ))
