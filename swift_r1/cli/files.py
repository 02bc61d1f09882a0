"""Files that commands write: what their errors become, and `--json FILE`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swift_r1.errors import UsageError


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Raises UsageError, which begins with `what`, where the block raises OSError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{what}: {error.strerror or error}") from error


def json_file(name: str | None) -> Path | None:
    """Returns the file, before it is made. Raises UsageError: there is no such folder."""
    file = None if name is None else Path(name).expanduser()
    if file is not None and not file.parent.is_dir():
        raise UsageError(f"--json {file}: there is no folder {file.parent}")
    return file


def write_json(file: Path, content: object) -> None:
    """Writes the file whole or not at all. Raises UsageError: it cannot be written."""
    from swift_r1.lab.evaluation.store import write_whole

    with naming(f"--json {file}"):
        write_whole(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
