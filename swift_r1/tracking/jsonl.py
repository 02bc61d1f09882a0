"""JSON lines on disk: one object a line, each written whole and at once."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


class JsonLines:
    """Appends objects to `path`. Non-finite numbers become null, so that every line is standard JSON."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json_line(row))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def json_line(row: Mapping[str, Any]) -> str:
    """One line of standard JSON, its end included."""
    return json.dumps(_standard(row), ensure_ascii=False, allow_nan=False) + "\n"


def _standard(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _standard(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_standard(item) for item in value]
    if value is None or isinstance(value, str | int | bool):
        return value
    # A dataset column may hold anything; what JSON cannot say is written as text rather than lost.
    return str(value)
