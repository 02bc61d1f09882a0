"""Adapters and the model under them: found, looked over and merged, for every command that takes `--adapters`."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from swift_r1.checking.model_folder import model_faults
from swift_r1.errors import UsageError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MERGED = "swift-r1-merged-"


def base_of(adapters: Path, model: str | None) -> str:
    """The model under the adapters: `model`, else the one that they name.

    Raises:
        UsageError: the folder holds no adapters, they do not say what is under them, or that cannot be loaded.
    """
    if not (adapters / CONFIG).is_file() or not (adapters / WEIGHTS).is_file():
        raise UsageError(
            f"--adapters {adapters} holds no adapters ({CONFIG} and {WEIGHTS}): give a checkpoint of --train_type lora "
            "or qlora"
        )
    try:
        named = json.loads((adapters / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (ValueError, AttributeError) as error:
        raise UsageError(f"--adapters {adapters}: {CONFIG} is no JSON object") from error
    base = model or named
    if not base:
        raise UsageError(f"--adapters {adapters} does not say which model is under it: give --model")
    if faults := model_faults(str(base), os.environ):
        raise UsageError(*(f"--adapters {adapters}: {fault}" for fault in faults))
    return str(base)


def merged_folder(adapters: Path, base: str, environ: Mapping[str, str]) -> Path:
    """A new folder with the model of both, for this process or the one that takes its place; `remove_merged` ends it.

    Folders whose process has died are removed first.

    Raises:
        UsageError: the adapters are not of this model, or there is no room for it.
    """
    from swift_r1.models.merging import merge
    from swift_r1.runtime.libraries import quiet_libraries

    quiet_libraries()
    room = Path(environ.get("TMPDIR") or tempfile.gettempdir())
    for old in room.glob(f"{_MERGED}*"):
        owner = re.fullmatch(rf"{_MERGED}(\d+)-\w+", old.name)
        if owner is not None and not Path(f"/proc/{owner[1]}").exists():
            shutil.rmtree(old, ignore_errors=True)
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{_MERGED}{os.getpid()}-", dir=room))
    except OSError as error:
        raise UsageError(f"--adapters {adapters} cannot be merged below {room}: {error.strerror}") from error
    try:
        merge(base, adapters, folder, None)
    except OSError as error:
        remove_merged(folder)
        raise UsageError(f"--adapters {adapters} cannot be merged below {room}: {error.strerror or error}") from error
    except BaseException:
        remove_merged(folder)
        raise
    return folder


def remove_merged(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
