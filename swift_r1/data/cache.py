"""Where prepared rows are kept: under a hash of the data, the preprocessor and the settings that made them."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from swift_r1.data.store import MAKING

CACHE_FOLDER = "SWIFT_R1_CACHE"
RUN_ONLY = "run-"  # begins the names of stores that no later run may take
_DAY = 86_400
_KEPT_DAYS = 30  # since it was last used
_LEFT_OVER_DAYS = 2  # what one run alone was to use


def data_cache() -> Path:
    """The folder of prepared rows: in SWIFT_R1_CACHE, else in the user's cache folder."""
    named = os.environ.get(CACHE_FOLDER)
    if named:
        return Path(named) / "data"
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "swift-r1" / "data"


def writable_cache() -> Path:
    """That folder where it can be written to, else one in the system's folder for temporary files."""
    folder = data_cache()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        pass
    else:
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    return Path(tempfile.gettempdir()) / f"swift-r1-data-{os.getuid()}"


def touch(folder: Path) -> None:
    """Notes that a store was used; one that cannot be noted (a shared, read-only cache) is used all the same."""
    with contextlib.suppress(OSError):
        os.utime(folder)


def remove_old(cache: Path) -> None:
    """Removes stores that were not used for long. What another process removes meanwhile is no fault."""
    now = time.time()
    for entry in cache.iterdir():
        kept = _LEFT_OVER_DAYS if entry.name.startswith((MAKING, RUN_ONLY)) else _KEPT_DAYS
        with contextlib.suppress(OSError):
            if now - entry.stat().st_mtime > kept * _DAY:
                shutil.rmtree(entry, ignore_errors=True)
