"""What of a run's folder `scripts/reference/files.toml` has no entry for."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from tests.conftest import REPO

RUN: Sequence[Mapping[str, Any]] = tomllib.loads(
    (REPO / "scripts" / "reference" / "files.toml").read_text(encoding="utf-8")
)["run"]


def undescribed(paths: Sequence[str]) -> list[str]:
    """Returns the paths in the folder of a run that have no entry."""
    patterns = [_pattern(one["path"]) for one in RUN]
    return sorted(
        path for path in paths if not any(pattern.fullmatch(path) for pattern in patterns)
    )


def _pattern(path: str) -> re.Pattern[str]:
    parts = re.split(r"(<\w+>)", path)
    text = "".join("[^/]+" if part[:1] == "<" else re.escape(part) for part in parts)
    return re.compile(text + (".*" if path.endswith("/") else ""))
