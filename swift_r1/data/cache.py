"""The folder of what was prepared from data: rows under a hash each, which `datasets` keeps there, and their images under
hashes of their own; and what is removed from it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

RUN_ONLY = "run-"  # begins the names of rows that no later run may take
_MAKING = ".making-"  # begins the names of images that are not whole yet
IMAGES = "images"
_DAY_S = 86_400
_KEPT_S = 30 * _DAY_S  # since it was last used
_LEFT_OVER_S = 2 * _DAY_S  # of what only one run was to use


def cache_folder() -> Path:
    """Returns where it is: in SWIFT_R1_CACHE, else in the user's cache folder; in the system's folder for
    temporary files where that cannot be written to."""
    named = os.environ.get("SWIFT_R1_CACHE")
    own = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "swift-r1"
    folder = Path(named or own) / "data"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    return Path(tempfile.gettempdir()) / f"swift-r1-data-{os.getuid()}"


def kept_rows(cache: Path, name: str) -> Path:
    """Returns the folder in which `datasets` keeps the rows of that name (`from_generator`'s `fingerprint`)."""
    return cache / "generator" / f"default-fingerprint={name}"


def keep_image(name: str, content: bytes) -> Path:
    """Returns the file of that name among the images of the cache, written where it is not there yet. Raises OSError."""
    path = cache_folder() / IMAGES / name[:2] / name
    if mark_used(path):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(prefix=_MAKING, dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(draft, path)
    finally:
        Path(draft).unlink(missing_ok=True)
    return path


def mark_used(path: Path) -> bool:
    """Notes that a file of the cache is used now; returns whether it is there."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    except OSError:  # a shared, read-only cache
        return path.is_file()
    return True


def remove_old(cache: Path) -> None:
    """Removes rows that were not used for long; once a day images too."""
    _remove_older([*cache.glob("*.lock"), *kept_rows(cache, "").parent.glob("*")])
    images = cache / IMAGES
    # a folder's own time says when its images were last looked through
    if images.is_dir() and time.time() - images.stat().st_mtime > _DAY_S and mark_used(images):
        _remove_older(images.glob("*/*"))


def _remove_older(entries: Iterable[Path]) -> None:
    now = time.time()
    left_over = (_MAKING, kept_rows(Path(), RUN_ONLY).name)
    for entry in entries:
        kept = _LEFT_OVER_S if entry.name.startswith(left_over) else _KEPT_S
        with contextlib.suppress(OSError):  # another process has removed it
            if now - entry.stat().st_mtime > kept:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
