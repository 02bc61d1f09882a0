"""The folder of what was prepared from data: stores of rows under a hash each, and their images under hashes of their
own, beside them; and what is removed from it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

RUN_ONLY = "run-"  # begins the names of stores that no later run may take
MAKING = ".making-"  # begins the names of files that are not whole yet
IMAGES = "images"
_DAY_S = 86_400
_KEPT_S = 30 * _DAY_S  # since it was last used
_LEFT_OVER_S = 2 * _DAY_S  # of what only one run was to use


def cache_folder() -> Path:
    """Returns where stores are kept: in SWIFT_R1_CACHE, else in the user's cache folder; in the system's folder for
    temporary files where that cannot be written to."""
    named = os.environ.get("SWIFT_R1_CACHE")
    own = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "swift-r1"
    folder = Path(named or own) / "data"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    return Path(tempfile.gettempdir()) / f"swift-r1-data-{os.getuid()}"


def keep_image(name: str, content: bytes) -> Path:
    """Returns the file of that name among the images of the cache, written where it is not there yet. Raises OSError."""
    path = cache_folder() / IMAGES / name[:2] / name
    if mark_used(path):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(prefix=MAKING, dir=path.parent)
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
    """Removes stores that were not used for long, and those of earlier versions, which were folders; once a day images
    too."""
    _remove_older(entry for entry in cache.iterdir() if entry.name != IMAGES)
    images = cache / IMAGES
    # a folder's own time says when its images were last looked through
    if images.is_dir() and time.time() - images.stat().st_mtime > _DAY_S and mark_used(images):
        _remove_older(images.glob("*/*"))


def _remove_older(entries: Iterable[Path]) -> None:
    now = time.time()
    for entry in entries:
        kept = _LEFT_OVER_S if entry.name.startswith((MAKING, RUN_ONLY)) else _KEPT_S
        with contextlib.suppress(OSError):  # another process has removed it
            if now - entry.stat().st_mtime > kept:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
