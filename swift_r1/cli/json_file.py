"""The file of a command's `--json FILE`."""

from __future__ import annotations

import json
from pathlib import Path

from swift_r1.errors import UsageError


def json_file(name: str | None) -> Path | None:
    """Returns the file, before it is made. Raises UsageError: there is no such folder."""
    file = None if name is None else Path(name).expanduser()
    if file is not None and not file.parent.is_dir():
        raise UsageError(f"--json {file}: there is no folder {file.parent}")
    return file


def write_json(file: Path, content: object) -> None:
    """Writes the file whole or not at all. Raises UsageError: it cannot be written."""
    from swift_r1.lab.evaluation.store import write_whole

    try:
        write_whole(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UsageError(f"--json {file}: {error.strerror or error}") from error
