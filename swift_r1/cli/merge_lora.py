"""`swift merge-lora`: one model out of a model and the adapters that were trained over it, and the same in a temporary
folder for commands that take `--adapters`."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from swift_r1.cli.files import naming
from swift_r1.errors import EXIT_OK, UsageError
from swift_r1.flags.adapters import adapter_config
from swift_r1.flags.fields import flag
from swift_r1.flags.parser import Command, parse_arguments
from swift_r1.launch.checks.model_folder import model_faults

_MERGED = "swift-r1-merged-"


@dataclass(frozen=True, kw_only=True)
class MergeArguments(Command):
    """Merge."""

    command: ClassVar[str] = "merge-lora"
    adapters: str = flag(
        "", "folder of the adapters: a checkpoint of --train_type lora or qlora", required=True
    )
    model: str | None = flag(
        None, "the model under them (default: the one that adapter_config.json names)"
    )
    output_dir: str | None = flag(
        None, "folder of the merged model (default: that of the adapters with -merged)"
    )


HELP = (
    """swift merge-lora --adapters FOLDER [--model M] [--output_dir D]

Writes a model that needs no adapters: what the rollout server was given in training, number for number.""",
    MergeArguments,
    "swift merge-lora --adapters output/model/v0-20261121-120000/checkpoint-100",
)


def run(words: Sequence[str]) -> int:
    """Runs the command. Raises UsageError: the folder holds no adapters, their model is not there, or the output folder
    is not empty or cannot be written."""
    args = parse_arguments(MergeArguments, words)
    adapters = Path(args.adapters).expanduser()
    output = Path(args.output_dir or f"{args.adapters.rstrip('/')}-merged").expanduser()
    base = base_model(adapters, args.model)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--output_dir {output} exists and is not empty")
    from swift_r1.models.merging import merge

    with naming(f"--output_dir {output}"):
        final = output.resolve()
        final.parent.mkdir(parents=True, exist_ok=True)
        # a merge that is stopped leaves nothing that looks like a model
        with tempfile.TemporaryDirectory(prefix=f".{final.name}-", dir=final.parent) as folder:
            merge(base, adapters, Path(folder, final.name))
            Path(folder, final.name).rename(final)
    print(f"merged model: {output}")
    return EXIT_OK


def base_model(adapters: Path, model: str | None) -> str:
    """Returns the model under the adapters: `model`, else the one that they name; UsageError where the folder holds no
    adapters, they do not name their model, or it cannot be loaded."""
    base = model or adapter_config("--adapters", adapters).get("base_model_name_or_path")
    if not base:
        raise UsageError(
            f"--adapters {adapters} does not say which model is under it: give --model"
        )
    faults = model_faults(str(base), os.environ)
    if faults:
        raise UsageError(*(f"--adapters {adapters}: {fault}" for fault in faults))
    return str(base)


def merged_folder(adapters: Path, base: str, environ: Mapping[str, str]) -> Path:
    """Returns a new temporary folder with the merged model, for this process or the one that replaces it, which removes
    it.

    Folders whose process has died are removed first. UsageError where the adapters are not of this model, or there is
    no room for it.
    """
    from swift_r1.models.merging import merge
    from swift_r1.runtime.libraries import quiet_libraries

    quiet_libraries()
    room = Path(environ.get("TMPDIR") or tempfile.gettempdir())
    for old in room.glob(f"{_MERGED}*"):
        owner = re.fullmatch(rf"{_MERGED}(\d+)-\w+", old.name)
        if owner is not None and not Path(f"/proc/{owner[1]}").exists():
            shutil.rmtree(old, ignore_errors=True)
    with naming(f"--adapters {adapters} cannot be merged below {room}"), ExitStack() as cleanup:
        folder = Path(tempfile.mkdtemp(prefix=f"{_MERGED}{os.getpid()}-", dir=room))
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        merge(base, adapters, folder)
        cleanup.pop_all()
    return folder
