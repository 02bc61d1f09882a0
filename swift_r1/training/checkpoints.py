"""Checkpoints that are whole or not there: written under a temporary name, hashed, synced, then renamed."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from swift_r1.errors import RunFailed

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint-(\d+)")
_TEMPORARY = ".writing-"
_REMOVING = ".removing-"


def save_checkpoint(run_dir: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Makes `checkpoint-<step>` from what `write` puts into the folder it is given.

    Raises:
        RunFailed: where the disk refuses; what was there before is untouched.
    """
    final = run_dir / f"checkpoint-{step}"
    temporary = run_dir / f"{_TEMPORARY}{final.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        write(temporary)
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        entries = {str(path.relative_to(temporary)): _hashed_and_synced(path) for path in files}
        manifest = temporary / MANIFEST
        manifest.write_text(json.dumps({"step": step, "files": entries}, indent=1), encoding="utf-8")
        _hashed_and_synced(manifest)
        for folder in {path.parent for path in files} | {temporary}:
            _sync_folder(folder)
        if final.exists():
            _remove(final)
        temporary.rename(final)
        _sync_folder(run_dir)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunFailed(f"{final} cannot be saved: {error}; earlier checkpoints are untouched") from error
    return final


def list_checkpoints(run_dir: Path) -> list[Path]:
    """The run's checkpoints, oldest first."""
    found = [(int(match[1]), path) for path in run_dir.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def remove_old_checkpoints(run_dir: Path, keep: int | None) -> None:
    """Leaves the newest `keep` (None: all)."""
    if keep is None:
        return
    for path in list_checkpoints(run_dir)[:-keep]:
        _remove(path)


def _remove(path: Path) -> None:
    # Renamed first: a kill half-way through leaves no folder that looks like a checkpoint.
    doomed = path.with_name(f"{_REMOVING}{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


def _hashed_and_synced(path: Path) -> dict[str, str | int]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
        os.fsync(file.fileno())
    return {"sha256": digest.hexdigest(), "bytes": path.stat().st_size}


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
