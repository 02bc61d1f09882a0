"""The pages, one module each; importing one registers it (`shell.view_page`)."""

from __future__ import annotations

import importlib


def load() -> None:
    """Imports every page, in the order of the navigation."""
    for name in ("overview", "completions", "tokens", "time", "group"):
        importlib.import_module(f"{__name__}.{name}")
