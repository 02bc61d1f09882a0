"""Checkpoints that are whole or not there: written under a temporary name, hashed, synced, then renamed."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError

from swift_r1.runtime.files import read_text, regular

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
Entry = Mapping[str, str | int]  # of a file in the manifest: `sha256` (hex) and `bytes`
_NAME = re.compile(r"checkpoint-\d+")
_TEMPORARY = ".writing-"
_REMOVING = ".removing-"
_ASIDE = "aside-"


class Draft:
    """`checkpoint-<step>` in the making: a folder under a temporary name, into which every rank writes. Once a write
    has failed, this rank writes nothing more."""

    def __init__(self, run_dir: Path, step: int) -> None:
        self.final = run_dir / f"checkpoint-{step}"
        self.folder = run_dir / f"{_TEMPORARY}{self.final.name}"
        # files that were hashed and synced while they were written
        self.hashed: dict[str, Entry] = {}
        self.fault: str | None = None  # why a write failed

    def attempt(self, work: Callable[[], None]) -> None:
        if self.fault is None:
            try:
                work()
            except (OSError, SafetensorError) as error:
                self.fault = str(error)

    def write(self, name: str, write: Callable[[Path], Entry]) -> None:
        self.attempt(lambda: self.hashed.update({name: write(self.folder / name)}))

    def open(self) -> None:
        """Makes the folder, empty."""
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.mkdir()

    def publish(self) -> None:
        """Gives it its name, on rank 0; files that are not in `hashed` are read again."""
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        entries: dict[str, Entry] = {}
        for path in files:
            name = str(path.relative_to(self.folder))
            if name not in self.hashed:
                sync(path)
            entries[name] = self.hashed.get(name) or {
                "sha256": _digest(path),
                "bytes": path.stat().st_size,
            }
        manifest = self.folder / MANIFEST
        manifest.write_text(
            json.dumps({"step": _step_of(self.final), "files": entries}, indent=1), encoding="utf-8"
        )
        sync(manifest)
        for folder in {path.parent for path in files} | {self.folder}:
            sync(folder)
        # One of that step is there only where another history has not been set aside.
        if self.final.exists():
            _remove(self.final)
        self.folder.rename(self.final)
        sync(self.final.parent)

    def drop(self) -> None:
        """What was there before it is untouched."""
        shutil.rmtree(self.folder, ignore_errors=True)


def list_checkpoints(run_dir: Path) -> list[Path]:
    """The run's checkpoints, oldest first."""
    return sorted((path for path in run_dir.iterdir() if _NAME.fullmatch(path.name)), key=_step_of)


def fault_of(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, by the hashes in its manifest; None where it is whole. Reads every file, several
    at a time: a core hashes less than a disk reads."""
    threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "hash")
    try:
        manifest = json.loads(read_text(checkpoint / MANIFEST))
        for name, entry in manifest["files"].items():
            size = (checkpoint / name).stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size} bytes instead of {entry['bytes']}"
        digests = threads.map(lambda name: _digest(checkpoint / name), manifest["files"])
        for (name, entry), digest in zip(manifest["files"].items(), digests, strict=True):
            if digest != entry["sha256"]:
                return f"{name} is not what was written: its hash differs"
    except FileNotFoundError as error:
        return (
            f"{Path(error.filename).name} is missing"
            if checkpoint.is_dir()
            else "there is no such folder"
        )
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is not a manifest"
    finally:
        threads.shutdown(cancel_futures=True)
    return None


def newest_whole(run_dir: Path) -> Path | None:
    """The newest checkpoint that is whole, by its hashes; newer ones are warned about."""
    for path in reversed(list_checkpoints(run_dir)):
        fault = fault_of(path)
        if fault is None:
            return path
        logger.warning("%s is skipped: %s", path, fault)
    return None


def set_aside_later(run_dir: Path, step: int) -> None:
    """Renames checkpoints after `step` to `aside-...`: they are broken, or of a history that is not continued."""
    for path in (path for path in list_checkpoints(run_dir) if _step_of(path) > step):
        name = f"{_ASIDE}{path.name}"
        number = sum(1 for _ in run_dir.glob(f"{name}*"))
        renamed = path.rename(path.with_name(f"{name}-{number}" if number else name))
        logger.warning(
            "%s is renamed to %s: the run continues from step %d", path, renamed.name, step
        )


def link_checkpoints(run_dir: Path, best_step: int | None) -> None:
    """Points `last` at the newest checkpoint and `best` at that of `best_step`; a link of something that is not there
    goes."""
    found = {_step_of(path): path.name for path in list_checkpoints(run_dir)}
    for name, step in (("last", max(found, default=-1)), ("best", best_step)):
        link = run_dir / name
        new = run_dir / f".{name}"
        try:
            if step in found:
                new.unlink(missing_ok=True)
                new.symlink_to(found[step])
                new.rename(link)
            elif link.is_symlink():
                link.unlink()
        except OSError as error:
            logger.warning(
                "%s cannot be made (--create_checkpoint_symlink): %s", link, error.strerror or error
            )


def remove_old_checkpoints(run_dir: Path, keep: int | None, best_step: int | None = None) -> None:
    """Leaves the newest `keep` (None: all), and that of `best_step`."""
    if keep is None:
        return
    for path in list_checkpoints(run_dir)[:-keep]:
        if _step_of(path) != best_step:
            _remove(path)


def _remove(path: Path) -> None:
    # Renamed first: a kill half-way through leaves no folder that looks like a checkpoint.
    doomed = path.with_name(f"{_REMOVING}{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _digest(path: Path) -> str:
    with open(path, "rb", opener=regular) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """A file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
