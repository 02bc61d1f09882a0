"""A root for sandboxes: a folder with a few of the machine's programs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

PROGRAMS = ("sh", "ls", "cat", "id", "stat", "chown", "rm", "mkdir", "readlink")


def folder_root(folder: Path) -> Path:
    """Makes a root with PROGRAMS and their libraries."""
    for name in PROGRAMS:
        program = shutil.which(name, path="/usr/bin:/bin")
        assert program is not None
        said = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for file in {program, *re.findall(r"/\S+", said)}:
            there = folder / file.removeprefix("/").removeprefix("usr/")
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, there)
    (folder / "usr").mkdir()
    for name in ("bin", "lib", "lib64"):
        if (folder / name).is_dir():
            (folder / "usr" / name).symlink_to(f"../{name}")
    return folder
