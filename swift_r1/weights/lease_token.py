"""The secret of the lease on a server's weights, in the run's folder: a resumed run need not wait for its own lease."""

from __future__ import annotations

import os
import re
from pathlib import Path

_TOKEN_FILE = ".lease"


def saved_token(run_dir: Path | None) -> str | None:
    """The token of the lease that a run held when it was killed: resumed, it need not wait for its own lease."""
    if run_dir is None or not (path := run_dir / _TOKEN_FILE).is_file():
        return None
    token = path.read_text(encoding="ascii", errors="replace").strip()
    return token if re.fullmatch("[0-9a-f]{32}", token) else None


def save_token(run_dir: Path, token: str) -> None:
    """For `saved_token`; only the run's user can read it."""
    path = run_dir / _TOKEN_FILE
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(token)
